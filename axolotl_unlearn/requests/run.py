"""`axolotl unlearn request run`: check, teacher, forget, evaluate, attack, verdict, record.

Stages of one job (`axolotl_unlearn.runner`): a run that was stopped anywhere goes on with the
stage that was not finished. The result is handed over (``model/``) only when its verdict is good
or somebody accepted it with a reason, which the record repeats.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder
from axolotl_unlearn.requests.request import Request, digest, write_json
from axolotl_unlearn.requests.verdict import verdict
from axolotl_unlearn.runner import Job, Stage, executable

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Each worker of `datasets` imports Axolotl again (10 s); a request has some thousand rows.
    "AXOLOTL_DATASET_NUM_PROC": "0",
}
#: Retained rows whose loss is compared.
KEPT_ROWS = 100
#: New tokens of an answer that is looked for.
ANSWER_TOKENS = 96
ATTACKS = {
    "quantise": ("--schemes", "int8,int4"),
    "relearn": ("--source", "retain", "--steps", "1,5", "--rows", "20"),
    "prompt": ("--variants", "affirmative,prefix"),
}


def run_request(
    folder: Path | str,
    *,
    accept: str | None = None,
    threads: int | None = None,
    console: Console | None = None,
    way: str | None = None,
    repeat: bool = False,
    limit: float | None = None,
) -> dict[str, Any]:
    """Run or resume a request; returns what verdict.json holds.

    Args:
        accept: Why a model is handed over although its verdict is not good.
        threads: Of the commands; default all cores.
        way: One of `ways.WAYS`, or auto; default that of an earlier start, or match.
        repeat: Of retrain: train twice and compare the weights.
        limit: Of auto: seconds of an exact way, else match is taken.

    Raises:
        UnlearnError: A stage failed, the request was run before, or the verdict is not good.
    """
    from axolotl_unlearn.requests.ledger import Ledger

    request = Request.load(folder)
    if not request.at_home and request.root.is_dir():
        place = Path(folder).absolute()
        with contextlib.chdir(request.root):
            return run_request(
                place, accept=accept, threads=threads, console=console, way=way, repeat=repeat
            )
    if accept is not None and not accept.strip():
        raise UnlearnError("--accept needs a reason, which the record repeats.")
    Ledger(request.folder.parent).refuse_twice(request.id)
    before = os.umask(0o077)
    try:
        if way == "auto":
            from axolotl_unlearn.requests.ways.plan import choose, plan

            way = choose(plan(request), limit)
        take(request, way)
        job = Job(
            private_folder(request.path("work")),
            threads=threads,
            environment=environment(request),
            console=console,
        )
        for stage in stages(request, accept, job.threads, repeat):
            job.add(stage)
        job.run()
    finally:
        os.umask(before)
    return json.loads(request.path("verdict.json").read_text("utf-8"))


def environment(request: Request) -> dict[str, str]:
    """Of every command: kept customers' rows are cached below the request and go with it."""
    return ENVIRONMENT | {"HF_DATASETS_CACHE": str(request.path("work", "cache").absolute())}


def take(request: Request, way: str | None) -> None:
    """Prepare the way and write it down in ``way.json``; match needs neither.

    Raises:
        UnlearnError: The way is not open to this request.
    """
    from axolotl_unlearn.requests import ways

    way = way or request.way["way"]
    if way == "match":
        for name in (ways.WAY, ways.PROOF):
            request.path(name).unlink(missing_ok=True)
    else:
        write_json(request.path(ways.WAY), ways.prepare(request, way))


def under_work(request: Request) -> str:
    """The forgetting model before it is handed over, as `axolotl unlearn eval` takes it."""
    return request.made(request.path("work", "model"))


def teacher_of(request: Request) -> str:
    """The teacher, which never saw the rows: the control of the attacks."""
    folder = request.path("work", "teacher")
    adapter = (folder / "adapter_config.json").is_file()
    return f"{request.facts['base']}+{folder}" if adapter else str(folder)


