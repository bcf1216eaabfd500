"""Objectives that see whole distributions: soft-target losses.

Each is called on a chunk of positions and returns one value per position; the engine decides which
positions those are (``positions: answer`` or ``all``) and never holds all of them at once.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Gt, Le, Lt
from torch import Tensor

from axolotl_unlearn.objectives.base import objective


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
    target = ref_logp.clone()
    known = labels >= 0
    rows = torch.arange(len(labels), device=labels.device)[known]
    target[rows, labels[known]] -= beta
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
    target: Annotated[float, Gt(0), Lt(1)] = 0.01,
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
    target = logp.detach().clone()
    known = labels >= 0
    rows = torch.arange(len(labels), device=labels.device)[known]
    target[rows, labels[known]] = -torch.inf
    return -(target.softmax(-1) * logp).sum(-1)


@objective(
    "nckd", sees="distributions", reference=True, unit="token", source="arXiv 2203.08679 eq. 7"
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
