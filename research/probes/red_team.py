"""Which measure of forgetting survives an attack? Its correlation before and after (UWC).

arXiv 2406.09179 compares metrics by Pearson's r over checkpoints between their values before and
after a red team: jailbreaking, embedding probing, relearning, token noising. Extraction strength
had the highest. Prefix, share of noise and steps here are ours, since the paper's were not found;
embedding probing is left out, int4 rounding stands in addition.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from axolotl_unlearn.attacks.prompt import AFFIRMATIVE
from axolotl_unlearn.attacks.quantise import quantise_model
from axolotl_unlearn.attacks.relearn import Training, train
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import (
    exact_memorisation,
    extraction_strength,
    loss,
    probability,
)
from research.probes.rows import answer_facts

METRICS = {
    "extraction_strength": extraction_strength,
    "exact_memorisation": exact_memorisation,
    "probability": probability,
    "loss": loss,
}
NOISE = 0.1
STEPS = 5

Load = Callable[[], tuple[Any, Any]]


def noised(text: str, share: float, rng: random.Random) -> str:
    """That share of the words, at least one, replaced by other words of the text, drawn."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), max(1, round(share * len(words)))):
        words[place] = rng.choice(words)
    return " ".join(words)


def values(model: Any, tokenizer: Any, records: Sequence[Record]) -> dict[str, float]:
    """Mean of each metric over rows."""
    facts = answer_facts(model, tokenizer, records)
    return {name: float(np.mean([metric(f) for f in facts])) for name, metric in METRICS.items()}


def attacked(
    load: Load, forget: Sequence[Record], others: Sequence[Record], rate: float, seed: int = 0
) -> dict[str, dict[str, float]]:
    """``before`` and each attack -> metrics of the forget rows.

    Args:
        load: A fresh model and its tokenizer.
        others: Rows to relearn from, none of them asked.
    """
    model, tokenizer = load()
    rng = random.Random(seed)
    changed = {
        "before": forget,
        "jailbreak": [replace(r, input=f"{r.input} {AFFIRMATIVE}") for r in forget],
        "noise": [replace(r, input=noised(r.input, NOISE, rng)) for r in forget],
    }
    found = {name: values(model, tokenizer, rows) for name, rows in changed.items()}
    quantise_model(model, "int4")
    found["int4"] = values(model, tokenizer, forget)
    model, tokenizer = load()
    for _, trained in train(model, tokenizer, others, [STEPS], Training(rate=rate, seed=seed)):
        found["relearn"] = values(trained, tokenizer, forget)
    return found


def correlations(models: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict]:
    """Attack -> metric -> Pearson's r over models, None where one side does not vary.

    Raises:
        UnlearnError: Fewer than three models.
    """
    if len(models) < 3:
        raise UnlearnError("a correlation needs three models or more.")
    names = [name for name in next(iter(models.values())) if name != "before"]
    found: dict[str, dict[str, float | None]] = {}
    for attack in names:
        for metric in METRICS:
            sides = np.array([[m["before"][metric], m[attack][metric]] for m in models.values()])
            flat = bool((np.ptp(sides, axis=0) < 1e-9).any())
            r = None if flat else float(np.corrcoef(sides.T)[0, 1])
            found.setdefault(attack, {})[metric] = r
    return found
