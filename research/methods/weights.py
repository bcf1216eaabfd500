"""Weights of entries that move, and what such methods keep in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from transformers.trainer_callback import ExportableState

from axolotl_unlearn.engine.views import Entry
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Extension, Run


class Stateful(Extension, ExportableState):
    """The attributes named in ``kept`` are a part of each checkpoint; JSON keeps every bit."""

    kept: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in self.kept}}

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        """On resume the state of the checkpoint is there, else that of the trainer's making.

        Raises:
            UnlearnError: The checkpoint is of a run without this.
        """
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        if saved is None and state.global_step:
            raise UnlearnError(
                f"the checkpoint of step {state.global_step} holds nothing of "
                f"{type(self).__name__}, which this config needs from the first step on; start the "
                "run again from its beginning.",
                code="resume.no-state",
            )
        vars(self).update(saved["attributes"] if saved else {})


class Anneal(Extension):
    """The weight w of an entry goes to ``to`` by the last step of a phase, numbered from 1.

    linear: ``w + (to - w) t``; cosine: ``to + (w - to) (1 + cos(pi t)) / 2``, t from 0 to 1.
    """

    def __init__(
        self,
        *,
        entry: str,
        to: Annotated[float, Ge(0)] = 0.0,
        schedule: Literal["linear", "cosine"] = "linear",
        phase: Annotated[int, Ge(1)] = 1,
    ) -> None:
        self.entry, self.to, self.schedule, self.number = entry, to, schedule, phase

    def begin(self, run: Run) -> None:
        self.phase = run.phases[self.number - 1]

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        self.state = state

    def weight(self, start: float, step: int) -> float:
        """In the step with this global number; beyond its steps the phase keeps its ends."""
        last = self.phase.stop - 1 - self.phase.start
        t = min(max((step - self.phase.start) / last if last > 0 else 0.0, 0.0), 1.0)
        if self.schedule == "linear":
            return start + (self.to - start) * t
        return self.to + (start - self.to) * (1 + math.cos(math.pi * t)) / 2

    def on_weights(self, entries: Sequence[Entry], weights: Sequence[float]) -> Sequence[float]:
        if tuple(entries) != self.phase.entries:
            return weights
        return [
            self.weight(weight, self.state.global_step) if entry.name == self.entry else weight
            for entry, weight in zip(entries, weights, strict=True)
        ]
