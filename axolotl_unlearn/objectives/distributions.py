"""Objectives that see whole distributions, beside `kl`: soft targets, and losses that are bounded
by construction, each with a level at which it stops.

Each is called on a chunk of positions and returns one value per position, 0 where there is no label
and the objective needs one; the engine decides which positions those are (``positions: answer`` or
``all``) and never holds all of them at once. Without a reference, targets are the policy's own,
detached. Log-probs stand for logits throughout, since a constant added to all logits of a position
changes none of these losses.
"""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from axolotl_unlearn.objectives.base import Tensor, objective, torch

Share = Annotated[float, Gt(0), Lt(1)]


def _label(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each position has a label, ``[p]``, and an index to gather it by, ``[p, 1]``."""
    return labels >= 0, labels.clamp(min=0)[:, None]


def _without_label(values: Tensor, labels: Tensor) -> Tensor:
    """``values`` with the label's set to minus infinity, ``[p, V]``."""
    known, index = _label(labels)
    own = values.gather(1, index)
    return values.scatter(1, index, own.masked_fill(known[:, None], -torch.inf))


@objective(
    "undial", sees="distributions", reference=True, unit="token", source="arXiv 2402.10052 eq. 3"
)
def undial(
    logp: Tensor, ref_logp: Tensor, labels: Tensor, *, beta: Annotated[float, Gt(0)] = 10.0
) -> Tensor:
    """UNDIAL: distil from the reference with the label's logit lowered by ``beta``.

    ``CE(softmax(z_ref - beta * onehot(y)), p)`` per answer token; log-probs may stand for the
    logits z_ref, since a constant does not change the softmax. No retain set needed.
    """
    known, index = _label(labels)
    target = ref_logp.scatter_add(1, index, -beta * known[:, None].to(ref_logp))
    return -(target.softmax(-1) * logp).sum(-1)


def least_likely(ref_logp: Tensor, mask: Tensor, *, share: float, **_: float) -> Tensor:
    """The ``share`` of each row's labels (rounded up) that the reference finds least likely.

    Args:
        ref_logp: ``[row, token]`` log-probs of the labels.
        mask: ``[row, token]`` bool, where there is one.
    """
    rank = ref_logp.masked_fill(~mask, torch.inf).argsort(stable=True, dim=-1).argsort(-1)
    return mask & (rank < (share * mask.sum(-1, keepdim=True)).ceil())


@objective(
    "shred",
    sees="distributions",
    reference=True,
    unit="token",
    source="arXiv 2605.07482 (SHRED)",
    picks=least_likely,
)
def shred(
    logp: Tensor,
    ref_logp: Tensor,
    labels: Tensor,
    *,
    share: Annotated[float, Gt(0), Le(1)] = 0.15,
    target: Share = 0.01,
) -> Tensor:
    """SHRED: distil from the reference, with the least likely labels of each row brought down.

    ``KL(q || p)``: q is the reference, except that the ``share`` of a row's labels which it finds
    least likely (where the memory is, says the paper) get the probability ``target``, if they have
    more, and the other tokens the rest in their proportion. No retain set needed.

    Args:
        logp, ref_logp: ``[position, vocabulary]`` log-probs of policy and reference.
        labels: ``[position]``, -100 where the label is left as it is.
    """
    label, known = labels.clamp(min=0)[:, None], labels[:, None] >= 0
    hidden = torch.zeros_like(logp, dtype=torch.bool).scatter(1, label, known)
    own = ref_logp.gather(1, label)
    lowered = own.clamp(max=math.log(target))
    # Not by subtraction: nothing but the label may have a probability in the reference.
    least = torch.finfo(logp.dtype).min / 4
    others = ref_logp.masked_fill(hidden, least).log_softmax(-1) + torch.log1p(-lowered.exp())
    wanted = torch.where(known, others.scatter(1, label, lowered), ref_logp)
    return (wanted.exp() * (wanted - logp)).sum(-1)


@objective("ceu", sees="distributions", unit="token", source="arXiv 2503.01224 eq. 5")
def ceu(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """CE-U: cross-entropy to the model's own distribution with the label removed.

    The target is ``softmax`` of the detached logits with the label's set to minus infinity, so the
    gradient is bounded and vanishes once the label has no probability. No reference, no retain set.
    """
    target = _without_label(logp.detach(), labels)
    return -(target.softmax(-1) * logp).sum(-1)


@objective(
    "nckd",
    sees="distributions",
    reference=True,
    unit="token",
    level="distribution",
    source="arXiv 2203.08679 eq. 7",
)
def nckd(
    logp: Tensor,
    ref_logp: Tensor,
    labels: Tensor,
    *,
    temperature: Annotated[float, Gt(0)] = 1.0,
    k: Annotated[int, Gt(0)] = 20,
) -> Tensor:
    """NCKD: what the model says *instead* of the label is what the reference would say instead.

    ``(1 - p_y) KL(q' || p')`` with ``p'`` and ``q'`` the distributions over all tokens but the
    label, ``q'`` at a temperature; the factor is that of the chain rule of KL, detached. It leaves
    the label's own probability alone: beside `match`, which sets that one. A label that is pushed
    down gives its mass to a flat rest, since the memorised model never had to know one.

    - ``k``: the reference's likeliest ``k`` are compared one by one, all others as one: a sharper
      reference has a thinner tail than the policy gives to text that it never saw.

    Args:
        logp, ref_logp: ``[position, vocabulary]`` log-probs of policy and reference.
        labels: ``[position]``; where there is none it is the whole KL(q || p).
        temperature: Below 1 sharper than the reference.
    """
    label = labels.clamp(min=0)[:, None]
    known = labels >= 0
    hidden = torch.zeros_like(logp, dtype=torch.bool).scatter(1, label, known[:, None])
    least = torch.finfo(logp.dtype).min / 4
    ours = logp.masked_fill(hidden, least).log_softmax(-1)
    theirs = (ref_logp / temperature).masked_fill(hidden, least).log_softmax(-1)
    if k < logp.shape[-1] - 1:
        theirs, chosen = theirs.topk(k, dim=-1)
        ours = ours.gather(1, chosen)
        ours, theirs = (torch.cat([x, _others(x)], -1) for x in (ours, theirs))
    other = -torch.expm1(logp.detach().gather(1, label)[:, 0].clamp(max=0))
    other = other.where(known, 1.0)
    return other * (theirs.exp() * (theirs - ours)).sum(-1)


def _others(logp: Tensor) -> Tensor:
    """``[position, 1]`` log-prob of everything that is not among ``[position, k]``."""
    some = logp.logsumexp(-1, keepdim=True).clamp(max=-1e-6)
    return torch.log(-torch.expm1(some))


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


@objective("masc", sees="distributions", unit="token", source="arXiv 2606.02920")
def masc(
    logp: Tensor,
    ref_logp: Tensor | None,
    labels: Tensor,
    *,
    rho: Share = 0.7,
    eta: Annotated[float, Gt(0)] = 0.25,
    k: Annotated[int, Gt(0)] = 10,
    b: Annotated[float, Gt(0)] = 1.0,
) -> Tensor:
    """MASC: push the label's margin over the ``k`` best other tokens below a threshold, then stop.

    ``relu(m - (log(rho / (1 - rho)) - eta)) / eta``, margin ``m = b z_y - logsumexp(b z_v)``
    over the k most likely tokens other than the label. ``rho`` is the label's share among them at
    which it would stop without ``eta``. Published for TOFU: weight 0.05, no retain loss, LoRA r 16.

    Example: p = (1/2, 1/4, 1/4), label 0, b = 1, k = 2: m = ln(1/2) - ln(1/2) = 0.
    """
    known, index = _label(labels)
    others = _without_label(logp, labels)
    best = others.topk(min(k, others.shape[-1] - 1), dim=-1).values
    margin = b * logp.gather(1, index)[:, 0] - torch.logsumexp(b * best, -1)
    threshold = math.log(rho / (1 - rho)) - eta
    return torch.where(known, (margin - threshold).clamp(min=0) / eta, 0.0)


@objective("ihl", sees="distributions", unit="token", source="arXiv 2408.06621 (LoKU)")
def inverted_hinge(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """Inverted hinge (LoKU): lower the label's probability and raise that of the best other token.

    ``max(0, 1 + p_y - max_{v != y} p_v)``, between 0 and 2.

    Example: p = (1/2, 1/4, 1/4), label 0: 1 + 1/2 - 1/4 = 5/4.
    """
    known, index = _label(labels)
    prob = logp.exp()
    best = _without_label(prob, labels).amax(-1)
    return torch.where(known, (1 + prob.gather(1, index)[:, 0] - best).clamp(min=0), 0.0)


@objective("unilogit", sees="distributions", unit="token", source="arXiv 2505.06027")
def unilogit(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """Unilogit: distil from the policy itself with the label brought to probability ``1/V``.

    ``KL(p || q)`` with ``q = softmax(z~)``, detached: the label's logit is ``logsumexp_{v != y} z_v
    - log(V - 1)``, the others are the policy's own. 0 once ``p_y = 1/V``.

    Example: V = 2, p = (3/4, 1/4), label 0: q = (1/2, 1/2), KL = ln 2 - H(p).
    """
    known, index = _label(labels)
    with torch.no_grad():
        rest = torch.logsumexp(_without_label(logp, labels), -1) - math.log(logp.shape[-1] - 1)
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


@objective("bst", sees="distributions", unit="token", source="arXiv 2510.19422 (BS-T)")
def bootstrapped_targets(
    logp: Tensor,
    ref_logp: Tensor | None,
    labels: Tensor,
    *,
    mix: Annotated[float, Ge(0), Le(1)] = 0.2,
    top_k: Annotated[int, Gt(0)] = 20,
) -> Tensor:
    """BS-T: ascent on the label *and* on what the policy itself believes, so mass goes elsewhere.

    ``sum_v t_v log p_v`` (minimised) with ``t = (1 - mix) e_y + mix q``; ``q``: its ``top_k``
    most likely tokens renormalised, detached (the paper says truncated, the released code
    renormalises). ``mix = 0`` is gradient ascent. Unbounded below, unlike the others here.

    Example: p = (1/2, 1/4, 1/4), label 0, mix 0.5, top_k 1: q = e_0, so t = e_0 and the value is
    -ln 2.
    """
    known, index = _label(labels)
    best = logp.topk(min(top_k, logp.shape[-1]), dim=-1)
    belief = best.values.detach().softmax(-1)
    own = logp.gather(1, index)[:, 0]
    value = (1 - mix) * own + mix * (belief * best.values).sum(-1)
    return torch.where(known, value, 0.0)
