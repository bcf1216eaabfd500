"""`axolotl-unlearn request run`: check, train, measure, verdict, hand over, record.

Steps in a row (`axolotl_unlearn.requests.steps`): a run that was stopped anywhere goes on with the
step that was not finished. The result is handed over (``model/``) only when its verdict is good or
somebody accepted it with a reason, which the record repeats. Scores are kept by content below
``work/``, so that after a stop nothing is measured twice.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import device_name
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder, strip
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests.record import RECORD, tried, write
from axolotl_unlearn.requests.request import (
    Ledger,
    Request,
    at_root,
    cores,
    digest,
    fault,
    held,
    one_line,
    read_json,
    weights,
    write_json,
)
from axolotl_unlearn.requests.rows import encoded, load_tokenizer_of, read_config
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.verdict import AFTER, ATTACKS, exact, scores, verdict
from axolotl_unlearn.requests.ways import WAY, WAYS, choose, plan, way_of

#: Retained rows whose loss is compared.
KEPT_ROWS = 100
#: New tokens of an answer or text that is looked for; of long texts the verdict asks for these.
ANSWER_TOKENS = 128
RELEARN_ROWS = 20


def run_request(
    folder: Path | str,
    *,
    accept: str | None = None,
    threads: int | None = None,
    way: str | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Run or resume a request; returns what verdict.json holds.

    Args:
        accept: Why a model is handed over although its verdict is not good.
        threads: Of the commands; default all cores.
        way: One of `ways.WAYS`, or auto; default that of an earlier start, or auto.
        processes: Of each training.

    Raises:
        UnlearnError: A step failed, the request was run before, or the verdict is not good.
    """
    request = Request.load(folder)
    if accept is not None and not one_line(accept, "--accept").strip():
        raise fault("requests.no-reason", "--accept needs a reason, which the record repeats.")
    if (name := request.folder.resolve().name) != request.id:
        says = f"{folder} is request {request.id!r} under the name {name!r}"
        cure = "name the folder as it was, or make the request again"
        raise fault("requests.renamed", f"{says}; {cure}.")
    with ExitStack() as stack:
        request = stack.enter_context(at_root(folder))
        stack.callback(os.umask, os.umask(0o077))
        # Of two requests at once each would train on the rows that the other deletes.
        stack.enter_context(held(request.folder.parent))
        ledger = Ledger(request.folder.parent)  # whoever held it may have carried it out
        done = request.id in ledger.accepted()
        if done and not request.path(RECORD).is_file():  # killed in its last step
            write(request.folder)
        else:
            ledger.refuse_twice(request.id)
            given = threads, processes
            run = stack.enter_context(running(request, *given))
            take(request, way)
            getattr(way_of(request.way["way"]), "fits", lambda *_: None)(request, *given)
            carry_out(request, run, accept)
        return json.loads(request.path("verdict.json").read_text("utf-8"))


def carry_out(request: Request, run: Steps, accept: str | None) -> None:
    """The steps of a request."""
    check(request)
    way_of(request.way["way"]).make(request, run)
    earlier = request.path("eval", "earlier.json")
    if (read_json(earlier) or {}).get("unreadable"):  # an earlier request may be restored
        earlier.unlink()
    with run.step(
        "measure",
        "evaluate before and after, attack, look for earlier requests",
        output=earlier,
        inputs=sorted(request.path("eval-data").glob("*.jsonl")),
        settings=[
            *(ATTACKS, ANSWER_TOKENS, request.way["way"]),
            len(Ledger(request.folder.parent).accepted()),
        ],
    ) as due:
        if due:
            with run.log("measure") as log, redirect_stdout(log), redirect_stderr(log):
                measure(request)
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
def running(request: Request, threads: int | None = None, processes: int = 1) -> Iterator[Steps]:
    """Steps below ``work/``; kept customers' rows are cached there too, and go with it."""
    work = private_folder(request.path("work"))
    cache = {"HF_DATASETS_CACHE": str((work / "cache").absolute())}
    with held(work) as lock:
        yield Steps(work, lock, cache, threads or cores(), processes)


def take(request: Request, way: str | None) -> None:
    """Prepare the way and write it down in ``way.json``.

    Raises:
        UnlearnError: The way is not open to this request.
    """
    path = request.path(WAY)
    if way is None:
        way = request.way["way"] if path.is_file() else "auto"
    if way == "auto":
        way = choose(plan(request))
    if way not in WAYS:
        raise UnlearnError(f"--way {way}: use {', '.join(WAYS)} or auto.")
    if way != request.way["way"]:  # of a training, which another way has replaced
        shutil.rmtree(request.path("work", "stamps"), ignore_errors=True)
    write_json(path, way_of(way).prepare(request))


def check(request: Request) -> None:
    """Rows, what is asked of them, base, config, packages and model are those of `request new`.

    Raises:
        UnlearnError: The first that is not.
    """
    for part, known in request.facts["digests"].items():
        path = request.path(part) if "/" in part else request.rows(part)  # of earlier versions
        if not path.is_file() or digest(path) != known:
            says = f"{path} was changed or removed since `request new`; make the request again."
            raise fault("requests.changed-part", says)
    now = bound.facts(read_config(request.path("finetune.yml")))
    bound.require(request.facts.get("bound"), now, request.folder, bound.QUICK)
    way_of("shards").told_of(request)  # what is deleted of them is written there at the end
    before = request.facts["before"]
    folder = Path(before["adapter"] or before["model"])
    if not any(folder.glob("*.safetensors")):
        raise UnlearnError(f"the model {folder} no longer exists; restore it.")
    now = sorted(one["sha256"] for one in weights(folder).values())
    if now != before.get("files", now):
        says = f"the model {folder} is not the one of `request new`: it was trained or written anew"
        raise fault("requests.changed-model", f"{says}; restore it, or make the request again.")


