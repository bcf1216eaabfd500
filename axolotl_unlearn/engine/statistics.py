"""Numbers of positions from their hidden states, in chunks of the LM head.

Logits are formed only at positions that are asked about, and handed on as statistics: the label's
log-prob, the value of each distribution objective. No ``[row, time, vocabulary]`` tensor exists at
any time. Where the head is frozen (every LoRA run that leaves it alone), each statistic's gradient
by the hidden state is formed in the same pass, so a chunk's logits are dropped at once and nothing
is recomputed in the backward pass (`axolotl_unlearn.engine.linearised`).

Shape letters: R rows, T time, D hidden, V vocabulary, P selected positions, p those of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from axolotl_unlearn.data.columns import IGNORE
from axolotl_unlearn.engine.groups import Group, GroupNumbers
from axolotl_unlearn.engine.linearised import Linearised, linearised_statistics, stack_numbers
from axolotl_unlearn.engine.needs import HEAD, Found, Head


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


def head_statistics(
    pick: Callable[[Tensor, Tensor], Tensor],
    groups: Sequence[Group],
    head: Head,
    *,
    plan: ChunkPlan = DEFAULT_PLAN,
    vocabulary: int,
    frozen_head: bool = False,
) -> list[GroupNumbers]:
    """The numbers of each group, chunk by chunk.

    Args:
        pick: ``(row, time) -> [P, D]`` hidden states at positions of the batch.
        head: states to logits.
        vocabulary: V, to plan the chunks.
        frozen_head: the head has no trainable weight, so gradients stop at the states.

    Returns:
        What was found in each group.
    """
    if not groups:
        return []
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
    found = []
    for h, group, size in zip(states, groups, sizes, strict=True):
        parts = [
            # With its random state: LoRA on the head may have dropout.
            checkpoint(chunk_statistics, part, piece, head, use_reentrant=False)
            if chunks > 2
            else chunk_statistics(part, piece, head)
            for part, piece in _cut(h, group, size)
        ]
        found.append(GroupNumbers(*(torch.cat(columns) for columns in zip(*parts, strict=True))))
    return found


def _cut(states: Tensor, group: Group, size: int) -> list[tuple[Tensor, Group]]:
    return [
        (states[start : start + size], group.part(start, start + size))
        for start in range(0, len(states), size)
    ]


def _linearised(states: Tensor, group: Group, head: Head, size: int) -> GroupNumbers:
    """`linearised_statistics` of a group as a function of ``states``."""
    graded_at_all = group.labels or bool(group.valuations)
    with_gradient = torch.is_grad_enabled() and states.requires_grad and graded_at_all
    graded, values, slopes = zip(
        *(
            linearised_statistics(
                part, piece, head, reference_logps(piece), with_gradient=with_gradient
            )
            for part, piece in _cut(states.detach(), group, size)
        ),
        strict=True,
    )
    graded = torch.cat(graded)
    if with_gradient:
        graded = Linearised.apply(states, graded, torch.cat(slopes))
    return GroupNumbers(graded, torch.cat(values))


@torch.no_grad()
def reference_logps(group: Group) -> list[Tensor | None]:
    """Log-probs of the reference of each valuation, ``[p, V]``; one tensor for one reference."""
    made: dict[int, Tensor] = {}

    def logp(reference: Found | None) -> Tensor | None:
        if reference is None:
            return None
        if id(reference) not in made:
            states = reference.states[HEAD].at(group.row, group.time)
            made[id(reference)] = reference.logits(states).float().log_softmax(-1)
        return made[id(reference)]

    return [logp(valuation.reference) for valuation in group.valuations]


def chunk_statistics(states: Tensor, group: Group, head: Head) -> tuple[Tensor, Tensor]:
    """The tensors of `GroupNumbers` for one chunk by plain autograd: for heads that are trained."""
    if group.labels and not group.valuations:
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
        else valuation.objective.function(logp, ref, group.next_ids, **valuation.parameters)
        for valuation, ref in zip(group.valuations, reference_logps(group), strict=True)
    ]
    return stack_numbers(group, label_logp, values)
