"""`axolotl-unlearn request run`: check, train, measure, verdict, hand over, record.

Steps in a row (`axolotl_unlearn.requests.steps`): a run that was stopped anywhere goes on with the
step that was not finished. The result is handed over (``model/``) only when its verdict is good or
somebody accepted it with a reason, which the record repeats.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder, strip
from axolotl_unlearn.requests import bound, measure
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.requests.record import tried, write
from axolotl_unlearn.requests.request import Request, cores, digest, held, one_line, write_json
from axolotl_unlearn.requests.rows import read_config
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.verdict import exact, verdict
from axolotl_unlearn.requests.ways import WAY, WAYS, way_of


def run_request(
    folder: Path | str,
    *,
    accept: str | None = None,
    threads: int | None = None,
    console: Console | None = None,
    way: str | None = None,
    repeat: bool = False,
    processes: int = 1,
) -> dict[str, Any]:
    """Run or resume a request; returns what verdict.json holds.

    Args:
        accept: Why a model is handed over although its verdict is not good.
        threads: Of the commands; default all cores.
        way: One of `ways.WAYS`, or auto; default that of an earlier start, or auto.
        repeat: Of retrain: train twice and compare the weights.
        processes: Of each training.

    Raises:
        UnlearnError: A step failed, the request was run before, or the verdict is not good.
    """
    request = Request.load(folder)
    if accept is not None and not one_line(accept, "--accept").strip():
        raise UnlearnError(
            "--accept needs a reason, which the record repeats.", code="requests.no-reason"
        )
    if (name := request.folder.resolve().name) != request.id:
        raise UnlearnError(
            f"{folder} is request {request.id!r} under the name {name!r}; name the folder as it "
            "was, or make the request again.",
            code="requests.renamed",
        )
    Ledger(request.folder.parent).refuse_twice(request.id)
    with ExitStack() as stack:
        if not request.at_home and request.root.is_dir():
            place = request.folder.absolute()
            stack.enter_context(chdir(request.root))
            request = Request.load(place)
        stack.callback(os.umask, os.umask(0o077))
        # Of two requests at once each would train on the rows that the other deletes.
        stack.enter_context(held(request.folder.parent))
        run = stack.enter_context(running(request, threads, console, processes))
        take(request, way)
        carry_out(request, run, accept, repeat)
        return json.loads(request.path("verdict.json").read_text("utf-8"))


def carry_out(request: Request, run: Steps, accept: str | None, repeat: bool) -> None:
    """The steps of a request."""
    check(request)
    way_of(request.way["way"]).make(request, run, repeat)
    with run.step(
        "measure",
        "evaluate before and after, attack, look for earlier requests",
        output=request.path("eval", "earlier.json"),
        inputs=sorted(request.path("eval-data").glob("*.jsonl")),
        settings=[
            *(measure.ATTACKS, measure.ANSWER_TOKENS, request.way["way"]),
            len(Ledger(request.folder.parent).accepted()),
        ],
    ) as due:
        if due:
            with run.log("measure") as log, redirect_stdout(log), redirect_stderr(log):
                measure.measure(request)
    judged = request.path("verdict.json")
    with run.step("verdict", "verdict", output=judged, settings=accept) as due:
        if due:
            decide(request, accept)
    with run.step("model", "hand over") as due:
        if due:
            hand_over(request)
    with run.step("record", "record", output=request.path("record.json")) as due:
        if due:
            write(request.folder)


@contextmanager
def running(
    request: Request,
    threads: int | None = None,
    console: Console | None = None,
    processes: int = 1,
) -> Iterator[Steps]:
    """Steps below ``work/``; kept customers' rows are cached there too, and go with it."""
    work = private_folder(request.path("work"))
    cache = {"HF_DATASETS_CACHE": str((work / "cache").absolute())}
    with held(work) as lock:
        yield Steps(work, lock, cache, threads or cores(), console or Console(), processes)


def take(request: Request, way: str | None) -> None:
    """Prepare the way and write it down in ``way.json``.

    Raises:
        UnlearnError: The way is not open to this request.
    """
    path = request.path(WAY)
    if way is None:
        way = request.way["way"] if path.is_file() else "auto"
    if way == "auto":
        from axolotl_unlearn.requests.ways.plan import choose, plan

        way = choose(plan(request))
    if way not in WAYS:
        raise UnlearnError(f"--way {way}: use {', '.join(WAYS)} or auto.")
    write_json(path, way_of(way).prepare(request))


def check(request: Request) -> None:
    """Rows, base, config, packages and model are those of `request new`.

    Raises:
        UnlearnError: The first that is not.
    """
    for part, known in request.facts["digests"].items():
        path = request.rows(part)
        if not path.is_file() or digest(path) != known:
            raise UnlearnError(
                f"{path} was changed or removed since `request new`; make the request again.",
                code="requests.changed-part",
            )
    now = bound.facts(read_config(request.path("finetune.yml")))
    bound.require(request.facts.get("bound"), now, request.folder, bound.QUICK)
    before = request.facts["before"]
    folder = Path(before["adapter"] or before["model"])
    if not any(folder.glob("*.safetensors")):
        raise UnlearnError(f"the model {folder} no longer exists; restore it.")


def decide(request: Request, accept: str | None) -> None:
    """Write verdict.json: may the model be handed over?

    Raises:
        UnlearnError: No, and nobody accepted it.
    """
    match = request.matched
    made = (verdict if match else exact)(request) | {"accepted": None}
    if accept and not made["good"]:
        made["accepted"] = accept
    write_json(request.path("verdict.json"), made)
    tried(request, made)
    if made["good"] or accept:
        return
    cure = "Give it more steps (`request new --steps`)" if match else "Mend the config or its data"
    if not made["reasons"]:
        cure = "Measure that (docs/deleting-data.md)"
    raise UnlearnError(
        f"the model of {request.folder} is not handed over ({made['outcome']}): "
        f"{'; '.join(made['reasons'] + made['missing'])}. {cure}, or accept it as it is with "
        f"--accept REASON (measured: {request.path('eval')}, {request.path('attacks')})."
    )


def hand_over(request: Request) -> None:
    """Move the model to its place; once moved, it stays."""
    made, place = request.path("work", "model"), request.path("model")
    way = way_of(request.way["way"])
    way.require(request)
    if made.is_dir():
        strip(made)  # the teacher's log-probs of the rows were handed over with the model
        shutil.rmtree(place, ignore_errors=True)
        made.replace(place)
    elif not any(place.glob("*.safetensors")):
        raise UnlearnError(
            f"{made} is gone; remove {request.path('work')} and run again.",
            code="requests.no-model",
        )
    getattr(way, "hand_over", lambda _: None)(request)
