"""Negative preference optimisation: the forget answer as the dispreferred one, alone."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch.nn import functional as F

from axolotl_unlearn.objectives.base import (
    LabelScores,
    Terms,
    batch_token_mean,
    objective,
    token_mean,
)

Reduction = Literal["sum", "mean", "batch_token_mean"]

#: A row whose NPO gradient weight has fallen below this has, for training, stopped.
SATURATED = 0.05


def _unit(parameters: dict) -> str:
    return "batch" if parameters.get("reduction") == "batch_token_mean" else "row"


@objective("npo", reference=True, unit=_unit, source="arXiv 2404.05868 eq. 3; 2503.21088 eq. 2")
def npo(
    scores: LabelScores,
    *,
    beta: Annotated[float, Gt(0)] = 0.1,
    reduction: Reduction = "sum",
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
    mean_logp = scores.sequence_logp() / scores.lengths
    argument = beta * mean_logp + gamma
    values = 2 / beta * F.softplus(argument)
    return Terms(values, {"npo_weight": 2 * torch.sigmoid(argument.detach())})
