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
from axolotl_unlearn.engine.linearised import Linearised, linearised_statistics
from axolotl_unlearn.engine.needs import HEAD, Found, Head, Needs, States, Valuation


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


@dataclass(frozen=True)
class Group:
    """Positions about which the same is asked.

    Its statistics have a column for the label's log-prob, if asked, and one for each valuation.

    Attributes:
        row, time: ``[P]`` where they are.
        next_ids: ``[P]`` label ids, -100 where there is none.
        labels: whether the label's log-prob is asked.
    """

    row: Tensor
    time: Tensor
    next_ids: Tensor
    labels: bool
    valuations: tuple[Valuation, ...] = ()

    def part(self, start: int, stop: int) -> Group:
        """Some of its positions."""
        row, time, next_ids = (x[start:stop] for x in (self.row, self.time, self.next_ids))
        return Group(row, time, next_ids, self.labels, self.valuations)


def group_positions(needs: Needs, next_ids: Tensor) -> list[Group]:
    """Every position at which ``needs`` asks for logits, by what it asks there.

    Args:
        next_ids: ``[R, T]`` next-token targets.
    """
    asked = [torch.zeros_like(next_ids, dtype=torch.bool) if needs.labels is None else needs.labels]
    asked += [valuation.positions for valuation in needs.valuations]
    code = sum(mask.long() << bit for bit, mask in enumerate(asked))
    groups = []
    for pattern in code.unique().tolist():
        if pattern:
            row, time = (code == pattern).nonzero(as_tuple=True)
            valuations = tuple(v for bit, v in enumerate(needs.valuations, 1) if pattern >> bit & 1)
            groups.append(Group(row, time, next_ids[row, time], bool(pattern & 1), valuations))
    return groups


def read_groups(
    groups: Sequence[Group], columns: Sequence[Tensor], needs: Needs, states: Sequence[Tensor]
) -> Found:
    """The statistics of `head_statistics` and hidden states by what ``needs`` asked.

    Args:
        columns: ``[P, columns]`` of each group.
        states: ``[Q, D]`` of each layer in ``needs.states``.
    """
    logp = torch.zeros_like(needs.masks[0], dtype=torch.float32)
    labelled = [(g, c[:, 0]) for g, c in zip(groups, columns, strict=True) if g.labels]
    if labelled:
        where = tuple(
            torch.cat([getattr(g, axis) for g, _ in labelled]) for axis in ("row", "time")
        )
        logp = logp.index_put(where, torch.cat([column for _, column in labelled]))
    values: dict[str, list[Tensor]] = {valuation.name: [] for valuation in needs.valuations}
    for group, found in zip(groups, columns, strict=True):
        own = found[:, int(group.labels) :].unbind(-1)
        for valuation, column in zip(group.valuations, own, strict=True):
            values[valuation.name].append(column)
    return Found(
        logp,
        {
            layer: States(found, mask)
            for (layer, mask), found in zip(needs.states.items(), states, strict=True)
        },
        {name: torch.cat(found) if found else logp.new_zeros(0) for name, found in values.items()},
    )


def head_statistics(
    pick: Callable[[Tensor, Tensor], Tensor],
    groups: Sequence[Group],
    head: Head,
    *,
    plan: ChunkPlan = DEFAULT_PLAN,
    vocabulary: int,
    frozen_head: bool = False,
) -> list[Tensor]:
    """Statistics of each group, chunk by chunk.

    Args:
        pick: ``(row, time) -> [P, D]`` hidden states at positions of the batch.
        head: states to logits.
        vocabulary: V, to plan the chunks.
        frozen_head: the head has no trainable weight, so gradients stop at the states.

    Returns:
        ``[P, columns]`` float32 a group; 0 where there is no target.
    """
    if not groups:
        return []
    # One pick for all: its gradient is written once.
    picked = pick(torch.cat([g.row for g in groups]), torch.cat([g.time for g in groups]))
    states = picked.split([len(group.row) for group in groups])
    size = plan.size(vocabulary)
    # Chunks with distributions hold policy and reference, so they are cut smaller.
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
        found.append(torch.cat(parts))
    return found


def _cut(states: Tensor, group: Group, size: int) -> list[tuple[Tensor, Group]]:
    return [
        (states[start : start + size], group.part(start, start + size))
        for start in range(0, len(states), size)
    ]


def _linearised(states: Tensor, group: Group, head: Head, size: int) -> Tensor:
    """`linearised_statistics` of a group as a function of ``states``."""
    with_gradient = torch.is_grad_enabled() and states.requires_grad
    found = [
        linearised_statistics(
            part,
            piece.next_ids,
            head,
            piece.valuations,
            reference_logps(piece),
            labels=piece.labels,
            with_gradient=with_gradient,
        )
        for part, piece in _cut(states.detach(), group, size)
    ]
    values = torch.cat([values for values, _ in found])
    if not with_gradient:
        return values
    return Linearised.apply(states, values, torch.cat([slopes for _, slopes in found]))


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


def chunk_statistics(states: Tensor, group: Group, head: Head) -> Tensor:
    """Statistics of one chunk by plain autograd, ``[p, columns]``: for heads that are trained."""
    logits = head(states).float()
    if not group.valuations:
        return -F.cross_entropy(logits, group.next_ids, ignore_index=IGNORE, reduction="none")[
            :, None
        ]
    logp = logits.log_softmax(-1)
    columns = []
    if group.labels:
        picked = logp.gather(1, group.next_ids.clamp(min=0)[:, None])[:, 0]
        columns.append(torch.where(group.next_ids != IGNORE, picked, torch.zeros_like(picked)))
    for valuation, ref_logp in zip(group.valuations, reference_logps(group), strict=True):
        columns.append(
            valuation.objective.function(logp, ref_logp, group.next_ids, **valuation.parameters)
        )
    return torch.stack(columns, -1)
