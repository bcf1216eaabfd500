"""The engine: one forward over all rows of a batch, logits only where an objective looks.

The model runs as usual up to its LM head. There the engine steps in: it picks the hidden states of
the positions that some objective needs, computes logits for those alone, in chunks, and hands on
per-position statistics (the label's log-prob, the value of each distribution objective) instead of
logits. No ``[row, time, vocabulary]`` tensor exists at any time. Because this happens inside the
head's own ``forward``, wrappers that gather or hook parameters there (DDP, FSDP2, ZeRO-3, PEFT)
keep working.

Where the head is frozen (every LoRA run that leaves it alone), the gradient of each statistic with
respect to the hidden state is formed in the same pass, so a chunk's logits are dropped at once and
nothing is recomputed in the backward pass (`axolotl_unlearn.engine.linearised`). Where the model
can take rows laid end to end, padding is not computed at all (`axolotl_unlearn.engine.packing`).

Shape letters: R rows, T time, D hidden, V vocabulary, P selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from axolotl_unlearn.args import ObjectiveArgs
from axolotl_unlearn.data.columns import IGNORE, KINDS, ROLES, task_number
from axolotl_unlearn.engine.head import (
    Head,
    after_head,
    finished,
    head_is_frozen,
    intercept_head,
    output_head,
    output_vocabulary,
)
from axolotl_unlearn.engine.linearised import Linearised, linearised_statistics
from axolotl_unlearn.engine.packing import Pick, can_pack, packed_layout, padded_layout
from axolotl_unlearn.objectives import OBJECTIVES, LabelScores, Objective, Terms


@dataclass(frozen=True)
class Entry:
    """One line of ``forget:`` or ``retain:``: which rows, which objective, which weight."""

    name: str
    side: str
    args: ObjectiveArgs
    objective: Objective

    @property
    def unit(self) -> str:
        return self.objective.unit(self.args.parameters)

    @property
    def sees_distributions(self) -> bool:
        return self.objective.sees == "distributions"

    def rows(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows of the batch that this entry is for, ``[R]`` bool."""
        chosen = batch["role"] == ROLES[self.side]
        if self.args.kinds is not None:
            wanted = [KINDS[kind] for kind in self.args.kinds]
            chosen &= _isin(batch["kind"], wanted)
        if self.args.tasks is not None:
            chosen &= _isin(batch["task"], [task_number(task) for task in self.args.tasks])
        return chosen

    def positions(self, batch: dict[str, Tensor]) -> Tensor:
        """Positions whose next-token distribution this entry sees, ``[R, T]`` bool."""
        if self.args.positions == "all":
            where = batch["attention_mask"].bool()
        else:
            where = targets(batch["labels"]) != IGNORE
        return where & self.rows(batch)[:, None]

    def count(self, batch: dict[str, Tensor]) -> Tensor:
        """Units of this entry in a micro-batch, scalar float: what its sum is divided by."""
        rows = self.rows(batch)
        if self.unit == "batch":
            return rows.any().float()
        if self.unit == "row":
            return (rows & (targets(batch["labels"]) != IGNORE).any(-1)).sum().float()
        if self.args.divide_by_length:
            return rows.sum().float() * self.args.divide_by_length
        return self.positions(batch).sum().float()


def _isin(values: Tensor, wanted: Sequence[int]) -> Tensor:
    return torch.isin(values, torch.tensor(wanted, device=values.device, dtype=values.dtype))


def make_entries(pairs: list[tuple[str, ObjectiveArgs]]) -> list[Entry]:
    """Name the objectives of a config; a repeated one gets its kinds, tasks or number added."""
    entries: list[Entry] = []
    names: set[str] = set()
    for side, args in pairs:
        name = f"{side}/{args.objective}"
        if name in names:
            suffix = "+".join([*(args.kinds or []), *map(str, args.tasks or [])])
            name = f"{name}.{suffix or len(names)}"
        while name in names:
            name += "'"
        names.add(name)
        entries.append(Entry(name, side, args, OBJECTIVES[args.objective]))
    return entries


