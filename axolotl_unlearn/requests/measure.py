"""What is measured of a request's model: scores and membership, attacks, earlier requests.

Scores are kept by content below ``work/``, so that after a stop nothing is measured twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from axolotl_unlearn.device import device_name
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests.request import Request, write_json
from axolotl_unlearn.requests.rows import read_config

#: Retained rows whose loss is compared.
KEPT_ROWS = 100
#: New tokens of an answer that is looked for.
ANSWER_TOKENS = 96
#: Of each attack; on the way `match` alone, since an exact model is its own control.
ATTACKS: dict[str, dict[str, Any]] = {
    "quantise": {"schemes": ["int8", "int4"]},
    "relearn": {"steps": [1, 5]},
    "prompt": {"variants": ["affirmative", "prefix"]},
}
RELEARN_ROWS = 20


def measure(request: Request) -> None:
    """Write eval/ and attacks/; eval/earlier.json comes last."""
    from axolotl_unlearn.evaluation.measurement import Options
    from axolotl_unlearn.evaluation.run import evaluate
    from axolotl_unlearn.requests.audit import audit_requests

    matched = request.matched
    earlier = request.path("eval", "earlier.json")
    earlier.unlink(missing_ok=True)
    data, model = request.path("eval-data"), f"after={under_work(request)}"
    judged = (data / "nonmember.jsonl").is_file()
    fewest = min(request.facts["counts"]["forget"], request.facts["counts"]["judge"])
    if matched:
        write_json(request.path("eval", "kept.json"), kept_losses(request))
    models = [f"before={request.before}", model]
    # What the rows are like to a model that never saw them: the teacher, or the base.
    models += [f"teacher={teacher_of(request)}"] if matched else list(_base(request))
    options = Options(
        out_dir=request.path("eval"),
        original="before",
        store=request.path("work", "store"),
        join="",
        min_members=fewest if judged else 0,
        max_gen_toks=ANSWER_TOKENS,
        progress=False,
    )
    evaluate(models, data, options)
    if matched:
        attack(request, model)
    audited = audit_requests(under_work(request), request.folder.parent)
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
    subject, control = make_subjects(model, asked, teacher_of(request), **how)
    trained = random.Random(0).sample(retain, min(RELEARN_ROWS, len(retain)))
    for made, rows in (
        (quantise_attack, ()),
        (relearn_attack, (trained, asked)),
        (prompt_attack, ()),
    ):
        name = made.__name__.removesuffix("_attack")
        more = ATTACKS[name] | ({"source": "retain"} if rows else {})
        result, curves = made(subject, store, *rows, control=control, **more)
        save(request.path("attacks"), {**result, "data_dir": str(data)}, curves)


def under_work(request: Request) -> str:
    """The model before it is handed over, as `axolotl-unlearn eval` takes it."""
    return request.made(request.path("work", "model"))


def teacher_of(request: Request) -> str:
    """The teacher, which never saw the rows: the control of the attacks."""
    return str(request.path("work", "teacher"))


def kept_losses(request: Request) -> dict[str, list[float]]:
    """The loss of retained rows before and after, nats a token of each row.

    It judges what is kept where no answer is ever said exactly.
    """
    import torch

    from axolotl_unlearn.columns import IGNORE
    from axolotl_unlearn.engine.token_scoring import Query, score_queries
    from axolotl_unlearn.models import load_model, parse_models
    from axolotl_unlearn.requests.rows import encoded, load_tokenizer_of

    tokenizer = load_tokenizer_of(request.path("finetune.yml"))
    rows = encoded(request.folder, "retain", tokenizer)[:KEPT_ROWS]
    device = device_name()
    queries, losses = [], {}
    for row in rows:
        times = [t for t, label in enumerate(row.labels[1:]) if label != IGNORE]
        queries.append(Query(row.input_ids, times, [row.input_ids[t + 1] for t in times]))
    for spec in parse_models([f"before={request.before}", f"after={under_work(request)}"]):
        model = load_model(spec, dtype=torch.float32 if device == "cpu" else "auto", device=device)
        losses[spec.name] = [-float(one.logp.mean()) for one in score_queries(model, queries)]
        del model
    return losses