def decide(request: Request, accept: str | None) -> None:
    """Write verdict.json: may the model be handed over?

    Raises:
        UnlearnError: No, and nobody accepted it; or another model was measured.
    """
    from axolotl_unlearn.models import parse_models, weights_digest

    (made_here,) = parse_models([request.result])
    if scores(request, AFTER)["weights"] != weights_digest(made_here):
        says = f"{request.newest} is not the model that was measured"
        cure = f"remove {request.path('work')} and run again"
        raise fault("verdict.other-weights", f"{says}; {cure}.")
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
        says = f"{made} is gone; remove {request.path('work')} and run again."
        raise fault("requests.no-model", says)
    getattr(way, "hand_over", way_of("shards").deleted_otherwise)(request)


# --- what is measured ----------------------------------------------------------------------------


def measure(request: Request) -> None:
    """Write eval/ and attacks/; eval/earlier.json comes last."""
    from axolotl_unlearn.evaluation.measurement import Options
    from axolotl_unlearn.evaluation.run import evaluate
    from axolotl_unlearn.requests.audit import audit_requests

    matched = request.matched
    earlier = request.path("eval", "earlier.json")
    earlier.unlink(missing_ok=True)
    data, model = request.path("eval-data"), f"after={request.result}"
    judged = (data / "nonmember.jsonl").is_file()
    fewest = min(request.facts["counts"]["forget"], request.facts["counts"]["judge"])
    if matched:
        write_json(request.path("eval", "kept.json"), kept_losses(request))
    models = [f"before={request.before}", model]
    # What the rows are like to a model that never saw them: the teacher, or the base.
    models += [f"teacher={request.path('work', 'teacher')}"] if matched else list(_base(request))
    options = Options(
        out_dir=request.path("eval"),
        original="before",
        store=request.path("work", "store"),
        join="",
        min_members=fewest if judged else 0,
        max_gen_toks=ANSWER_TOKENS,
        progress=False,
    )
    shutil.rmtree(request.path("attacks"), ignore_errors=True)  # of a model that was made before
    evaluate(models, data, options)
    if matched:
        attack(request, model)
    audited = audit_requests(request.result, request.folder.parent, made_now=True)
    # A record repeats it, and has no path of this machine.
    write_json(earlier, audited.to_json() | {"model": "after"})


def _base(request: Request) -> Iterator[str]:
    """The base of an exact way, if there is one with weights and it is not the model before."""
    base = str(request.facts["base"])
    found = any(name.endswith((".safetensors", ".bin")) for name in bound.base(base))
    if found and not read_config(request.path("finetune.yml")).get("reinit_weights"):
        yield f"base={base}"


def attack(request: Request, model: str) -> None:
    """Round the weights, train a little on retained rows, ask differently."""
    from axolotl_unlearn.attacks.prompt import prompt_attack
    from axolotl_unlearn.attacks.quantise import quantise_attack
    from axolotl_unlearn.attacks.relearn import relearn_attack
    from axolotl_unlearn.attacks.results import save
    from axolotl_unlearn.attacks.target import make_subjects, read_side
    from axolotl_unlearn.store import Store

    data, store = request.path("eval-data"), Store(request.path("work", "scores"))
    asked, retain = (read_side(data, side)[1] for side in ("forget", "retain"))
    how = {"join": "", "max_new_tokens": ANSWER_TOKENS, "device": device_name(), "quiet": True}
    subject, control = make_subjects(model, asked, str(request.path("work", "teacher")), **how)
    trained = random.Random(0).sample(retain, min(RELEARN_ROWS, len(retain)))
    for made in (quantise_attack, relearn_attack, prompt_attack):
        how = ATTACKS[made.__name__.removesuffix("_attack")]
        rows = (trained, asked) if made is relearn_attack else ()
        result = made(subject, store, *rows, control=control, **how)
        save(request.path("attacks"), {**result, "data_dir": str(data)})


def kept_losses(request: Request) -> dict[str, list[float]]:
    """The loss of retained rows before and after, nats a token of each row.

    It judges what is kept where no answer is ever said exactly.
    """
    import torch

    from axolotl_unlearn.columns import IGNORE
    from axolotl_unlearn.engine.token_scoring import Query, score_queries
    from axolotl_unlearn.models import load_model, parse_models

    tokenizer = load_tokenizer_of(request.path("finetune.yml"))
    rows = encoded(request.folder, "retain", tokenizer)[:KEPT_ROWS]
    device = device_name()
    queries, losses = [], {}
    for row in rows:
        times = [t for t, label in enumerate(row.labels[1:]) if label != IGNORE]
        queries.append(Query(row.input_ids, times, [row.input_ids[t + 1] for t in times]))
    for spec in parse_models([f"before={request.before}", f"after={request.result}"]):
        model = load_model(spec, dtype=torch.float32 if device == "cpu" else "auto", device=device)
        losses[spec.name] = [-float(one.logp.mean()) for one in score_queries(model, queries)]
        del model
    return losses
