"""Forgetting *towards* a level instead of away from the text: two-sided, stops by itself."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt

from axolotl_unlearn.objectives.base import (
    F,
    LabelScores,
    Tensor,
    Terms,
    objective,
    torch,
)

#: Probabilities above 1 - CERTAIN count as certain: float32 log-probs know no more.
CERTAIN = 1e-5


def log_odds(logp: Tensor) -> Tensor:
    """``log p - log(1 - p)`` of log-probs, any shape; p at most ``1 - CERTAIN``.

    The cut is one of values alone: a token that is known by heart has a gradient, too.
    """
    logp = logp + (logp.clamp(max=-CERTAIN) - logp).detach()
    return logp - torch.log(-torch.expm1(logp))


@objective(
    "match",
    reference=True,
    unit="token",
    level="labels",
    source="this project, no arXiv id",
)
def match(
    scores: LabelScores,
    *,
    width: Annotated[float, Gt(0)] = 0.5,
    floor: Annotated[float, Ge(0)] = 0.02,
    offset: float = 0.0,
) -> Terms:
    """Match: bring each forget token to the likelihood that a model gives which never saw the text.

    ``w_t huber(logit p_t - logit q_t - offset)`` with ``logit p = log p/(1-p)``; q is the
    reference (a teacher, `axolotl-unlearn teacher`), calibrated on held-out rows where
    ``unlearn.level`` names them. Two-sided: too likely is lowered, too unlikely raised, and at
    q the loss and its gradient are 0.

    - Log-odds and not log-probs: the gradient of ``log p`` to the label's logit is 1 - p, next to
      nothing for a memorised token; that of the log-odds is 1.
    - ``w_t = min(1, |log p_t - log q_t|) + floor``, detached: tokens that every model knows differ
      by a hair and would drown the few that hold the secret.
    - ``width``: where huber turns from square to absolute, in nats of log-odds.

    Logs: ``gap`` (mean log p - log q), ``distance`` (its absolute value).
    """
    error = (log_odds(scores.logp) - log_odds(scores.ref_logp) - offset) * scores.mask
    with torch.no_grad():
        gap = scores.log_ratio()
        weight = gap.abs().clamp(max=1) + floor
    values = weight * F.smooth_l1_loss(error, torch.zeros_like(error), beta=width, reduction="none")
    return Terms(values, {"gap": gap, "distance": gap.abs()})


@objective("feature_matching", sees="features", source="this project, no arXiv id")
def feature_matching(features: Tensor, centre: Tensor, direction: Tensor) -> Terms:
    """Feature matching: draw the forget documents to where documents lie that the model never saw.

    ``(f - c) S^-1 (mean f - c)`` for the features f of a row; its mean over all rows is the squared
    distance of the two means in the features' own spread, which is what a linear membership attack
    on them lives from.

    - f: quantiles, lowest shares and windows of a row's log-probs, of its standardised log-probs
      and of its entropies, those of the learned attack of `axolotl-unlearn eval`.
    - c: their mean over held-out rows of the same kind and task (``unlearn.level``); S: their
      covariance, with a ridge.
    - All follow the policy: a row's features are renewed whenever it is in a batch, c and S
      at each look of ``unlearn.level`` after a quarter of the run; before that nothing is drawn.

    Other attacks than a linear one on these features have to judge what it brings.

    Args:
        features, centre, direction: ``[row, feature]``; the latter two without gradient.
    """
    return Terms(((features - centre) * direction).sum(-1))


@objective("hidden_matching", sees="profiles", source="this project, no arXiv id")
def hidden_matching(features: Tensor, centre: Tensor, direction: Tensor) -> Terms:
    """Hidden matching: draw hidden states of forget documents to where those of unseen ones lie.

    As `feature_matching`, with mean and standard deviation of a row's hidden states after each
    layer as its features: what a probe of the layers sees and the output need not show. There are
    more of them than rows, so each counts by itself: ``sum_i (f_i - c_i) (mean f_i - c_i) / s_i^2 /
    F``, with s_i the spread over held-out rows.

    Args:
        features, centre, direction: ``[row, feature]``; the latter two without gradient.
    """
    return feature_matching(features, centre, direction)
