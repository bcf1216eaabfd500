"""Sequence-level preference losses: an alternative is preferred to the forget answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from annotated_types import Gt

from axolotl_unlearn.objectives.base import (
    F,
    LabelScores,
    Tensor,
    Terms,
    objective,
    token_mean,
)


@objective("dpo", sees="pairs", reference=True, source="arXiv 2305.18290 eq. 7; 2409.13474 (AltPO)")
def dpo(
    forget: LabelScores, alternative: LabelScores, *, beta: Annotated[float, Gt(0)] = 0.1
) -> Terms:
    """DPO: prefer the alternative to the forget answer (IdkDPO, AltPO), stop once it is preferred.

    ``-2/beta * log sigmoid(beta * (D' - D))`` with the log-ratio to the reference, summed over the
    sequence, of the alternative (D') and of the forget answer (D). With "I don't know" answers
    this is IdkDPO of TOFU, with plausible ones sampled from the model AltPO. The factor 2 is that
    of the unlearning codes (DPO: ``-log sigmoid``); the gradient starts as that of D - D'.

    Example: beta 1, D = -ln 3, D' = 0: 2 ln(4/3).

    Logs: ``log_ratio`` (D), ``alternative_log_ratio`` (D'), ``preferred`` (share with D' > D).
    """
    worse, better = forget.log_ratio().sum(-1), alternative.log_ratio().sum(-1)
    margin = better - worse
    logs = {
        "log_ratio": worse.detach(),
        "alternative_log_ratio": better.detach(),
        "preferred": (margin > 0).float(),
    }
    return Terms(2 / beta * F.softplus(-beta * margin), logs)


#: Name -> (g, f* of g) of arXiv 1606.00709 table 6: the output activation, and the conjugate of it.
_DIVERGENCES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "total_variation": (lambda v: v.tanh() / 2, lambda v: v.tanh() / 2),
    "jensen_shannon": (
        lambda v: math.log(2) - F.softplus(-v),
        lambda v: F.softplus(v) - math.log(2),
    ),
    "pearson": (lambda v: v, lambda v: v**2 / 4 + v),
    "kl": (lambda v: v, lambda v: (v - 1).exp()),
    "reverse_kl": (lambda v: -(-v).exp(), lambda v: v - 1),
    "hellinger": (lambda v: 1 - (-v).exp(), lambda v: v.exp() - 1),
    "neyman": (lambda v: 1 - (-v).exp(), lambda v: 2 - 2 * (-v / 2).exp()),
    # The conjugate has Lambert's W; as in FLAT's code, its series to the third order.
    "jeffrey": (lambda v: v, lambda v: v + v**2 / 4 + v**3 / 16),
}


@objective("flat", sees="pairs", source="arXiv 2410.11143 eq. 5; 1606.00709 table 6")
def flat(
    forget: LabelScores,
    alternative: LabelScores,
    *,
    divergence: Literal[*_DIVERGENCES] = "total_variation",
) -> Terms:
    """FLAT: widen an f-divergence between alternative and forget answer, without retain rows.

    ``-g(P') + f*(g(P))`` with P the mean probability of a label of the forget answer, P' of the
    alternative. Published without reference and retain loss. For three divergences (reverse KL,
    Hellinger, Neyman) the released code has ``e^v`` where the table of f-GANs has ``e^-v``, which
    moves both answers the wrong way; this is the table. The released code takes P over the whole
    micro-batch and divides by the padded length; here it is a row's own mean.

    Example: P = 0.5, P' = 0.25, total variation: (tanh 0.5 - tanh 0.25) / 2.
    """
    g, conjugate = _DIVERGENCES[divergence]
    worse, better = (token_mean(s.logp.exp() * s.mask, s) for s in (forget, alternative))
    logs = {"forget_probability": worse.detach(), "alternative_probability": better.detach()}
    return Terms(conjugate(worse) - g(better), logs)
