"""Statistics of positions together with their gradients, in one pass over a chunk of logits.

With a frozen head, the gradient of a position's statistic s (the label's log-prob, a KL) with
respect to its hidden state h is ``ds/dh = (ds/dz) W`` for logits ``z = W h``. It needs nothing that
comes later, whatever an objective then does with s, so it is formed while the chunk's logits exist
and the logits are dropped: D numbers a position stay instead of V, and the backward pass
recomputes nothing. `Linearised` multiplies them with what comes back from the loss.

Shape letters: P, p positions (of a chunk), V vocabulary, D hidden, C and K numbers of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.data.columns import IGNORE
from axolotl_unlearn.engine.groups import Group
from axolotl_unlearn.engine.needs import Valuation


class Linearised(torch.autograd.Function):
    """``values`` as a function of ``states``, with their known gradients.

    ``apply(states [P, D], values [P, C], slopes [P, C, D]) -> [P, C]``; no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
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
    states: Tensor,
    group: Group,
    head: Callable[[Tensor], Tensor],
    ref_logps: Sequence[Tensor | None],
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One chunk.

    How much each valuation weighs in the loss is known beforehand, so their gradients are added up
    by the logits, and one product with the head serves them all.

    Args:
        states: ``[p, D]``, detached.
        head: states to logits.
        ref_logps: ``[p, V]`` log-probs of each valuation's reference; overwritten.

    Returns:
        the two tensors of `GroupNumbers`, and the gradients of the first by ``states``,
        ``[p, K, D]`` in its dtype, or None.
    """
    with torch.set_grad_enabled(with_gradient):
        source = states.detach().requires_grad_(with_gradient)
        logits = head(source)
    logp = logits.detach().float().log_softmax(-1)
    prob = logp.exp() if with_gradient or group.valuations else None
    known = group.next_ids != IGNORE
    index = group.next_ids.clamp(min=0)[:, None]
    label_logp = torch.where(known, logp.gather(1, index)[:, 0], 0.0)

    values, combined = [], None
    for number, (valuation, ref_logp) in enumerate(zip(group.valuations, ref_logps, strict=True)):
        if valuation.slope is not None:
            values.append(valuation.slope * label_logp)
            continue
        read_again = any(other is ref_logp for other in ref_logps[number + 1 :])
        own_ref = ref_logp.clone() if read_again and ref_logp is not None else ref_logp
        value, by_logits = _value_and_gradient(
            valuation, prob, logp, own_ref, group.next_ids, with_gradient
        )
        values.append(value)
        if with_gradient:
            by_logits = by_logits.mul_(group.shares[number])
            combined = by_logits if combined is None else combined.add_(by_logits)
    graded, values = stack_numbers(group, label_logp, values)
    if not with_gradient:
        return graded, values, None

    def slope(by_logits: Tensor, last: bool) -> Tensor:
        by_logits = by_logits.to(logits.dtype)
        return torch.autograd.grad(logits, source, by_logits, retain_graph=not last)[0]

    slopes = []
    if group.valuations:
        combined = _add_label_slopes(group, combined, prob, index)
        slopes.append(slope(combined, last=not group.labels))
        del combined
    if group.labels:  # last, as ``prob`` is overwritten
        by_logits = prob.neg_().scatter_add_(1, index, torch.ones_like(prob[:, :1]))
        by_logits = by_logits if bool(known.all()) else by_logits * known[:, None]
        slopes.insert(0, slope(by_logits, last=True))
    return graded, values, torch.stack(slopes, 1)


def stack_numbers(
    group: Group, label_logp: Tensor, values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The two tensors of `GroupNumbers` from ``[p]`` log-probs and values of the valuations."""
    graded = [label_logp] if group.labels else []
    if values:
        graded.append(sum(s * value for s, value in zip(group.shares, values, strict=True)))
    plain = [value.detach() for value in ([label_logp] if group.logged else []) + [*values]]
    empty = label_logp.new_zeros(len(label_logp), 0)
    return (
        torch.stack(graded, -1) if graded else empty,
        torch.stack(plain, -1) if plain else empty,
    )


@torch.no_grad()
def _add_label_slopes(group: Group, combined: Tensor | None, prob: Tensor, index: Tensor) -> Tensor:
    """``combined`` plus the gradients of those valuations that are a constant times the label's
    log-prob: ``slope * (onehot - p)``."""
    factors = [
        valuation.slope * share
        for valuation, share in zip(group.valuations, group.shares, strict=True)
        if valuation.slope is not None
    ]
    if not factors:
        return combined
    factor = sum(factors)
    if combined is None:  # in place of ``prob``, unless it is read again
        combined = prob * -factor if group.labels else prob.mul_(-factor)
    else:
        combined.addcmul_(prob, -factor)
    return combined.scatter_add_(1, index, factor.expand_as(index).to(combined.dtype))


def _value_and_gradient(
    valuation: Valuation,
    prob: Tensor,
    logp: Tensor,
    ref_logp: Tensor | None,
    target: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Values of a distribution objective and their gradient by the logits; overwrites
    ``ref_logp``. The gradient is the registered closed form, else autograd's: ``g - p sum(g)``."""
    objective, parameters = valuation.objective, valuation.parameters
    if objective.closed_form is not None:
        with torch.no_grad():
            return objective.closed_form(
                prob, logp, ref_logp, target, with_gradient=with_gradient, **parameters
            )
    with torch.set_grad_enabled(with_gradient):
        leaf = logp.detach().requires_grad_(with_gradient)
        value = objective.function(leaf, ref_logp, target, **parameters)
    if not with_gradient:
        return value, None
    (by_logp,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), by_logp - prob * by_logp.sum(-1, keepdim=True)
