"""GUARD-IT and MRP on the demo, beside the retrained model, with their hooks and without.

    python -m research.studies.interventions out/demo

Asked of each: recall of forget and retain rows, the AUC of the loss on members against non-members,
and recall of forget prompts in another form (solved retain rows in front), which a gate that reads
the prompt may not know. Without its hook GUARD-IT is the original. Writes ``interventions.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from axolotl_unlearn.attacks.probes import Probe, plain_probes, score_probes
from axolotl_unlearn.attacks.prompt import SEPARATOR, example_probes
from axolotl_unlearn.attacks.target import limited, read_side
from axolotl_unlearn.engine.token_scoring import score_texts
from axolotl_unlearn.evaluation.sets import load_sets
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.intervals import auc, auc_interval
from axolotl_unlearn.metrics.memorisation import loss
from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
from research.inference import guard_it, mrp
from research.inference.modeling_intervened import intervene
from research.probes.rows import labelled

RESULTS = Path(__file__).parents[1] / "results" / "interventions.json"
ASKED = 64
AMOUNTS = (-0.3, 1.0, 2.0, 6.0)
#: Directions of a module and steps that they are trained for.
MRP = ((4, 100), (32, 200))


def figures(model: Any, tokenizer: Any, probes: dict[str, Sequence[Probe]], sets: Any) -> dict:
    """Means of `recalled` by name of the probes, and the AUC with its interval."""
    row: dict[str, Any] = {}
    for name, some in probes.items():
        told = score_probes(model, tokenizer, some, max_new_tokens=64, until=SEPARATOR)
        row[name] = float(np.mean(told.recalled))
    sides = [
        [-loss(one) for one in score_texts(model, tokenizer, [text for _, text in side])]
        for side in (sets.member, sets.nonmember)
    ]
    low, high = auc_interval(*sides)
    return row | {"auc": [auc(*sides), float(low), float(high)]}


def main() -> None:
    demo = Path(sys.argv[1])
    data = demo / "data"
    specs = parse_models([str(demo / "memorised"), str(demo / "retrained")])
    tokenizer = load_tokenizer(specs[0])
    original, retrained = (load_model(s, dtype=torch.float32, device="cpu") for s in specs)
    forget, retain = (read_side(data, side)[1] for side in ("forget", "retain"))
    asked, kept = limited(forget, ASKED), limited(retain, ASKED)
    plain = plain_probes(asked)
    probes = {
        "forget": plain,
        "retain": plain_probes(kept),
        "forget_examples": example_probes(plain, {r.id: r.task for r in asked}, retain, 1),
    }
    sets = load_sets(data, parts=("mia",))
    found = {"original": figures(original, tokenizer, probes, sets)}
    found["retrained"] = figures(retrained, tokenizer, probes, sets)
    prompts = [[r.input for r in side] for side in (forget, retain)]
    rows = [labelled(tokenizer, side) for side in (forget, retain)]
    made = {
        f"guard_it {amount:+g}": guard_it.guard_it(
            original, tokenizer, *prompts, layer=0, amount=amount
        )
        for amount in AMOUNTS
    }
    for where in ("block", "written"):
        for k, steps in MRP:
            paths = mrp.places(original, [0, 1], where)
            made[f"mrp {where} {k}"] = mrp.mrp(original, *rows, paths, k=k, steps=steps, rate=0.05)
    for name, tensors in made.items():
        handles = intervene(original, tensors)
        found[name] = figures(original, tokenizer, probes, sets)
        for handle in handles:
            handle.remove()
        print(name, found[name], flush=True)
    found["any of these, hook removed"] = figures(original, tokenizer, probes, sets)
    save(found)


def save(found: dict[str, Any]) -> None:
    """The figures, and a table of them."""
    rows = [
        [name, *(f"{row[key]:.2f}" for key in ("forget", "retain", "forget_examples")),
         "{:.2f} [{:.2f}, {:.2f}]".format(*row["auc"])]
        for name, row in found.items()
    ]  # fmt: skip
    columns = ["model", "forget", "retain", "forget after an example", "AUC of the loss"]
    command = "python -m research.studies.interventions out/demo"
    table = {"columns": columns, "rows": rows}
    content = {"command": command, "asked": ASKED, "models": found}
    write_json(RESULTS, content | {"tables": {"interventions": table}})


if __name__ == "__main__":
    main()
