"""Where methods that are no objective meet a run: `unlearn.extensions` names their classes.

The trainer gives them a `Run`, and calls their hooks in the order of the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainerCallback

from axolotl_unlearn.config import ReferenceArgs, UnlearnArgs
from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.engine.views import Entry
from axolotl_unlearn.reference.base import Reference
from axolotl_unlearn.training.phases import Phase


@dataclass(frozen=True)
class Run:
    """What an extension may know of a run, and ask of it.

    Attributes:
        args: The block of the config; ``cfg``: Axolotl's whole config.
        phases: At least one.
        rows: Of training; ``tokenizer``: theirs.
        model: The bare (PEFT) model.
        references: By what the config says of them.
        device: Of this process, whose number is ``rank``.
        out: Folder of the run.
        log: Takes numbers for the log of training.
        reduce: Sum of a tensor over processes.
        collate: Rows to a batch.
        batches: Before the first step: this process's share of all pairs in micro-batches, in
            their order, as if they were one step.
        losses: ``(model, batch, sides=None, counted=True)`` to the loss of each side of a
            micro-batch with its graph, as a part of its step; ``counted``: whether the log and
            `Extension.on_losses` have it.
        loss_of: ``(model, rows, entry)`` to the loss of some rows by one entry.
        optimizer: Once training has begun.
    """

    args: UnlearnArgs
    cfg: Any
    phases: Sequence[Phase]
    rows: Dataset
    tokenizer: Any
    model: nn.Module
    references: Mapping[ReferenceArgs, Reference]
    device: torch.device
    rank: int
    out: Path
    log: Callable[[dict[str, float]], None]
    reduce: Callable[[Tensor], Tensor]
    collate: Callable[[list[Mapping[str, Any]]], Batch]
    batches: Callable[[], list[Batch]]
    losses: Callable[..., dict[str, Tensor]]
    loss_of: Callable[[nn.Module, Batch, Entry], Tensor]
    optimizer: Callable[[], Any]

    @property
    def entries(self) -> list[Entry]:
        """The objectives of all phases."""
        return [entry for phase in self.phases for entry in phase.entries]


class Extension(TrainerCallback):
    """Base: every hook leaves things as they are.

    Keyword arguments of the class are its settings in the config, checked against their
    annotations. It is a callback of the trainer, too.

    Attributes:
        takes_gradients: Whether `backward` is its own; one of a run at most.
        also_asked: Rows that references are asked about beside those of the run.
    """

    takes_gradients: ClassVar[bool] = False
    also_asked: Dataset | None = None

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        """What does not go together in a config, a sentence each, before anything is loaded."""
        return []

    def begin(self, run: Run) -> None:
        """Before references are asked."""

    def on_start(self, run: Run, resumed: Path | None) -> None:
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

    def backward(self, model: nn.Module, batch: Batch, last: bool) -> Tensor:
        """In place of one backward of the sum of both sides: the detached loss of a micro-batch.

        After the ``last`` one of a step, ``.grad`` of each trained weight holds the mean over
        processes.
        """
        raise NotImplementedError

    def logged(self) -> dict[str, float]:
        """For the log of training."""
        return {}


def make_extensions(args: UnlearnArgs, run: Run) -> list[Extension]:
    """The extensions of a run, in the order of their hooks."""
    made: list[Extension] = []
    if args.level:
        from axolotl_unlearn.training.level import LevelCallback

        made.append(LevelCallback.of(run))
    for one in args.extensions:
        if one.kind is not None:
            made.append(one.kind(**one.parameters))
            made[-1].begin(run)
    return made
