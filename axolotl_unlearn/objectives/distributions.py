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


def label_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each position has a label, ``[p]``, and an index to gather it by, ``[p, 1]``."""
    return labels >= 0, labels.clamp(min=0)[:, None]


def without_label(values: Tensor, labels: Tensor) -> Tensor:
    """``values`` with the label's set to minus infinity, ``[p, V]``."""
    known, index = label_of(labels)
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
    known, index = label_of(labels)
    target = ref_logp.scatter_add(1, index, -beta * known[:, None].to(ref_logp))
    return -(target.softmax(-1) * logp).sum(-1)


@objective("ceu", sees="distributions", unit="token", source="arXiv 2503.01224 eq. 5")
def ceu(logp: Tensor, ref_logp: Tensor | None, labels: Tensor) -> Tensor:
    """CE-U: cross-entropy to the model's own distribution with the label removed.

    The target is ``softmax`` of the detached logits with the label's set to minus infinity, so the
    gradient is bounded and vanishes once the label has no probability. No reference, no retain set.
    """
    target = without_label(logp.detach(), labels)
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
    known, index = label_of(labels)
    others = without_label(logp, labels)
    best = others.topk(min(k, others.shape[-1] - 1), dim=-1).values
    margin = b * logp.gather(1, index)[:, 0] - torch.logsumexp(b * best, -1)
    threshold = math.log(rho / (1 - rho)) - eta
    return torch.where(known, (margin - threshold).clamp(min=0) / eta, 0.0)


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
    known, index = label_of(labels)
    best = logp.topk(min(top_k, logp.shape[-1]), dim=-1)
    belief = best.values.detach().softmax(-1)
    own = logp.gather(1, index)[:, 0]
    value = (1 - mix) * own + mix * (belief * best.values).sum(-1)
    return torch.where(known, value, 0.0)
