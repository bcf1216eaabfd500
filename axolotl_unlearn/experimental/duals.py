"""Losses that are held below a level: their weight is a dual variable that the run itself finds.

After each optimizer step, with the loss L of the whole step (over micro-batches and processes) and
its level e, ``r = L - e`` and ``lambda <- max(0, lambda + step r)``, with ``down`` times the step
where r < 0 (PDU, arXiv 2506.05314: down 1; BLADE: .1). The entry weighs ``lambda + penalty
max(0, r)``, the gradient of the augmented Lagrangian with the r of the step before.

With ``rise`` the weight is no multiplier but a function of that r. SHA256's (arXiv 2504.12996) is
``clip(.3 6^max(0, r) + .8, 1.2, 2.8)`` with the mean over the first epoch as level; there r is of
the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from axolotl_unlearn.engine.views import Entry
from axolotl_unlearn.experimental.args import ConstraintArgs
from axolotl_unlearn.training.extensions import Stateful


def next_multiplier(value: float, gap: float, args: ConstraintArgs) -> float:
    """Lambda after a step whose loss was ``gap`` above the level (below: negative)."""
    if args.rise is not None:
        return args.rise.weight(gap)
    return max(0.0, value + args.step * gap * (args.down if gap < 0 else 1.0))


class Duals(Stateful):
    """The multipliers of a run, by name of the entry; they are a part of each checkpoint.

    Args:
        reduce: sum over processes of a tensor.
    """

    kept = ("known",)

    def __init__(self, reduce: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.reduce = reduce
        self.known: dict[str, dict[str, float]] = {}
        self._sums: dict[str, tuple[Entry, Tensor, Tensor]] = {}

    @classmethod
    def of(cls, trainer: Any) -> Duals:
        return cls(partial(trainer.accelerator.reduce, reduction="sum"))

    def on_weights(self, entries: Sequence[Entry], weights: Sequence[float]) -> list[float]:
        """``weights`` of a phase, with those of constrained entries as they are now."""
        return [
            weight if entry.args.constraint is None else self.weight(entry)
            for entry, weight in zip(entries, weights, strict=True)
        ]

    def weight(self, entry: Entry) -> float:
        """Lambda of an entry, and the penalty on what it was above its level."""
        known = self.known.get(entry.name)
        if known is None:
            return entry.args.weight
        return known["multiplier"] + entry.args.constraint.penalty * max(0.0, known["gap"])

    def on_losses(
        self, entries: Sequence[Entry], parts: Mapping[str, Any], counts: Sequence[Tensor]
    ) -> None:
        for entry, count in zip(entries, counts, strict=True):
            if entry.args.constraint is not None:
                self.add(entry, parts[entry.name][0], count)

    def add(self, entry: Entry, total: Tensor, count: Tensor) -> None:
        """What a micro-batch contributes to the loss of its step; ``count``: of the whole step."""
        before = self._sums.get(entry.name)
        total = total if before is None else before[1] + total
        self._sums[entry.name] = (entry, total, count)

    def on_step_end(self, args, state, control, **_: Any) -> None:
        for name, (entry, total, count) in self._sums.items():
            constraint = entry.args.constraint
            loss = float(self.reduce(total.double()) / count.clamp(min=1))
            known = self.known.setdefault(
                name,
                {"multiplier": entry.args.weight, "start": loss, "gap": 0.0}
                | {"mean": 0.0, "steps": 0},
            )
            level = constraint.at_most
            if constraint.of_start is not None:
                level = constraint.of_start * known["start"]
            elif constraint.of_epoch is not None:
                if state.epoch is None or state.epoch <= 1:
                    known["steps"] += 1
                    known["mean"] += (loss - known["mean"]) / known["steps"]
                    continue
                level = constraint.of_epoch * known["mean"]
            known["gap"] = loss - level
            known["multiplier"] = next_multiplier(known["multiplier"], known["gap"], constraint)
        self._sums = {}

    def logged(self) -> dict[str, float]:
        """The multipliers, for the log."""
        return {f"dual/{name}": values["multiplier"] for name, values in self.known.items()}
