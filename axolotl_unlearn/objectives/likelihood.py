"""Negative log-likelihood and its ascent: NLL, PO, gradient ascent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from axolotl_unlearn.objectives.base import LabelScores, Terms, objective, token_mean


def _unit(parameters: dict) -> str:
    return "token" if parameters.get("reduction", "token") == "token" else "row"


def _slope(sign: float) -> Callable[[dict], float | None]:
    """The derivative of a token's value by its log-prob, where the unit is the token."""
    return lambda parameters: sign if _unit(parameters) == "token" else None


@objective(
    "nll", unit=_unit, slope=_slope(-1.0), side="retain", source="arXiv 2503.21088 eq. 3 (GDR)"
)
def nll(scores: LabelScores, *, reduction: Literal["token", "sequence"] = "token") -> Terms:
    """Negative log-likelihood of the labels: ordinary fine-tuning ("gradient descent").

    ``-log p(y_t | x, y_<t)``, averaged over all label tokens of the step (``reduction: token``)
    or first within each sequence, then over sequences (``reduction: sequence``).
    """
    loss = -scores.logp * scores.mask
    return Terms(loss if reduction == "token" else token_mean(loss, scores))


@objective("ga", unit=_unit, slope=_slope(1.0), side="forget", source="arXiv 2210.01504 eq. 2")
def gradient_ascent(
    scores: LabelScores, *, reduction: Literal["token", "sequence"] = "token"
) -> Terms:
    """Gradient ascent: the negated NLL. Unbounded below, so it ends in collapse if not stopped.

    Together with ``nll`` on the retain rows this is GradDiff (arXiv 2203.12817, 2401.06121).
    """
    return Terms(-nll(scores, reduction=reduction).values)


@objective(
    "po", unit=_unit, slope=_slope(-1.0), rows="alternative", source="arXiv 2401.06121 (IdkNLL)"
)
def preference_optimisation(
    scores: LabelScores, *, reduction: Literal["token", "sequence"] = "token"
) -> Terms:
    """PO (IdkNLL; MEOW): ordinary fine-tuning on another answer to each forget row.

    ``-log p(y'_t | x, y'_<t)`` of the alternative ``y'``: "I don't know" (TOFU), an inverted fact
    (MEOW, arXiv 2409.11844). The forget row itself is not run. TOFU's code takes one token mean
    over these rows and the retain rows together, so that their weights follow their lengths.

    Example: alternative of p = (1/2, 1/4): (ln 2, 2 ln 2).
    """
    return nll(scores, reduction=reduction)
