"""Statistics of positions together with their gradients, in one pass over a chunk of logits.

With a frozen head, the gradient of a position's statistic s (the label's log-prob, a KL) with
respect to its hidden state h is ``ds/dh = (ds/dz) W`` for logits ``z = W h``. It needs nothing that
comes later, whatever an objective then does with s, so it is formed while the chunk's logits exist
and the logits are dropped: D numbers a position stay instead of V, and the backward pass
recomputes nothing. `Linearised` multiplies them with what comes back from the loss.

Shape letters: P, p positions (of a chunk), V vocabulary, D hidden, C statistics of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.data.columns import IGNORE
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
    target: Tensor,
    head: Callable[[Tensor], Tensor],
    valuations: Sequence[Valuation],
    ref_logps: Sequence[Tensor | None],
    *,
    labels: bool,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """One chunk.

    Args:
        states: ``[p, D]``, detached.
        target: ``[p]`` label ids or -100.
        head: states to logits.
        valuations: distribution objectives, all asked at all these positions.
        ref_logps: ``[p, V]`` log-probs of each one's reference; overwritten.
        labels: whether the label's log-prob is asked too; it comes first.

    Returns:
        values ``[p, C]`` float32 (a log-prob is 0 where there is no target), and their gradients
        by ``states``, ``[p, C, D]`` in its dtype, or None.
    """
    with torch.set_grad_enabled(with_gradient):
        source = states.detach().requires_grad_(with_gradient)
        logits = head(source)
    logp = logits.detach().float().log_softmax(-1)
    prob = logp.exp() if with_gradient or valuations else None

    def slope(by_logits: Tensor, last: bool) -> Tensor:
        return torch.autograd.grad(
            logits, source, by_logits.to(logits.dtype), retain_graph=not last
        )[0]

    values, slopes = [], []
    for number, (valuation, ref_logp) in enumerate(zip(valuations, ref_logps, strict=True)):
        read_again = any(other is ref_logp for other in ref_logps[number + 1 :])
        value, by_logits = _value_and_gradient(
            valuation,
            prob,
            logp,
            ref_logp.clone() if read_again and ref_logp is not None else ref_logp,
            target,
            with_gradient,
        )
        values.append(value)
        if with_gradient:
            slopes.append(slope(by_logits, last=not labels and number == len(valuations) - 1))
        del by_logits
    if labels:  # last, when ``prob`` may be overwritten
        value, by_logits = _label_logp(prob, logp, target, with_gradient)
        values.insert(0, value)
        if with_gradient:
            slopes.insert(0, slope(by_logits, last=True))
    return torch.stack(values, -1), torch.stack(slopes, 1) if with_gradient else None


@torch.no_grad()
def _label_logp(
    prob: Tensor | None, logp: Tensor, target: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label and its gradient by the logits, ``onehot - p``, in place of ``prob``;
    0 where there is no label."""
    known = target != IGNORE
    index = target.clamp(min=0)[:, None]
    value = torch.where(known, logp.gather(1, index)[:, 0], 0.0)
    if not with_gradient:
        return value, None
    by_logits = prob.neg_().scatter_add_(1, index, torch.ones_like(prob[:, :1]))
    return value, by_logits if bool(known.all()) else by_logits * known[:, None]


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
