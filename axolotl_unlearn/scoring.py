"""The engine: one forward over all rows of a batch, logits only where an objective looks.

The model runs as usual up to its LM head. There the engine steps in: it picks the hidden states of
the positions that some objective needs, computes logits for those alone, in chunks, and hands on
per-position statistics (the label's log-prob, the value of each distribution objective) instead of
logits. No ``[row, time, vocabulary]`` tensor exists at any time. Because this happens inside the
head's own ``forward``, wrappers that gather or hook parameters there (DDP, FSDP2, ZeRO-3, PEFT)
keep working.

Shape letters: R rows, T time, D hidden, V vocabulary, P selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from axolotl_unlearn.args import ObjectiveArgs
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import OBJECTIVES, LabelScores, Objective, Terms

IGNORE = -100
ROLES = {"forget": 0, "retain": 1}
KINDS = {"completion": 0, "question": 1}
Head = Callable[[Tensor], Tensor]

#: Config keys of models that change the logits after the head; for them the plain way is taken.
_LOGIT_CHANGERS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


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


def task_number(task: int | str) -> int:
    """``1``, ``"1"`` and ``"Task1"`` to 1; 0 where there is no number."""
    digits = "".join(c for c in str(task) if c.isdigit())
    return int(digits) if digits else 0


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

    Returns:
        ``[P, 1 + E]`` float32; 0 where there is no target or the entry does not look.
    """
    size = plan.size(vocabulary)
    n_first, n_all = positions.n_label_only, len(positions.row)

    def label_chunk(h: Tensor, target: Tensor) -> Tensor:
        logp = -F.cross_entropy(head(h).float(), target, ignore_index=IGNORE, reduction="none")
        return F.pad(logp[:, None], (0, len(entries)))

    def distribution_chunk(h, ref_h, target, member) -> Tensor:
        logp = head(h).float().log_softmax(-1)
        known = target != IGNORE
        picked = logp.gather(1, target.clamp(min=0)[:, None])[:, 0]
        columns = [torch.where(known, picked, torch.zeros_like(picked))]
        ref_logp = None
        if ref_h is not None:
            with torch.no_grad():
                ref_logp = ref_head(ref_h).float().log_softmax(-1)
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

    # Distribution chunks hold policy and reference, so they are cut smaller.
    pieces: list[tuple[Callable, tuple]] = []
    for start in range(0, n_first, size):
        stop = min(start + size, n_first)
        pieces.append((label_chunk, (hidden[start:stop], positions.target[start:stop])))
    for start in range(n_first, n_all, max(1, size // 2)):
        stop = min(start + max(1, size // 2), n_all)
        ref = None if ref_hidden is None else ref_hidden[start - n_first : stop - n_first]
        arguments = (
            hidden[start:stop],
            ref,
            positions.target[start:stop],
            positions.member[start:stop],
        )
        pieces.append((distribution_chunk, arguments))
    if not pieces:
        return hidden.new_zeros(0, 1 + len(entries), dtype=torch.float32)
    # With few chunks their logits may stay; with many, each is recomputed in the backward pass.
    recompute = torch.is_grad_enabled() and len(pieces) > 2
    parts = [
        checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        if recompute
        else function(*arguments)
        for function, arguments in pieces
    ]
    return torch.cat(parts)


@contextmanager
def intercept_head(head: nn.Module, program: Callable[[Tensor, Head], Tensor]) -> Iterator[None]:
    """While inside, calling ``head(hidden)`` runs ``program(hidden, original_forward)``."""
    had_own = "forward" in vars(head)
    original = head.forward
    head.forward = lambda hidden, *args, **kwargs: program(hidden, original)
    try:
        yield
    finally:
        if had_own:
            head.forward = original
        else:
            del head.forward


def output_head(model: nn.Module) -> nn.Module:
    """The LM head of a (PEFT-wrapped) causal language model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    if head is None:
        raise UnlearnError(
            f"{type(base).__name__} has no output embeddings; unlearning needs a causal language "
            "model with an LM head."
        )
    return head


def changes_logits(model: nn.Module) -> bool:
    """Whether the model scales or caps its logits after the head (Gemma 2, Cohere, Granite)."""
    config = getattr(model, "config", None)
    get_text = getattr(config, "get_text_config", None)
    config = get_text() if callable(get_text) else config
    return any(getattr(config, key, None) not in (None, 0, 1, 1.0) for key in _LOGIT_CHANGERS)


def run_to_head(
    model: nn.Module,
    batch: dict[str, Tensor],
    program: Callable[[Tensor, Head], Tensor],
    unwrapped: nn.Module,
) -> Tensor:
    """One forward of ``model`` whose head runs ``program``; returns what the program returned."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with intercept_head(output_head(unwrapped), program):
        return model(**inputs, use_cache=False, return_dict=True).logits


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

    def statistics(hidden: Tensor, head: Head) -> Tensor:
        return position_statistics(
            hidden[positions.row, positions.time],
            positions,
            head,
            entries,
            ref_hidden=reference,
            ref_head=ref_head,
            plan=plan,
            vocabulary=vocabulary,
        )[None]

    if changes_logits(unwrapped):
        # The model treats its logits further, so they must exist; the head is then the identity.
        logits = run_to_head(model, batch, lambda hidden, head: head(hidden), unwrapped)
        packed = statistics(logits, lambda picked: picked)[0]
    else:
        packed = run_to_head(model, batch, statistics, unwrapped)[0]
    logp = packed.new_zeros(batch["labels"].shape)
    logp = logp.index_put((positions.row, positions.time), packed[:, 0])
    return logp, packed, positions


def output_vocabulary(model: nn.Module) -> int:
    """V of the LM head."""
    head = output_head(model)
    weight = getattr(head, "weight", None)
    if weight is None:
        weight = head.base_layer.weight
    out = getattr(head, "out_features", None)
    return int(out if out else weight.shape[0])


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
