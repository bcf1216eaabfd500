"""The loss of one micro-batch: reference, one policy forward, weighted objectives.

Free of any Trainer, so that training, tests and benchmarks run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from axolotl_unlearn.data.columns import IGNORE, ROLES
from axolotl_unlearn.engine.head import finished
from axolotl_unlearn.engine.scoring import (
    DEFAULT_PLAN,
    ChunkPlan,
    Entry,
    entry_terms,
    score_rows,
    targets,
)
from axolotl_unlearn.reference.sources import Reference, wanted


@dataclass
class StepLoss:
    """What a micro-batch contributed.

    Attributes:
        total: scalar with gradient: sum over entries of ``weight * sum / count * scale``.
        parts: name -> (sum, count) without gradient, for the log.
    """

    total: Tensor
    parts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def unit_counts(entries: Sequence[Entry], batch: dict[str, Tensor]) -> Tensor:
    """Units of each entry in a micro-batch, ``[E]`` float; add them up over a whole step."""
    return torch.stack([entry.count(batch) for entry in entries])


def step_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    entries: Sequence[Entry],
    *,
    reference: Reference | None = None,
    unwrapped: nn.Module | None = None,
    counts: Tensor | None = None,
    scale: float = 1.0,
    plan: ChunkPlan = DEFAULT_PLAN,
) -> StepLoss:
    """Weighted sum of all objectives for one micro-batch, as a part of its optimizer step.

    Args:
        model: as wrapped for training; ``unwrapped`` the bare (PEFT) model inside.
        batch: input_ids, attention_mask, labels ``[R, T]``; role, kind, task ``[R]``.
        reference: needed if an objective compares with the reference.
        counts: ``[E]`` units of the whole step; default: those of this micro-batch.
        scale: undoes later divisions (accumulation steps x processes).
    """
    unwrapped = model if unwrapped is None else unwrapped
    counts = unit_counts(entries, batch) if counts is None else counts
    distributions = [entry for entry in entries if entry.sees_distributions]
    # The reference first: while its weights are swapped in, no policy graph must exist.
    ref_logp, ref_hidden, ref_head = _reference_side(model, unwrapped, batch, entries, reference)
    logp, packed, positions = score_rows(
        model,
        batch,
        distributions,
        unwrapped=unwrapped,
        ref_hidden=None if ref_hidden is None else (lambda _positions: ref_hidden),
        ref_head=ref_head,
        plan=plan,
    )
    result = StepLoss(logp.new_zeros(()))
    for number, entry in enumerate(entries):
        column = distributions.index(entry) if entry.sees_distributions else None
        value, logs = entry_terms(entry, batch, logp, ref_logp, packed, positions, column)
        result.total = result.total + entry.args.weight * scale * value / counts[number].clamp(
            min=1
        )
        count = entry.count(batch)
        _add(result.parts, entry.name, value, count)
        if entry.objective.name == "kl":
            _add(result.parts, "kl", value, count)
        for name, extra in logs.items():
            _add(result.parts, name, extra, count)
    labelled = targets(batch["labels"]) != IGNORE
    for side, role in ROLES.items():
        rows = batch["role"] == role
        _add(result.parts, f"{side}_nll", -logp[rows].sum(), labelled[rows].sum())
    return result


def _reference_side(model, unwrapped, batch, entries, reference):
    if reference is None:
        return None, None, None
    label_rows, mask = wanted(entries, batch)
    logp, hidden = reference.look_up(
        model, unwrapped, batch, label_rows=label_rows, distribution_mask=mask
    )
    if not mask.any():
        return logp, None, None
    return logp, hidden, finished(reference.head(unwrapped), unwrapped)


def _add(parts: dict, name: str, value: Tensor, count: Tensor) -> None:
    before = parts.get(name)
    value, count = value.detach(), count.detach()
    parts[name] = (value, count) if before is None else (before[0] + value, before[1] + count)
