"""Numbers of positions from their hidden states, in chunks of the LM head.

Logits are formed only at positions that are asked about, and handed on as statistics: the label's
log-prob, the value of each distribution objective. No ``[row, time, vocabulary]`` tensor exists at
any time.

With a frozen head (every LoRA run that leaves it alone), the gradient of a position's statistic s
with respect to its hidden state h is ``ds/dh = (ds/dz) W`` for logits ``z = W h``. It needs nothing
that comes later, whatever an objective then does with s, so it is formed while the chunk's logits
exist and the logits are dropped: D numbers a position stay instead of V, and the backward pass
recomputes nothing. `Linearised` multiplies them with what comes back from the loss.

Shape letters: R rows, T time, D hidden, V vocabulary, P positions of a group, p those of a chunk,
C and K numbers of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.engine.needs import HEAD, ForwardResult, Head, HeadLoss, called


@dataclass(frozen=True)
class ChunkPlan:
    """How many positions of logits may exist at once."""

    positions: int | None = None
    mib: int = 256

    def size(self, vocabulary: int) -> int:
        if self.positions:
            return self.positions
        return max(16, self.mib * 2**20 // (4 * vocabulary))


DEFAULT_PLAN = ChunkPlan()
#: log p of a token whose logit is -inf, and the spread below which a model counts as certain.
IMPOSSIBLE, CERTAIN = -1e4, 1e-6


@dataclass(frozen=True)
class Group:
    """Positions about which the same is asked.

    Attributes:
        row, time: ``[P]`` where they are.
        next_ids: ``[P]`` label ids, -100 where there is none.
        labels: whether the label's log-prob is asked, as a function of the hidden states.
        logged: whether it is asked as a number.
        valuations: objectives that look there, all of one side.
        moments: whether mean and standard deviation of ``log p(v)`` are asked, as functions of the
            hidden states.
    """

    row: Tensor
    time: Tensor
    next_ids: Tensor
    labels: bool
    logged: bool = False
    valuations: tuple[HeadLoss, ...] = ()
    moments: bool = False

    def part(self, start: int, stop: int) -> Group:
        """Some of its positions."""
        row, time, next_ids = (x[start:stop] for x in (self.row, self.time, self.next_ids))
        return replace(self, row=row, time=time, next_ids=next_ids)

    @property
    def graded(self) -> int:
        """K, columns with a gradient."""
        return int(self.labels) + 2 * int(self.moments) + bool(self.valuations)

    def on(self, device: torch.device) -> Group:
        """The same on another device."""
        row, time, next_ids = (x.to(device) for x in (self.row, self.time, self.next_ids))
        return replace(self, row=row, time=time, next_ids=next_ids)

    @cached_property
    def _factors(self) -> Tensor:
        """The factor of each valuation, ``[v]``."""
        one_by_one = [torch.as_tensor(v.factor, device=self.row.device) for v in self.valuations]
        return torch.stack(one_by_one)

    @cached_property
    def factor(self) -> Tensor:
        """The largest factor of its valuations, scalar; their shares stay within 1."""
        return self._factors.abs().max().clamp(min=1e-30)

    @cached_property
    def shares(self) -> Sequence[Tensor]:
        """The factor of each valuation as a share of `factor`, scalars."""
        return (self._factors / self.factor).unbind()


@dataclass(frozen=True)
class GroupNumbers:
    """What was found at the positions of a group.

    Attributes:
        graded: ``[P, K]`` float32 with gradient: the label's log-prob if ``labels``, then the two
            ``moments``, then the values of the valuations, weighted by their shares, if there are
            any.
        values: ``[P, C]`` float32 without: the label's log-prob if ``logged`` and not ``labels``,
            then the value of each valuation.
    """

    graded: Tensor
    values: Tensor


def head_statistics(
    pick: Callable[[Tensor, Tensor], Tensor],
    groups: Sequence[Group],
    head: Head,
    *,
    plan: ChunkPlan = DEFAULT_PLAN,
    vocabulary: int,
    frozen_head: bool = False,
) -> list[GroupNumbers]:
    """The numbers of each group, at least one, chunk by chunk.

    Args:
        pick: ``(row, time) -> [P, D]`` hidden states at positions of the batch.
        head: states to logits.
        vocabulary: V, to plan the chunks.
        frozen_head: the head has no trainable weight, so gradients stop at the states.

    Returns:
        What was found in each group.
    """
    # One pick for all: its gradient is written once.
    picked = pick(torch.cat([g.row for g in groups]), torch.cat([g.time for g in groups]))
    states = picked.split([len(group.row) for group in groups])
    size = plan.size(vocabulary)
    # Chunks with valuations may hold policy and reference, so they are cut smaller.
    sizes = [max(1, size // 2) if group.valuations else size for group in groups]
    if frozen_head or not torch.is_grad_enabled():
        return [
            _linearised(h, group, head, size)
            for h, group, size in zip(states, groups, sizes, strict=True)
        ]
    # With few chunks their logits may stay; with many, each is recomputed in the backward pass.
    chunks = sum(-(-len(group.row) // size) for group, size in zip(groups, sizes, strict=True))
    results = []
    for h, group, size in zip(states, groups, sizes, strict=True):
        parts = [
            # With its random state: LoRA on the head may have dropout.
            checkpoint(chunk_statistics, part, piece, head, use_reentrant=False)
            if chunks > 2
            else chunk_statistics(part, piece, head)
            for part, piece in _cut(h, group, size)
        ]
        results.append(GroupNumbers(*(torch.cat(columns) for columns in zip(*parts, strict=True))))
    return results


def _cut(states: Tensor, group: Group, size: int) -> list[tuple[Tensor, Group]]:
    return [
        (states[start : start + size], group.part(start, start + size))
        for start in range(0, len(states), size)
    ]


def chunk_statistics(states: Tensor, group: Group, head: Head) -> tuple[Tensor, Tensor]:
    """The tensors of `GroupNumbers` for one chunk, by autograd: for heads that are trained."""
    if group.labels and not group.valuations and not group.moments:
        label_logp = -F.cross_entropy(
            head(states).float(), group.next_ids, ignore_index=IGNORE, reduction="none"
        )
        return label_logp[:, None], label_logp.new_zeros(len(label_logp), 0)
    logp = head(states).float().log_softmax(-1)
    picked = logp.gather(1, group.next_ids.clamp(min=0)[:, None])[:, 0]
    label_logp = torch.where(group.next_ids != IGNORE, picked, torch.zeros_like(picked))
    values = [
        valuation.slope * label_logp
        if valuation.slope is not None
        else called(
            valuation.entry.objective,
            logp,
            None if reference is None else reference.float().log_softmax(-1),
            group.next_ids,
            **valuation.entry.args.parameters,
        )
        for valuation, reference in zip(group.valuations, reference_logits(group), strict=True)
    ]
    moments = moments_of(logp, logp.exp()) if group.moments else None
    return stack_numbers(group, label_logp, values, moments)


def _linearised(states: Tensor, group: Group, head: Head, size: int) -> GroupNumbers:
    """`linearised_statistics` of a group as a function of ``states``."""
    with_gradient = torch.is_grad_enabled() and states.requires_grad and group.graded > 0
    graded, values, slopes = zip(
        *(
            linearised_statistics(part, piece, head, with_gradient=with_gradient)
            for part, piece in _cut(states.detach(), group, size)
        ),
        strict=True,
    )
    graded = torch.cat(graded)
    if with_gradient:
        graded = Linearised.apply(states, graded, torch.cat(slopes))
    return GroupNumbers(graded, torch.cat(values))


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
    states: Tensor, group: Group, head: Head, *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One chunk.

    How much each valuation weighs in the loss is known beforehand, so their gradients are added up
    by the logits, and one product with the head serves them all.

    Args:
        states: ``[p, D]``, detached.
        head: states to logits.

    Returns:
        the two tensors of `GroupNumbers`, and the gradients of the first by ``states``,
        ``[p, K, D]`` in its dtype, or None.
    """
    with torch.set_grad_enabled(with_gradient), _saved_for_backward() as saved:
        source = states.detach().requires_grad_(with_gradient)
        logits = head(source)
    references = reference_logits(group)
    by_logits = [logits.detach()] * group.graded if with_gradient else []
    # Each row's gradient comes in place of its logits, unless these are read again.
    for number in range(int(logits.untyped_storage().data_ptr() not in saved), len(by_logits)):
        by_logits[number] = torch.empty_like(by_logits[number])
    # On a CPU as many rows at once as stay in its cache, since a new tensor of the chunk's size
    # costs more (page faults) than what is computed in it.
    count, vocabulary = logits.shape
    size = count if logits.device.type != "cpu" else max(1, _BLOCK // (4 * vocabulary))
    blocks = [slice(start, start + size) for start in range(0, count, max(1, size))]
    numbers = [
        _row_statistics(
            group,
            group.next_ids[rows],
            logits.detach()[rows],
            [None if reference is None else reference[rows] for reference in references],
            [gradient[rows] for gradient in by_logits],
        )
        for rows in blocks
    ]
    slopes = [
        torch.autograd.grad(logits, source, gradient, retain_graph=number + 1 < group.graded)[0]
        for number, gradient in enumerate(by_logits)
    ]
    graded, values = (torch.cat(columns) for columns in zip(*numbers, strict=True))
    return graded, values, torch.stack(slopes, 1) if slopes else None


@contextmanager
def _saved_for_backward() -> Iterator[set[int]]:
    """The storages that are saved for the backward pass; a head may need its output again."""
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor:  # quantised weights may have no storage
            saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


#: Bytes of float32 logits.
_BLOCK = 4 * 2**20


@torch.no_grad()
def _row_statistics(
    group: Group,
    next_ids: Tensor,
    logits: Tensor,
    references: Sequence[Tensor | None],
    by_logits: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The two tensors of `GroupNumbers` for some positions of a chunk.

    Args:
        next_ids: ``[p]`` label ids; ``logits`` ``[p, V]``, ``references`` those of each valuation.
        by_logits: ``[p, V]`` for each column of ``graded``, gets its gradient; empty if none is
            wanted.
    """
    logp = logits.float().log_softmax(-1)
    prob = logp.exp() if by_logits or group.valuations or group.moments else None
    known = next_ids != IGNORE
    index = next_ids.clamp(min=0)[:, None]
    label_logp = torch.where(known, logp.gather(1, index)[:, 0], 0.0)

    values, combined = [], None
    for valuation, reference, share in zip(
        group.valuations, references, group.shares if group.valuations else [], strict=True
    ):
        if valuation.slope is not None:
            values.append(valuation.slope * label_logp)
            continue
        ref_logp = None if reference is None else reference.float().log_softmax(-1)
        value, gradient = _value_and_gradient(
            valuation, prob, logp, ref_logp, next_ids, bool(by_logits)
        )
        values.append(value)
        if by_logits:
            gradient = gradient.mul_(share)
            combined = gradient if combined is None else combined.add_(gradient)
    moments = moments_of(logp, prob) if group.moments else None
    if by_logits and group.moments:
        for gradient, column in zip(
            by_logits[int(group.labels) :], _moment_slopes(logp, prob, moments), strict=False
        ):
            gradient.copy_(column)
    if by_logits and group.valuations:
        by_logits[-1].copy_(_add_label_slopes(group, combined, prob, index))
    if by_logits and group.labels:  # last, as ``prob`` is overwritten
        gradient = prob.neg_().scatter_add_(1, index, torch.ones_like(prob[:, :1]))
        by_logits[0].copy_(gradient.mul_(known[:, None]))
    return stack_numbers(group, label_logp, values, moments)


def stack_numbers(
    group: Group, label_logp: Tensor, values: Sequence[Tensor], moments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two tensors of `GroupNumbers` from ``[p]`` log-probs and values of the valuations, and
    ``[p, 2]`` moments."""
    graded = [label_logp] if group.labels else []
    if moments is not None:
        graded += moments.unbind(-1)
    if values:
        graded.append(sum(s * value for s, value in zip(group.shares, values, strict=True)))
    plain = [value.detach() for value in ([label_logp] if group.logged else []) + [*values]]
    empty = label_logp.new_zeros(len(label_logp), 0)
    return (
        torch.stack(graded, -1) if graded else empty,
        torch.stack(plain, -1) if plain else empty,
    )


def moments_of(logp: Tensor, prob: Tensor) -> Tensor:
    """Mean and standard deviation of ``log p(v)`` for v drawn from p, ``[p, V]`` to ``[p, 2]``."""
    finite = logp.clamp(min=IMPOSSIBLE)
    mean = (prob * finite).sum(-1)
    variance = (prob * (finite - mean[:, None]) ** 2).sum(-1)
    return torch.stack([mean, variance.clamp(min=CERTAIN**2).sqrt()], -1)


def _moment_slopes(logp: Tensor, prob: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `moments_of` by the logits: with ``c = log p - mean``, ``p c`` and
    ``p (c^2 - sd^2 + 2 c) / (2 sd)``; 0 for the latter where the model is certain."""
    mean, sd = moments[:, :1], moments[:, 1:]
    centred = logp.clamp(min=IMPOSSIBLE) - mean
    by_sd = prob * (centred**2 - sd**2 + 2 * centred) / (2 * sd)
    return prob * centred, torch.where(sd > CERTAIN, by_sd, 0.0)


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
    valuation: HeadLoss,
    prob: Tensor,
    logp: Tensor,
    ref_logp: Tensor | None,
    target: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Values of a distribution objective and their gradient by the logits; overwrites
    ``ref_logp``. The gradient is the registered closed form, else autograd's: ``g - p sum(g)``."""
    objective, parameters = valuation.entry.objective, valuation.entry.args.parameters
    if objective.closed_form is not None:
        return objective.closed_form(
            prob, logp, ref_logp, target, with_gradient=with_gradient, **parameters
        )
    with torch.set_grad_enabled(with_gradient):
        leaf = logp.detach().requires_grad_(with_gradient)
        value = called(objective, leaf, ref_logp, target, **parameters)
        if not with_gradient:
            return value, None
        (by_logp,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), by_logp - prob * by_logp.sum(-1, keepdim=True)


@torch.no_grad()
def reference_logits(group: Group) -> list[Tensor | None]:
    """Logits of the reference of each valuation, ``[p, V]``; one tensor for one reference."""
    made: dict[int, Tensor] = {}

    def logits(reference: ForwardResult | None) -> Tensor | None:
        if reference is None:
            return None
        if id(reference) not in made:
            states = reference.states[HEAD].at(group.row, group.time).to(group.row.device)
            made[id(reference)] = reference.logits(states).to(group.row.device)
        return made[id(reference)]

    return [logits(valuation.reference) for valuation in group.valuations]
