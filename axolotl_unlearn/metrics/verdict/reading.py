"""An entry of results.json as the judgement reads it: numbers, intervals, scores by attack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axolotl_unlearn.metrics import semeval

CELLS = semeval.CELLS


def part(model: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = model.get(name)
    return found if isinstance(found, Mapping) else {}


def number(value: Any) -> float | None:
    """`value` as a finite float, or None (null, NaN, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def share(value: Any) -> float | None:
    value = number(value)
    return value if value is not None and 0 <= value <= 1 else None


def show(value: Any, digits: int = 2) -> str:
    """A number as the report prints it; a missing one is "n/a", never 0.

    Two decimals: what intervals of the usual width leave to say.
    """
    value = number(value)
    return "n/a" if value is None else f"{value:.{digits}f}"


def interval(model: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """The [low, high] interval of one metric, if the evaluation gave a finite one."""
    pair = part(model, "intervals").get(metric)
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        return None
    low, high = number(pair[0]), number(pair[1])
    return None if low is None or high is None else (low, high)


def role_of(model: Mapping[str, Any]) -> str:
    """ "original", "retrained", "reference" (never saw the members either) or "candidate"."""
    role = model.get("role") or model.get("name")
    return role if role in ("original", "retrained", "reference") else "candidate"


def side_mean(model: Mapping[str, Any], side: str) -> float | None:
    """Harmonic mean of the cells of one side (forget cells are already 1 - v); 0 if any is 0.

    The Task Aggregate is the harmonic mean of these two when both sides have equally many cells.
    """
    cells = part(model, "cells")
    values = [number(cells.get(name)) for name in CELLS if name.startswith(side)]
    return semeval.harmonic_mean([max(v, 0.0) for v in values if v is not None])


def scores_of(model: Mapping[str, Any] | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scores by attack, (members, non-members), high = rather a member; {} without any.

    Attacks with another number of texts than the loss, or with a value that is no number, are
    left out.
    """
    likelihood = part(model or {}, "likelihood")
    listed = {
        "loss": (likelihood.get("member_loss"), likelihood.get("nonmember_loss")),
        **{
            name: (one.get("member"), one.get("nonmember"))
            for name, one in part(likelihood, "attacks").items()
            if isinstance(one, Mapping) and name != "loss"
        },
    }
    found = {}
    for name, sides in listed.items():
        values = [_losses(side) for side in sides]
        if all(v is not None for v in values):
            found[name] = (-values[0], -values[1])
    sizes = [len(side) for side in found.get("loss", ())]
    return {n: pair for n, pair in found.items() if [len(side) for side in pair] == sizes}


def _losses(values: Any) -> np.ndarray | None:
    if not isinstance(values, (list, tuple)) or len(values) < 2:
        return None
    numbers = [number(value) for value in values]
    return None if None in numbers else np.array(numbers)
