"""Statistics of positions together with their gradients, in one pass over a chunk of logits.

With a frozen head, the gradient of a position's statistic s (the label's log-prob, a KL) with
respect to its hidden state h is ``ds/dh = (ds/dz) W`` for logits ``z = W h``. It needs nothing that
comes later, whatever an objective then does with s, so it is formed while the chunk's logits exist
and the logits are dropped: D numbers a position stay instead of V, and the backward pass
recomputes nothing. `Linearised` multiplies them with what comes back from the loss.

Shape letters: P, p positions (of a chunk), V vocabulary, D hidden, E distribution entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from axolotl_unlearn.data.columns import IGNORE

if TYPE_CHECKING:
    from axolotl_unlearn.engine.scoring import Entry


class Linearised(torch.autograd.Function):
    """``values`` as a function of ``hidden``, with their known gradients.

    ``apply(hidden [P, D], values [P, C], slopes [P, C, D]) -> [P, C]``; no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return values.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        # In float32: a loss scaler may have multiplied upstream beyond half precision.
        gradient = torch.einsum("pc,pcd->pd", upstream, slopes.to(upstream.dtype))
        return gradient.to(slopes.dtype), None, None


def linearised_statistics(
    hidden: Tensor,
    target: Tensor,
    head: Callable[[Tensor], Tensor],
    entries: Sequence[Entry],
    member: Tensor,
    ref_hidden: Tensor | None,
    ref_head: Callable[[Tensor], Tensor] | None,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """One chunk.

    Args:
        hidden: ``[p, D]``, detached.
        target: ``[p]`` label ids or -100.
        head, ref_head: hidden states to logits, of policy and reference.
        member: ``[p, E]`` bool, whether entry e looks at the position.

    Returns:
        values ``[p, 1 + E]`` float32 (0 where there is no target, or the entry does not look),
        and their gradients by ``hidden``, ``[p, 1 + E, D]`` in its dtype, or None.
    """
    with torch.set_grad_enabled(with_gradient):
        source = hidden.detach().requires_grad_(with_gradient)
        logits = head(source)
    with torch.no_grad():
        logp = logits.detach().float().log_softmax(-1)
        ref_logp = None
        if ref_hidden is not None:
            ref_logp = ref_head(ref_hidden).float().log_softmax(-1)
        known = target != IGNORE
        index = target.clamp(min=0)[:, None]
        picked = logp.gather(1, index)[:, 0]
        values = [torch.where(known, picked, 0.0)]
        prob = logp.exp()

    def slope(by_logits: Tensor, where: Tensor, last: bool) -> Tensor:
        (found,) = torch.autograd.grad(
            logits, source, by_logits.to(logits.dtype), retain_graph=not last
        )
        return found if bool(where.all()) else found * where[:, None]

    slopes = [None]  # the label's comes last, when ``prob`` may be overwritten
    for number, entry in enumerate(entries):
        where = member[:, number]
        if not bool(where.any()):
            values.append(torch.zeros_like(picked))
            slopes.append(torch.zeros_like(hidden))
            continue
        parameters = entry.args.parameters
        if entry.objective.name == "kl" and (number == len(entries) - 1):
            direction = parameters.get("direction", "reverse")
            value, by_logits = kl_and_gradient(prob, logp, ref_logp, direction, with_gradient)
        else:
            value, by_logits = _by_autograd(
                entry.objective.function, prob, logp, ref_logp, target, parameters, with_gradient
            )
        values.append(torch.where(where, value, 0.0))
        if with_gradient:
            slopes.append(slope(by_logits, where, last=False))
        del by_logits
    stacked = torch.stack(values, -1)
    if not with_gradient:
        return stacked, None
    if bool(known.any()):
        by_logits = prob.neg_().scatter_add_(1, index, torch.ones_like(prob[:, :1]))
        slopes[0] = slope(by_logits, known, last=True)
    else:
        slopes[0] = torch.zeros_like(hidden)
    return stacked, torch.stack(slopes, 1)


@torch.no_grad()
def kl_and_gradient(
    prob: Tensor,
    logp: Tensor,
    ref_logp: Tensor,
    direction: Literal["forward", "reverse"],
    with_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """KL of each position and its gradient by the policy's logits, in place of ``ref_logp``.

    - reverse, ``sum_v p (log p - log q)``: gradient ``p_v (log p_v - log q_v - KL)``;
    - forward, ``sum_v q (log q - log p)``: gradient ``p_v - q_v``.

    Args:
        prob, logp: ``[p, V]`` of the policy; kept.
        ref_logp: ``[p, V]`` of the reference; overwritten.

    Returns:
        ``[p]`` and ``[p, V]``.
    """
    if direction == "reverse":
        gap = ref_logp.neg_().add_(logp)
        value = torch.linalg.vecdot(prob, gap)
        return value, gap.sub_(value[:, None]).mul_(prob) if with_gradient else None
    if direction == "forward":
        gap = ref_logp - logp
        ref_prob = ref_logp.exp_()
        value = torch.linalg.vecdot(ref_prob, gap)
        return value, torch.sub(prob, ref_prob, out=gap) if with_gradient else None
    raise ValueError(f"unknown direction {direction!r}")


def _by_autograd(
    function: Callable[..., Tensor],
    prob: Tensor,
    logp: Tensor,
    ref_logp: Tensor | None,
    target: Tensor,
    parameters: dict[str, Any],
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Values of a registered objective, and their gradient by the logits: ``g - p sum(g)``."""
    with torch.set_grad_enabled(with_gradient):
        leaf = logp.detach().requires_grad_(with_gradient)
        value = function(leaf, ref_logp, target, **parameters)
    if not with_gradient:
        return value, None
    (by_logp,) = torch.autograd.grad(value.sum(), leaf)
    by_logits = by_logp - prob * by_logp.sum(-1, keepdim=True)
    return value.detach(), by_logits
