"""Sequence-level preference losses: an alternative is preferred to the forget answer."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from axolotl_unlearn.objectives.base import (
    F,
    LabelScores,
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


@objective("flat", sees="pairs", source="arXiv 2410.11143 eq. 5; 1606.00709 table 6")
def flat(forget: LabelScores, alternative: LabelScores) -> Terms:
    """FLAT: widen the total variation between alternative and forget answer, without retain rows.

    ``-g(P') + f*(g(P))`` with P the mean probability of a label of the forget answer, P' of the
    alternative, ``g(v) = tanh(v) / 2`` and ``f*`` the identity. Published with seven other
    f-divergences, without reference and retain loss. The released code takes P over the whole
    micro-batch and divides by the padded length; here it is a row's own mean.

    Example: P = 0.5, P' = 0.25: (tanh 0.5 - tanh 0.25) / 2.
    """
    worse, better = (token_mean(s.logp.exp() * s.mask, s) for s in (forget, alternative))
    logs = {"forget_probability": worse.detach(), "alternative_probability": better.detach()}
    return Terms((worse.tanh() - better.tanh()) / 2, logs)