def targets(labels: Tensor) -> Tensor:
    """Next-token targets, ``[R, T] -> [R, T]``: position t predicts label t + 1."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


@dataclass
class Positions:
    """The positions the head is asked about, distribution positions last.

    Attributes:
        row, time: ``[P]`` indices into the batch.
        target: ``[P]`` label id or -100.
        member: ``[P, E]`` bool, whether distribution entry e sees the position.
        n_label_only: how many of the first positions no distribution entry sees.
    """

    row: Tensor
    time: Tensor
    target: Tensor
    member: Tensor
    n_label_only: int

    @classmethod
    def select(cls, batch: dict[str, Tensor], seen: Sequence[Tensor], labels: Tensor) -> Positions:
        """Union of label positions (``labels``, ``[R, T]`` bool) and of what entries see."""
        next_ids = targets(batch["labels"])
        distributions = torch.zeros_like(labels)
        for mask in seen:
            distributions |= mask
        first = (labels & ~distributions).nonzero()
        last = distributions.nonzero()
        index = torch.cat([first, last])
        row, time = index[:, 0], index[:, 1]
        member = (
            torch.stack([mask[row, time] for mask in seen], -1)
            if seen
            else torch.zeros(len(row), 0, dtype=torch.bool, device=row.device)
        )
        return cls(row, time, next_ids[row, time], member, len(first))


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


def position_statistics(
    hidden: Tensor,
    positions: Positions,
    head: Head,
    entries: Sequence[Entry] = (),
    *,
    ref_hidden: Tensor | None = None,
    ref_head: Head | None = None,
    plan: ChunkPlan = DEFAULT_PLAN,
    vocabulary: int,
    frozen_head: bool = False,
) -> Tensor:
    """Log-prob of each target and value of each distribution entry, chunk by chunk.

    Args:
        hidden: ``[P, D]`` policy hidden states at ``positions``.
        head: ``[p, D] -> [p, V]`` logits of the policy.
        entries: the distribution entries, in the order of ``positions.member``.
        ref_hidden: ``[P - n_label_only, D]`` hidden states of the reference at the distribution
            positions; needed if an entry's objective compares with the reference.
        ref_head: logits of the reference.
        vocabulary: V, to plan the chunks.
        frozen_head: the head has no trainable weight, so gradients stop at ``hidden``.

    Returns:
        ``[P, 1 + E]`` float32; 0 where there is no target or the entry does not look.
    """
    size = plan.size(vocabulary)
    n_first, n_all = positions.n_label_only, len(positions.row)
    # Distribution chunks hold policy and reference, so they are cut smaller.
    cuts = [(start, min(start + size, n_first), False) for start in range(0, n_first, size)]
    half = max(1, size // 2)
    cuts += [(start, min(start + half, n_all), True) for start in range(n_first, n_all, half)]
    if not cuts:
        return hidden.new_zeros(0, 1 + len(entries), dtype=torch.float32)

    def chunk(h: Tensor, start: int, stop: int, distributions: bool, statistics: Callable):
        return statistics(
            h,
            positions.target[start:stop],
            head,
            entries if distributions else (),
            positions.member[start:stop],
            None
            if ref_hidden is None or not distributions
            else ref_hidden[start - n_first : stop - n_first],
            ref_head,
        )

    if frozen_head:
        with_gradient = torch.is_grad_enabled() and hidden.requires_grad
        statistics = partial(linearised_statistics, with_gradient=with_gradient)
        found = [
            chunk(hidden.detach()[start:stop], start, stop, kind, statistics)
            for start, stop, kind in cuts
        ]
        values = torch.cat([_widen(values, len(entries)) for values, _ in found])
        if not with_gradient:
            return values
        slopes = torch.cat([_widen(slopes, len(entries)) for _, slopes in found])
        return Linearised.apply(hidden, values, slopes)
    # With few chunks their logits may stay; with many, each is recomputed in the backward pass.
    recompute = torch.is_grad_enabled() and len(cuts) > 2
    parts = []
    for start, stop, kind in cuts:
        arguments = (hidden[start:stop], start, stop, kind, chunk_statistics)
        part = (
            checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else chunk(*arguments)
        )
        parts.append(_widen(part, len(entries)))
    return torch.cat(parts)


def _widen(columns: Tensor, entries: int) -> Tensor:
    """Zero columns for the entries that a label-only chunk did not ask, ``[p, C] -> [p, 1 + E]``
    (or with a trailing D)."""
    missing = 1 + entries - columns.shape[1]
    if not missing:
        return columns
    return F.pad(columns, (0, 0) * (columns.dim() - 2) + (0, missing))


def chunk_statistics(
    hidden: Tensor,
    target: Tensor,
    head: Head,
    entries: Sequence[Entry],
    member: Tensor,
    ref_hidden: Tensor | None,
    ref_head: Head | None,
) -> Tensor:
    """Statistics of one chunk by plain autograd, ``[p, 1 + E]``: for heads that are trained."""
    if not entries:
        logits = head(hidden).float()
        return -F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")[:, None]
    logp = head(hidden).float().log_softmax(-1)
    known = target != IGNORE
    picked = logp.gather(1, target.clamp(min=0)[:, None])[:, 0]
    columns = [torch.where(known, picked, torch.zeros_like(picked))]
    ref_logp = None
    if ref_hidden is not None:
        with torch.no_grad():
            ref_logp = ref_head(ref_hidden).float().log_softmax(-1)
    for number, entry in enumerate(entries):
        where = member[:, number]
        if bool(where.all()):
            values = entry.objective.function(logp, ref_logp, target, **entry.args.parameters)
        else:
            some = entry.objective.function(
                logp[where],
                None if ref_logp is None else ref_logp[where],
                target[where],
                **entry.args.parameters,
            )
            values = torch.zeros_like(picked).masked_scatter(where, some)
        columns.append(values)
    return torch.stack(columns, -1)


def run_to_head(
    model: nn.Module,
    batch: dict[str, Tensor],
    program: Callable[[Pick, Head], Tensor],
    unwrapped: nn.Module,
) -> Tensor:
    """One forward of ``model`` whose head runs ``program``.

    Args:
        program: gets ``pick(row, time) -> [P, D]`` hidden states and the head (hidden states to
            the logits that the model would give); returns ``[P, C]``.

    Returns:
        What the program returned.
    """
    layout = packed_layout(batch) if can_pack(model, unwrapped, batch) else padded_layout(batch)
    results: list[Tensor] = []

    def at_head(hidden: Tensor, head: Head) -> Tensor:
        results.append(program(partial(layout.pick, hidden), finished(head, unwrapped)))
        return results[0][None].clone()  # no view: FSDP2 hooks its gradient

    with intercept_head(output_head(unwrapped), at_head):
        output = model(**layout.inputs, use_cache=False, return_dict=True).logits
    # Wrappers act on the output (FSDP2 hooks its gradient); models that treat logits after the
    # head would treat our statistics too, so there the program's own result is taken.
    return results[0] if after_head(unwrapped) else output[0]


def score_rows(
    model: nn.Module,
    batch: dict[str, Tensor],
    entries: Sequence[Entry] = (),
    *,
    unwrapped: nn.Module | None = None,
    ref_hidden: Callable[[Positions], Tensor] | None = None,
    ref_head: Head | None = None,
    plan: ChunkPlan = DEFAULT_PLAN,
) -> tuple[Tensor, Tensor, Positions]:
    """The one policy forward.

    Args:
        model: as wrapped for training; ``unwrapped`` the bare (PEFT) model.
        batch: input_ids, attention_mask, labels ``[R, T]``; role, kind, task ``[R]``.
        entries: distribution entries.
        ref_hidden: gives the reference's hidden states for the distribution positions.

    Returns:
        logp ``[R, T]`` of the target at each position (0 where there is none), the statistics
        ``[P, 1 + E]``, and the positions.
    """
    unwrapped = model if unwrapped is None else unwrapped
    seen = [entry.positions(batch) for entry in entries]
    positions = Positions.select(batch, seen, targets(batch["labels"]) != IGNORE)
    reference = ref_hidden(positions) if ref_hidden is not None else None
    vocabulary = output_vocabulary(unwrapped)
    frozen = head_is_frozen(unwrapped)

    def statistics(pick: Pick, head: Head) -> Tensor:
        return position_statistics(
            pick(positions.row, positions.time),
            positions,
            head,
            entries,
            ref_hidden=reference,
            ref_head=ref_head,
            plan=plan,
            vocabulary=vocabulary,
            frozen_head=frozen,
        )

    packed = run_to_head(model, batch, statistics, unwrapped)
    logp = packed.new_zeros(batch["labels"].shape)
    logp = logp.index_put((positions.row, positions.time), packed[:, 0])
    return logp, packed, positions


def entry_terms(
    entry: Entry,
    batch: dict[str, Tensor],
    logp: Tensor,
    ref_logp: Tensor | None,
    packed: Tensor,
    positions: Positions,
    column: int | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of one entry's loss over its units, and sums of what it logs.

    Args:
        logp, ref_logp: ``[R, T]`` at target positions.
        column: the entry's column in ``packed`` if it sees distributions.

    Returns:
        The scalar sum, and name -> scalar sum (to be divided by the number of units or rows).
    """
    if column is not None:
        return packed[:, 1 + column].sum(), {}
    rows = entry.rows(batch)
    mask = (targets(batch["labels"]) != IGNORE)[rows]
    rows = rows.nonzero()[:, 0][mask.any(-1)]
    mask = mask[mask.any(-1)]
    scores = LabelScores(
        logp=logp[rows] * mask,
        mask=mask,
        ref_logp=None if ref_logp is None else ref_logp[rows] * mask,
    )
    if len(rows) == 0:
        return logp.sum() * 0.0, {}
    terms: Terms = entry.objective.function(scores, **entry.args.parameters)
    return terms.values.sum(), {name: values.sum() for name, values in terms.logs.items()}


def describe(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The objectives as plain data, for logs and result files."""
    return [
        {
            "name": entry.name,
            "weight": entry.args.weight,
            "unit": entry.unit,
            "source": entry.objective.source,
            **entry.args.parameters,
        }
        for entry in entries
    ]
