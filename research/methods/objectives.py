"""Objectives that no preset of the package uses: `unlearn.extensions: [research.methods.objectives]`."""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Le

from axolotl_unlearn.objectives.base import Tensor, objective, torch
from axolotl_unlearn.objectives.distributions import Share, label_of, without_label


@objective(
    "clamped_entropy",
    sees="distributions",
    unit="token",
    source="BLADE (its open-unlearning fork; no arXiv id)",
)
def clamped_entropy(
    logp: Tensor, ref_logp: Tensor | None, labels: Tensor, *, tau: Annotated[Share, Le(1)] = 0.7
) -> Tensor:
    """Clamped entropy (BLADE): raise the entropy of each answer token up to ``tau log V``.

    ``max(0, tau log V - H(p))`` in nats, with ``H = -sum_v p_v log p_v``. It does not look at the
    label, so it also flattens tokens that any model would know (and ``0.7 log V`` lies above the
    entropy of a model that never saw the text).

    Example: V = 4, tau 0.5, a certain position (H = 0): 0.5 ln 4 = ln 2.
    """
    entropy = -(logp.exp() * logp).sum(-1)
    return (tau * math.log(logp.shape[-1]) - entropy).clamp(min=0)


@objective("ihl", sees="distributions", unit="token", source="arXiv 2408.06621 (LoKU)")
def inverted_hinge(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """Inverted hinge (LoKU): lower the label's probability and raise that of the best other token.

    ``max(0, 1 + p_y - max_{v != y} p_v)``, between 0 and 2.

    Example: p = (1/2, 1/4, 1/4), label 0: 1 + 1/2 - 1/4 = 5/4.
    """
    known, index = label_of(labels)
    prob = logp.exp()
    best = without_label(prob, labels).amax(-1)
    return torch.where(known, (1 + prob.gather(1, index)[:, 0] - best).clamp(min=0), 0.0)


@objective("unilogit", sees="distributions", unit="token", source="arXiv 2505.06027")
def unilogit(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """Unilogit: distil from the policy itself with the label brought to probability ``1/V``.

    ``KL(p || q)`` with ``q = softmax(z~)``, detached: the label's logit is ``logsumexp_{v != y} z_v
    - log(V - 1)``, the others are the policy's own. 0 once ``p_y = 1/V``.

    Example: V = 2, p = (3/4, 1/4), label 0: q = (1/2, 1/2), KL = ln 2 - H(p).
    """
    known, index = label_of(labels)
    with torch.no_grad():
        rest = torch.logsumexp(without_label(logp, labels), -1) - math.log(logp.shape[-1] - 1)
        target = logp.scatter(1, index, rest[:, None]).log_softmax(-1)
    value = (logp.exp() * (logp - target)).sum(-1)
    return torch.where(known, value, 0.0)


@objective("flat_logits", sees="distributions", unit="token", source="arXiv 2506.05314 (PDU)")
def flat_logits(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """PDU's forget loss: the squared distance of the largest logit from the mean logit.

    ``(max_v z_v - mean_v z_v)^2``, 0 for a uniform distribution. Published with a dual variable on
    the retain loss; the released code's mask is off by one position, ours is not.

    Example: V = 2, p = (3/4, 1/4): (ln 3 / 2)^2.
    """
    return (logp.amax(-1) - logp.mean(-1)) ** 2
