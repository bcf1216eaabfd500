"""Mixing an unlearned model with its original until a retain metric is kept (arXiv 2406.09179).

theta(a) = (1 - a) theta_original + a theta_unlearned. Models that forget differently become
comparable when each is mixed to the same retention; what they then still forget is the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from research.merging.lab import Lab, Score


def mixed(lab: Lab, target: Mapping[str, Tensor], amount: float) -> dict[str, Tensor]:
    """(1 - amount) base + amount target, for every weight that moves."""
    return {name: own.lerp(target.get(name, own), amount) for name, own in lab.base_weights.items()}


def calibrate(
    lab: Lab,
    model: nn.Module,
    score: Score,
    target: int = 0,
    *,
    metric: str = "retain",
    keep: float = 0.95,
    tolerance: float = 0.01,
) -> dict:
    """The largest share of ``target`` (a parent's number) that keeps ``keep`` of the base.

    ``metric``: a score where high is good, ``keep``: tau.
    Ends at share 0 at worst, which is the original itself.

    Returns ``amount``, ``metric``, ``threshold``, ``scores`` there, ``points`` (every share that was
    scored, in order) and ``monotone``: the metric never rose with the share on the first grid, so
    bisection is valid; otherwise ``amount`` is the largest point of a finer grid.
    """
    if not 0 < keep <= 1:
        raise UnlearnError(f"keep {keep!r} is not in (0, 1]: it is the share of retention to keep.")
    weights = dict(lab.parent_weights(target))
    known: dict[float, dict] = {}

    def at(amount: float) -> float:
        if amount not in known:
            known[amount] = dict(score(lab.load(model, mixed(lab, weights, amount))))
        value = known[amount].get(metric)
        if value is None or not math.isfinite(value):
            raise UnlearnError(
                f"the scores hold no {metric!r}: choose one of "
                f"{', '.join(sorted(k for k, v in known[amount].items() if v is not None))}."
            )
        return value

    shares = [number / 4 for number in range(5)]
    values = [at(share) for share in shares]
    threshold = keep * values[0]
    monotone = all(b <= a + 1e-9 for a, b in zip(values, values[1:], strict=False))
    if monotone:
        good = max(share for share, value in zip(shares, values, strict=True) if value >= threshold)
        bad = min((share for share in shares if share > good), default=None)
        while bad is not None and bad - good > tolerance:
            middle = (good + bad) / 2
            if at(middle) >= threshold:
                good = middle
            else:
                bad = middle
        amount = good
    else:
        amount = max(share for share in (n / 20 for n in range(21)) if at(share) >= threshold)
    lab.load(model, mixed(lab, weights, amount))
    points = [{"amount": share, "scores": known[share]} for share in sorted(known)]
    return {"amount": amount, "metric": metric, "threshold": threshold, "monotone": monotone,
            "scores": known[amount], "points": points}  # fmt: skip
