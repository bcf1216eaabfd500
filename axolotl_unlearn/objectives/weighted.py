"""Token-weighted gradient ascent: ``sum_t w_t log p_t`` with a detached weight.

One family, four published weights: WGA, TNPO, WTNPO and SatImp.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from axolotl_unlearn.objectives.base import LabelScores, Terms, objective, token_mean


def _weighted_ascent(scores: LabelScores, weight: Tensor) -> Terms:
    """Mean over the labels of each row of ``w_t log p_t``; the weight carries no gradient."""
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
