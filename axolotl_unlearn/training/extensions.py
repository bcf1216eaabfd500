"""Where mechanisms meet a run without being known to it: the plugin gives the trainer the
extensions that a config's keys ask for (`axolotl_unlearn.experimental.extensions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from axolotl_unlearn.engine.views import Entry
from axolotl_unlearn.errors import UnlearnError

Batch = dict[str, Tensor]
#: Side -> its gradient, a tensor for each trained weight.
Sides = dict[str, list[Tensor]]


class Extension(TrainerCallback):
    """Base: every hook leaves things as they are.

    Attributes:
        by_side: Whether it needs gradients taken from the graph (`forgetting` and below).
        apart: Whether forget objectives need a forward of their own (`forgetting`).
        also_asked: Rows that references are asked about beside those of the run.
    """

    by_side: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    also_asked: Dataset | None = None

    @classmethod
    def of(cls, trainer: Any) -> Extension:
        """For a run, before references are asked."""
        return cls()

    def on_reference(self, trainer: Any, source: Any, reference: Any) -> None:
        """Before a reference is asked about all rows."""

    def on_start(self, trainer: Any, resumed: Path | None) -> None:
        """Before the first step, when references have answered; ``resumed``: the folder that
        `on_checkpoint` got."""

    def on_checkpoint(self, out: Path, folder: Path) -> None:
        """Before the other files of a checkpoint of the run ``out``: write your own, if any."""

    def on_compared(self, entry: Entry, reference: Any) -> Any:
        """What answers for the reference of an entry (None if it has none)."""
        return reference

    def on_batch(self, batches: Sequence[Batch]) -> None:
        """The micro-batches of the next optimizer step."""

    def on_rows(self, batch: Batch) -> Batch:
        """Of each forward, before its units are counted."""
        return batch

    def on_weights(self, entries: Sequence[Entry], weights: Sequence[float]) -> Sequence[float]:
        """Of the entries, in one forward."""
        return weights

    def on_losses(
        self, entries: Sequence[Entry], parts: Mapping[str, Any], counts: Sequence[Tensor]
    ) -> None:
        """What a micro-batch adds to its step; ``counts`` are of the whole step."""

    def forgetting(self, trainer: Any, model: nn.Module) -> AbstractContextManager:
        """Around the forward and backward of the forget objectives."""
        return nullcontext()

    def on_gradients(self, sides: Sides) -> Sides:
        """Of a whole step, over processes, before the sides are joined."""
        return sides

    def on_joined(self, gradient: list[Tensor]) -> list[Tensor]:
        """What becomes ``.grad``."""
        return gradient

    def logged(self) -> dict[str, float]:
        """For the log of training."""
        return {}


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
                "run again from its beginning."
            )
        vars(self).update(saved["attributes"] if saved else {})
