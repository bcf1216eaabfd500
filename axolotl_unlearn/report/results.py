"""The few readings of results.json that the table and the page share.

Nothing here computes a metric; the judgement of a model is made in `metrics.verdict`.
"""

from __future__ import annotations

import math
from typing import Any

from axolotl_unlearn.metrics.results import Model, Results
from axolotl_unlearn.metrics.semeval import CELLS, SIDES

HEADLINES = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")


def number(value: Any) -> float | None:
    """A finite number of what has no type: training logs, curves, lines of audit.jsonl."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def value_of(model: Model, metric: str) -> float | None:
    """A headline score or a cell."""
    return model.cells.get(metric) if metric in CELLS else getattr(model, metric)


def cell_count(model: Model) -> int:
    """How many of the 12 cells have a value."""
    return sum(value is not None for value in model.cells.values())


def flags(model: Model) -> list[str]:
    """Why this row must not be called good: "collapsed", "below gate", or nothing."""
    marks = {
        "collapsed": model.collapse is not None and model.collapse.collapsed,
        "below gate": model.gate is not None and model.gate.below_gate,
    }
    return [mark for mark, is_so in marks.items() if is_so]


def membership_sizes(model: Model) -> tuple[int, int] | None:
    """Numbers of members and non-members behind the AUC, where known."""
    pair = (model.n.get("member"), model.n.get("nonmember"))
    if None in pair:
        pair = (len(model.likelihood.member_loss), len(model.likelihood.nonmember_loss))
    return pair if min(pair) >= 1 else None


def membership_warning(results: Results) -> str | None:
    """Why the membership figures mean nothing on these data, if a blind baseline separates."""
    for model in results.models:
        if model.membership is not None and model.membership.meaningful is False:
            return model.membership.sentence or "Membership means nothing on these data."
    return None


def sizes_sentence(results: Results) -> str:
    """What n stands behind the numbers, in words."""
    model = max(results.models, key=cell_count)
    parts = []
    for side in SIDES:
        if rows := sum(model.n.get(name) or 0 for name in CELLS if name.startswith(side)):
            parts.append(f"{rows} {side} rows")
    pair = membership_sizes(model)
    if pair:
        parts.append(f"{pair[0]} members against {pair[1]} non-members")
    if questions := model.n.get("utility"):
        parts.append(f"{questions} utility questions")
    return ", ".join(parts) if parts else "n not recorded"
