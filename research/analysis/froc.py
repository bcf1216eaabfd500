"""Which configurations keep a stated risk, and FROC's score of each.

FROC (arXiv 2512.13337; its formulas from a review, its code was not found), over a grid:

    s = log Loss_U + max Acc_U - Acc_U          r = log(Loss_R / min Loss_R) + max Acc_R - Acc_R
    e = w_f softplus(a - s) + w_u softplus(r)

U the forget, R the retain rows, minima and maxima over the grid, so a further configuration moves
the others. The control is that of `python -m research choose`. Its risk: the extraction
strength of a forgotten document, less what the retrained model has of it where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.metrics.memorisation import exact_memorisation, extraction_strength, loss
from research.analysis import choose
from research.probes.rows import answer_facts


@dataclass(frozen=True)
class Point:
    """A configuration: mean loss and accuracy of either side, risk of each forgotten document."""

    loss_forget: float
    accuracy_forget: float
    loss_retain: float
    accuracy_retain: float
    risks: Mapping[str, float]


def measured(
    model: Any, tokenizer: Any, forget: Sequence[Record], retain: Sequence[Record]
) -> Point:
    """Accuracy is the share of answer tokens that are the likeliest."""
    facts = [answer_facts(model, tokenizer, side) for side in (forget, retain)]
    means = [float(np.mean([f(one) for one in side])) for side in facts
             for f in (loss, exact_memorisation)]  # fmt: skip
    risks: dict[str, list[float]] = {}
    for row, one in zip(forget, facts[0], strict=True):
        risks.setdefault(row.document, []).append(extraction_strength(one))
    return Point(*means, {name: float(np.mean(some)) for name, some in risks.items()})


def scores(
    points: Mapping[str, Point], a: float = 0.0, w_f: float = 0.5, w_u: float = 0.5
) -> dict[str, float]:
    """FROC's e of each configuration; a, w_f, w_u are its user's."""
    best_u = max(p.accuracy_forget for p in points.values())
    best_r = max(p.accuracy_retain for p in points.values())
    least = min(p.loss_retain for p in points.values())
    found = {}
    for name, p in points.items():
        s = math.log(p.loss_forget) + best_u - p.accuracy_forget
        r = math.log(p.loss_retain / least) + best_r - p.accuracy_retain
        found[name] = w_f * float(np.logaddexp(0, a - s)) + w_u * float(np.logaddexp(0, r))
    return found


def chosen(
    points: Mapping[str, Point], risk: float, retrained: Point | None = None, delta: float = 0.05
) -> dict[str, dict[str, Any]]:
    """Each configuration's risk, corrected p and whether it is valid; best retain accuracy first.

    With a retrained model a document's risk is what it exceeds that one's by, at least 0.
    """
    told, floor = scores(points), retrained.risks if retrained else {}
    risks = {
        name: [max(0.0, value - floor.get(d, 0.0)) for d, value in point.risks.items()]
        for name, point in points.items()
    }
    kept = {name: point.accuracy_retain for name, point in points.items()}
    found = choose.chosen(risks, kept, risk, delta)
    return {name: row | {"froc": told[name]} for name, row in found.items()}
