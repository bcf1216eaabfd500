"""Objectives of the labels' log-probs: likelihood and its ascent, negative preference optimisation,
and ascent with a weight for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from axolotl_unlearn.objectives.base import (
    F,
    LabelScores,
    Tensor,
    Terms,
    batch_token_mean,
    objective,
    token_mean,
    torch,
)

#: A row whose NPO gradient weight has fallen below this has, for training, stopped.
SATURATED = 0.05


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


@objective(
    "npo",
    reference=True,
    unit=lambda own: "batch" if own.get("reduction") == "batch_token_mean" else "row",
    source="arXiv 2404.05868 eq. 3; 2503.21088 eq. 2",
)
def npo(
    scores: LabelScores,
    *,
    beta: Annotated[float, Gt(0)] = 0.1,
    reduction: Literal["sum", "mean", "batch_token_mean"] = "sum",
) -> Terms:
    """Negative preference optimisation: push forget answers below the reference, then stop.

    ``L = 2/beta * log(1 + (p_policy/p_ref)^beta) = -2/beta * log sigmoid(-beta * D)`` with the
    log-ratio ``D = log p_policy(y|x) - log p_ref(y|x)``. Its gradient is that of gradient ascent
    times ``w = 2 sigmoid(beta * D)``: 1 at the start, 0 once the answer is gone. ``beta -> 0``
    recovers gradient ascent (up to a constant).

    ``reduction`` says what D is, and gives ``beta`` its meaning (docs/objectives.md):

    - ``sum``: over the sequence, as published; D is in nats per sequence.
    - ``mean``: over the labels of each row; D is in nats per token, so long documents and short
      answers are driven equally deep.
    - ``batch_token_mean``: one D for the whole micro-batch, as in ZJUKLAB's released code. Depends
      on how the batch is cut.

    Logs: ``log_ratio`` (D), ``npo_weight`` (w), ``saturated`` (share of rows with w < 0.05).
    """
    ratio = scores.log_ratio()
    if reduction == "sum":
        log_ratio = ratio.sum(-1)
    elif reduction == "mean":
        log_ratio = token_mean(ratio, scores)
    else:
        log_ratio = batch_token_mean(ratio, scores)
    values = 2 / beta * F.softplus(beta * log_ratio)
    with torch.no_grad():
        weight = 2 * torch.sigmoid(beta * log_ratio)
        logs = {
            "log_ratio": log_ratio.detach(),
            "npo_weight": weight,
            "saturated": (weight < SATURATED).float(),
        }
    return Terms(values, logs)


@objective("simnpo", source="arXiv 2410.07163 eq. 4")
def simnpo(
    scores: LabelScores, *, beta: Annotated[float, Gt(0)] = 4.5, gamma: float = 0.0
) -> Terms:
    """SimNPO: NPO without a reference, on the length-normalised log-prob.

    ``L = -2/beta * log sigmoid(-beta/|y| * log p(y|x) - gamma)``. Published for TOFU forget10:
    beta 4.5, gamma 0, forget weight 0.125, retain NLL weight 1.
    """
    mean_logp = (scores.logp * scores.mask).sum(-1) / scores.lengths
    argument = beta * mean_logp + gamma
    values = 2 / beta * F.softplus(argument)
    return Terms(values, {"npo_weight": 2 * torch.sigmoid(argument.detach())})


def _weighted_ascent(scores: LabelScores, weight: Tensor) -> Terms:
    """Mean over the labels of each row of ``w_t log p_t``; the weight carries no gradient. Four
    published weights: WGA, TNPO, WTNPO, SatImp."""
    return Terms(token_mean(weight * scores.logp, scores), {"weight": token_mean(weight, scores)})


@objective("wga", source="arXiv 2502.19301 eq. 9")
def wga(scores: LabelScores, *, alpha: Annotated[float, Ge(0)] = 1.0) -> Terms:
    """Weighted gradient ascent: ``w_t = p_t^alpha``, so tokens already forgotten stop counting."""
    with torch.no_grad():
        weight = (alpha * scores.logp).exp() * scores.mask
    return _weighted_ascent(scores, weight)


@objective("tnpo", reference=True, source="arXiv 2502.19301 eq. 11")
def tnpo(scores: LabelScores, *, beta: Annotated[float, Gt(0)] = 4.0) -> Terms:
    """Token-wise NPO: ``w_t = 2 p_t^beta / (p_t^beta + p_ref,t^beta)`` for each token."""
    with torch.no_grad():
        weight = 2 * torch.sigmoid(beta * scores.log_ratio()) * scores.mask
    return _weighted_ascent(scores, weight)


@objective("wtnpo", reference=True, source="arXiv 2502.19301 eq. 12")
def wtnpo(
    scores: LabelScores,
    *,
    beta: Annotated[float, Gt(0)] = 4.0,
    alpha: Annotated[float, Ge(0)] = 1.5,
) -> Terms:
    """Weighted token-wise NPO: the TNPO weight times ``p_t^alpha``."""
    with torch.no_grad():
        weight = 2 * torch.sigmoid(beta * scores.log_ratio()) * (alpha * scores.logp).exp()
        weight = weight * scores.mask
    return _weighted_ascent(scores, weight)


@objective("satimp", source="arXiv 2505.11953")
def satimp(
    scores: LabelScores,
    *,
    beta1: Annotated[float, Ge(0)] = 5.0,
    beta2: Annotated[float, Ge(0)] = 1.0,
) -> Terms:
    """Saturation-importance weighting: ``w_t = p_t^beta1 (1 - p_t)^beta2``."""
    with torch.no_grad():
        p = scores.logp.exp()
        weight = p**beta1 * (1 - p) ** beta2 * scores.mask
    return _weighted_ascent(scores, weight)