def stages(request: Request, accept: str | None, threads: int, repeat: bool = False) -> list[Stage]:
    """The table of a request's run."""
    from axolotl_unlearn.requests import ways

    folder, work = request.folder, request.path("work")

    def train(name: str, title: str, needs: Sequence[str], made: str) -> Stage:
        done = work / f"{name}.json"
        return Stage(
            name,
            title,
            lambda: (
                [executable("axolotl"), "train", str(request.path(f"{name}.yml"))]
                + ["--launcher", "python"]
            ),
            done,
            inputs=[request.path(f"{name}.yml"), *sorted(request.path("data").glob("*.jsonl"))],
            needs=list(needs),
            before=lambda: shutil.rmtree(work / made, ignore_errors=True),
            action=lambda: _trained(work / made, done),
            threads=threads,
        )

    if request.way["way"] == "match":
        trainings = [
            train("teacher", "teacher: the base on retained rows", ["check"], "teacher"),
            train("forget", "forget", ["teacher"], "model"),
        ]
    else:
        trainings = ways.stages(request, threads, repeat)
    return [
        _action("check", "check", work / "check.json", lambda: check(request)),
        *trainings,
        Stage(
            "measure",
            "evaluate before and after, look for earlier requests, attack",
            [sys.executable, "-m", "axolotl_unlearn.cli", "request", "measure", str(folder)],
            request.path("eval", "earlier.json"),
            inputs=sorted(request.path("eval-data").glob("*.jsonl")),
            needs=[trainings[-1].name],
            before=lambda: _unmeasured(request),
            threads=threads,
            settings=[ATTACKS, ANSWER_TOKENS, _ledger_lines(request), request.way["way"]],
        ),
        _action(
            "verdict",
            "verdict",
            request.path("verdict.json"),
            lambda: decide(request, accept),
            ["measure"],
            settings=accept,
        ),
        _action(
            "model", "hand over", work / "handed.json", lambda: hand_over(request), ["verdict"]
        ),
        _action(
            "record", "record", request.path("record.json"), lambda: _record(request), ["model"]
        ),
    ]


def commands(request: Request) -> list[list[str]]:
    """What is measured, as words after `axolotl unlearn`."""
    work, data = request.path("work"), str(request.path("eval-data"))
    judged = request.path("eval-data", "nonmember.jsonl").is_file()
    fewest = min(request.facts["counts"]["forget"], request.facts["counts"]["judge"])
    model = f"after={under_work(request)}"
    exact = request.way["way"] != "match"  # its model never saw the rows: the control of itself
    control = [] if exact else [f"teacher={teacher_of(request)}"]
    evaluate = [
        *("eval", f"before={request.before}", model, *control),
        *("--original", "before"),
        *("--data", data, "--out", str(request.path("eval")), "--store", str(work / "store")),
        *("--join", "", "--quiet", "--min-members", str(fewest if judged else 0)),
        *("--max-gen-toks", str(ANSWER_TOKENS), "--resamples", "2000"),
    ]
    attacks = [
        [
            *("attack", attack, model, "--control", teacher_of(request), "--data", data),
            *("--out", str(request.path("attacks")), "--join", ""),
            *("--max-new-tokens", str(ANSWER_TOKENS), *options),
        ]
        for attack, options in ({} if exact else ATTACKS).items()
    ]
    return [evaluate, *attacks]


def measure(request: Request) -> None:
    """All of it in one process, whose start takes as long as a command on a small model.

    A command keeps its scores by content, so that after a stop nothing is measured twice.
    """
    from axolotl_unlearn.cli import unlearn

    if request.way["way"] == "match":
        measure_kept(request)
    for words in commands(request):
        if code := unlearn.main(words, prog_name="axolotl unlearn", standalone_mode=False):
            raise SystemExit(code)  # it has said why
    earlier(request)


def measure_kept(request: Request) -> None:
    """Write eval/kept.json: the loss of retained rows before and after, nats a token of each row.

    It judges what is kept where no answer is ever said exactly.
    """
    import torch

    from axolotl_unlearn.models import load_model, parse_models
    from axolotl_unlearn.requests.rows import encoded, load_tokenizer_of

    out = request.path("eval", "kept.json")
    if out.is_file():
        return
    tokenizer = load_tokenizer_of(request.path("finetune.yml"))
    rows = encoded(request.folder, "retain", tokenizer)[:KEPT_ROWS]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses = {}
    for spec in parse_models([f"before={request.before}", f"after={under_work(request)}"]):
        model = load_model(spec, dtype=torch.float32 if device == "cpu" else "auto", device=device)
        losses[spec.name] = row_losses(model, rows)
        del model
    write_json(out, losses)


def row_losses(model: Any, rows: Sequence[Any]) -> list[float]:
    """Mean loss of the labelled tokens of each token row, nats."""
    from axolotl_unlearn.columns import IGNORE
    from axolotl_unlearn.engine.token_scoring import Query, score_queries

    queries = []
    for row in rows:
        times = [t for t, label in enumerate(row.labels[1:]) if label != IGNORE]
        queries.append(Query(row.input_ids, times, [row.input_ids[t + 1] for t in times]))
    return [-float(facts.logp.mean()) for facts in score_queries(model, queries)]


