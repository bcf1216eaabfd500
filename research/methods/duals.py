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
from typing import Annotated, Any

from annotated_types import Ge, Gt
from pydantic import BaseModel, Field
from torch import Tensor

from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.engine.views import Entry, make_entries
from axolotl_unlearn.training.extensions import Run
from research.methods.weights import Stateful


class Rise(BaseModel, extra="forbid"):
    """A weight that follows how far a loss is above its level, ``scale base^gap + offset``."""

    base: float = Field(6.0, gt=1)
    scale: float = Field(0.3, gt=0)
    offset: float = 0.8
    least: float = Field(1.2, ge=0)
    most: float = Field(2.8, gt=0, allow_inf_nan=False)

    def weight(self, gap: float) -> float:
        """That of a step whose loss was ``gap`` above the level (below: negative)."""
        exponent = min(max(gap, 0.0), 64.0)  # beyond it the bound holds anyway
        return min(max(self.scale * self.base**exponent + self.offset, self.least), self.most)


class Duals(Stateful):
    """The multiplier of one entry; it is a part of each checkpoint.

    Args:
        entry: Its name as in the log, ``retain/nll``; its ``weight`` is where the multiplier starts.
        at_most: The level, in the unit of the loss; ``of_start``: or as a multiple of the loss in
            the first step; ``of_epoch``: or of its mean over the first epoch, in which the weight
            stays.
        rise: In place of a multiplier: a weight that follows the gap of the step before.
        step: What is added to the weight, times the distance; ``down``: share of it where the loss
            is below.
        penalty: Further weight, times the distance above.
    """

    kept = ("known",)

    def __init__(
        self,
        *,
        entry: str = "retain/nll",
        at_most: float | None = None,
        of_start: Annotated[float, Gt(0)] | None = None,
        of_epoch: Annotated[float, Gt(0)] | None = None,
        rise: Rise | None = None,
        step: Annotated[float, Gt(0)] = 1.0,
        down: Annotated[float, Ge(0)] = 1.0,
        penalty: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        self.entry, self.rise, self.step, self.down, self.penalty = entry, rise, step, down, penalty
        self.at_most, self.of_start, self.of_epoch = at_most, of_start, of_epoch
        self.reduce: Callable[[Tensor], Tensor] = lambda x: x
        self.known: dict[str, float] = {}
        self._sum: tuple[float, Tensor, Tensor] | None = None

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        faults = []
        for one in (one for one in args.extensions if one.kind is cls):
            given, name = one.parameters, one.parameters.get("entry", "retain/nll")
            entries = [e for part in args.phases or [args] for e in make_entries(part.entries())]
            if sum(given.get(key) is not None for key in ("at_most", "of_start", "of_epoch")) != 1:
                faults.append("`Duals`: give the level as `at_most`, `of_start` or `of_epoch`.")
            if name not in {entry.name for entry in entries}:
                faults.append(f"`Duals`: no entry is called {name!r}.")
        return faults

    def begin(self, run: Run) -> None:
        self.reduce = run.reduce

    def on_weights(self, entries: Sequence[Entry], weights: Sequence[float]) -> list[float]:
        """``weights`` of a phase, with that of the entry as it is now."""
        return [
            self.weight(weight) if entry.name == self.entry else weight
            for entry, weight in zip(entries, weights, strict=True)
        ]

    def weight(self, start: float) -> float:
        """Lambda, and the penalty on what the loss was above its level."""
        if "multiplier" not in self.known:
            return start
        return self.known["multiplier"] + self.penalty * max(0.0, self.known["gap"])

    def on_losses(
        self, entries: Sequence[Entry], parts: Mapping[str, Any], counts: Sequence[Tensor]
    ) -> None:
        for entry, count in zip(entries, counts, strict=True):
            if entry.name == self.entry:
                self.add(entry.args.weight, parts[entry.name][0], count)

    def add(self, weight: float, total: Tensor, count: Tensor) -> None:
        """What a micro-batch contributes to the loss of its step; ``count``: of the whole step."""
        before = 0 if self._sum is None else self._sum[1]
        self._sum = (weight, before + total, count)

    def next_multiplier(self, gap: float) -> float:
        """Lambda after a step whose loss was ``gap`` above the level (below: negative)."""
        if self.rise is not None:
            return self.rise.weight(gap)
        moved = self.step * gap * (self.down if gap < 0 else 1.0)
        return max(0.0, self.known["multiplier"] + moved)

    def on_step_end(self, args, state, control, **_: Any) -> None:
        if self._sum is None:
            return
        (weight, total, count), self._sum = self._sum, None
        loss, known = float(self.reduce(total.double()) / count.clamp(min=1)), self.known
        if not known:
            known |= {"multiplier": weight, "start": loss, "gap": 0.0, "mean": 0.0, "steps": 0}
        level = self.at_most
        if self.of_start is not None:
            level = self.of_start * known["start"]
        elif self.of_epoch is not None:
            if state.epoch is None or state.epoch <= 1:
                known["steps"] += 1
                known["mean"] += (loss - known["mean"]) / known["steps"]
                return
            level = self.of_epoch * known["mean"]
        known["gap"] = loss - level
        known["multiplier"] = self.next_multiplier(known["gap"])

    def logged(self) -> dict[str, float]:
        """The multiplier, for the log."""
        known = self.known.get("multiplier")
        return {} if known is None else {f"dual/{self.entry}": known}
