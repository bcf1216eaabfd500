"""The loss of one micro-batch: references, one policy forward, weighted objectives.

Free of any Trainer, so that training, tests and benchmarks run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from axolotl_unlearn.columns import ROLES
from axolotl_unlearn.engine.batch import Batch, to_device
from axolotl_unlearn.engine.head_losses import DEFAULT_PLAN, ChunkPlan
from axolotl_unlearn.engine.needs import ForwardResult, ForwardSpec, label_positions
from axolotl_unlearn.engine.observe import observe
from axolotl_unlearn.engine.views import Entry, View, together, view_of


@dataclass
class StepLoss:
    """What a micro-batch contributed.

    Attributes:
        losses: side -> scalar with gradient, the sum over its entries of
            ``weight * sum / count * scale``; a side without entries is not there.
        parts: name -> (sum, count) without gradient, for the log.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """Both sides together."""
        return sum(self.losses.values())

    def log(self, name: str, value: Tensor, count: Tensor) -> None:
        """Add to a part."""
        before = self.parts.get(name, (0, 0))
        self.parts[name] = before[0] + value.detach(), before[1] + count.detach()


def step_loss(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    entries: Sequence[Entry],
    *,
    reference: Any = None,
    unwrapped: nn.Module | None = None,
    counts: Tensor | None = None,
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    plan: ChunkPlan = DEFAULT_PLAN,
) -> StepLoss:
    """Weighted sums of the objectives of either side for one micro-batch, as a part of its
    optimizer step.

    Args:
        model: as wrapped for training; ``unwrapped`` the bare (PEFT) model inside.
        batch: input_ids, attention_mask, labels ``[R, T]``; role, kind, task ``[R]``.
        reference: what answers where an objective compares (`reference.base.Reference`): one for
            all entries, or by the name of the entry.
        counts: ``[E]`` units of the whole step; default: those of this micro-batch.
        weights: ``[E]``; default: those of the config.
        scale: undoes later divisions (accumulation steps x processes).
    """
    unwrapped, batch = model if unwrapped is None else unwrapped, Batch.of(batch)
    views = [view_of(entry, batch) for entry in entries]
    weights = [entry.args.weight for entry in entries] if weights is None else weights
    # The references first: while their weights are swapped in, no policy graph must exist.
    references = _ask_references(model, unwrapped, batch, views, reference)
    counts = [view.count for view in views] if counts is None else counts
    counts = [count.clamp(min=1) for count in counts]
    factors = [weight * scale / count for weight, count in zip(weights, counts, strict=True)]
    asked = zip(views, references, factors, strict=True)
    needs = together(view.of_policy(answer, factor) for view, answer, factor in asked)
    labelled = label_positions(batch)
    # The log has the NLL of either side, except where a training step need not reach the head.
    if knows_nll := needs.reach_head or not unwrapped.training:
        needs = together([needs, ForwardSpec(logged=labelled)])
    policy = observe(model, batch, needs, unwrapped=unwrapped, plan=plan)
    sides = dict.fromkeys(entry.side for entry in entries)
    result = StepLoss({side: policy.weighted.get(side, policy.zero) for side in sides})
    for number, (view, answer) in enumerate(zip(views, references, strict=True)):
        entry, terms = view.entry, view.terms(policy, answer)
        value = terms.values.sum()
        if not view.weighed_at_head:
            loss = weights[number] * scale * value / counts[number]
            result.losses[entry.side] = result.losses[entry.side] + loss
        result.log(entry.name, value, view.count)
        count = view.count
        if entry.args.divide_by_length:  # of the loss; the log is a position's
            count = to_device(np.float32(view.positions.sum()), batch.device)
        for name, values in terms.logs.items():
            result.log(name, values.sum(), count)
    for side, role in ROLES.items() if knows_nll else ():
        seen = labelled & (batch.on_host("role") == role)[:, None]
        total = -(policy.logp * to_device(seen, batch.device)).sum()
        result.log(f"{side}_nll", total, to_device(seen.sum(), batch.device))
    return result


def _ask_references(
    model: nn.Module,
    unwrapped: nn.Module,
    batch: Batch,
    views: Sequence[View],
    reference: Any,
) -> list[ForwardResult | None]:
    """What the reference of each view found; each reference is asked once, for all its views."""
    several, sources = isinstance(reference, Mapping), []
    for one in (view.entry for view in views):
        compares = one.objective.reference or one.objective.against_heldout
        sources.append((reference[one.name] if several else reference) if compares else None)
    answers: dict[Any, ForwardResult | None] = {None: None}
    for source in sources:
        if source not in answers:
            asking = [v for v, s in zip(views, sources, strict=True) if s is source]
            needs = together(view.of_reference() for view in asking)
            answers[source] = source.look_up(model, unwrapped, batch, needs)
    return [answers[source] for source in sources]