def _action(
    name: str,
    title: str,
    output: Path,
    action: Callable[[], None],
    needs: Sequence[str] = (),
    settings: object = None,
) -> Stage:
    """Something that this process does."""
    return Stage(name, title, None, output, needs=list(needs), action=action, settings=settings)


def _unmeasured(request: Request) -> None:
    for name in ("earlier.json", "kept.json"):
        request.path("eval", name).unlink(missing_ok=True)


def _trained(folder: Path, done: Path) -> None:
    """Weights are there: only then is a training run called done."""
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if not weights:
        raise UnlearnError(f"the run wrote no weights to {folder}; see its log.")
    write_json(done, {"weights": weights})


def _ledger_lines(request: Request) -> int:
    from axolotl_unlearn.requests.ledger import Ledger

    return len(Ledger(request.folder.parent).entries())


def check(request: Request) -> None:
    """Rows, config and model are those of `request new`.

    Raises:
        UnlearnError: The first that is not.
    """
    from axolotl_unlearn.checks.preflight import faults
    from axolotl_unlearn.requests.rows import read_config

    digests = request.facts["digests"]
    for part in ("forget", "retain", "heldout", "judge"):
        path = request.rows(part)
        known = digests.get(part)
        if known and (not path.is_file() or digest(path) != known):
            raise UnlearnError(
                f"{path} was changed or removed since `request new`; make the request again."
            )
    _check_newest(request)
    before = request.facts["before"]
    for folder in filter(None, (before["adapter"], before["adapter"] is None and before["model"])):
        if not any(Path(folder).glob("*.safetensors")):
            raise UnlearnError(f"the model {folder} is not there any more; restore it.")
    if request.way["way"] != "match":
        write_json(request.path("work", "check.json"), {"digests": digests})
        return
    teacher = str(request.path("work", "teacher"))
    found = [f for f in faults(read_config(request.path("forget.yml"))) if teacher not in f]
    if found:
        raise UnlearnError(f"{request.path('forget.yml')}: " + " ".join(found))
    write_json(request.path("work", "check.json"), {"digests": digests})


def _check_newest(request: Request) -> None:
    """
    Raises:
        UnlearnError: Another request was carried out since this one was made, so that it would
            begin with a model that still knows the other's rows.
    """
    from axolotl_unlearn.requests.ledger import Ledger

    made_after = request.facts.get("after_request")
    accepted = Ledger(request.folder.parent).accepted()
    newest = accepted[-1]["request"] if accepted else None
    if "after_request" in request.facts and newest != made_after and request.way["way"] == "match":
        raise UnlearnError(
            f"request {newest!r} was carried out since {request.folder} was made, which would "
            f"begin with the model before it; remove {request.folder} and make it again with "
            "`axolotl unlearn request new`."
        )


def earlier(request: Request) -> None:
    """What the documents of earlier requests do in the new model."""
    from axolotl_unlearn.requests.audit import audit_requests

    found = audit_requests(under_work(request), request.folder.parent)
    # A record repeats it, and has no path of this machine.
    write_json(request.path("eval", "earlier.json"), found.to_json() | {"model": "after"})


def decide(request: Request, accept: str | None) -> None:
    """Write verdict.json: may the model be handed over?

    Raises:
        UnlearnError: No, and nobody accepted it.
    """
    from axolotl_unlearn.requests import ways

    match = request.way["way"] == "match"
    made = (verdict if match else ways.verdict)(request) | {"accepted": None}
    if accept and not made["good"]:
        made["accepted"] = accept
    write_json(request.path("verdict.json"), made)
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
    if made.is_dir():
        from axolotl_unlearn.requests.clean import strip

        strip(made)  # the teacher's log-probs of the rows were handed over with the model
        shutil.rmtree(place, ignore_errors=True)
        made.replace(place)
    elif not any(place.glob("*.safetensors")):
        raise UnlearnError(f"{made} is gone; remove {request.path('work')} and run again.")
    if request.way["way"] == "shards":
        from axolotl_unlearn.requests.ways import shards

        shards.install(request)
    write_json(request.path("work", "handed.json"), {"model": request.after})


def _record(request: Request) -> None:
    from axolotl_unlearn.requests.record import write

    write(request.folder)
