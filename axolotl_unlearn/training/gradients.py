"""The gradients of a step: of either side, how they meet, and what to say of a bad one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from axolotl.core.trainers.base import AxolotlTrainer
from torch import Tensor, nn

from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.engine.views import Entry
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Batch, Extension
from axolotl_unlearn.training.phases import Phase

if TYPE_CHECKING:
    from axolotl_unlearn.training.surgery import Surgery


class GradientSteps(AxolotlTrainer):
    """What `UnlearnTrainer` does with gradients; the losses are its own.

    Attributes:
        extensions: Of the run, from `train` on.
    """

    unlearn_args: UnlearnArgs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extensions: Sequence[Extension] = ()
        self.surgery: Surgery | None = None
        if self.unlearn_args.by_side:
            from axolotl_unlearn.training.surgery import Surgery

            reduce = partial(self.accelerator.reduce, reduction="mean")
            self.surgery = Surgery(self.unlearn_args.surgery, reduce)
        self._step_batches: list[Batch] = []
        self._meters: dict[str, dict[str, list]] = {
            "train": defaultdict(lambda: [0.0, 0.0]),
            "eval": defaultdict(lambda: [0.0, 0.0]),
        }

    @abstractmethod
    def _phase(self, *, training: bool) -> Phase:
        """That of the step under way."""

    @abstractmethod
    def _losses(
        self, model: nn.Module, batch: Batch, sides: set[str] | None = None, log: bool = True
    ) -> dict[str, Tensor]:
        """Weighted losses of some sides, or of all."""

    @abstractmethod
    def loss_of(self, model: nn.Module, rows: Batch, entry: Entry) -> Tensor:
        """That of some rows under one objective."""

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """The loss is read after the backward pass, which the host would else start late."""
        loss = self._both_passes(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise self._blown_up(f"the loss is {loss.item()}", model)
        return loss

    def _both_passes(self, model, inputs, num_items_in_batch) -> Tensor:
        """With surgery, the gradients of both sides by themselves, joined at the end of a step."""
        sides = self._phase(training=True).sides
        alone = len(sides) < 2 and not any(one.by_side for one in self.extensions)
        if self.surgery is None or alone:
            *first, last = self._in_parts(self._prepare_inputs(inputs))
            with self.accelerator.no_sync(model) if first else nullcontext():
                losses = [super(GradientSteps, self).training_step(model, part) for part in first]
            return sum(losses, super().training_step(model, last, num_items_in_batch))
        model.train()
        losses, cosine = self.surgery.step(self, model, self._prepare_inputs(inputs), sides)
        if cosine is not None:
            self._meters["train"]["gradient_cosine"] = [float(cosine), 1.0]
        return sum(losses.values())

    def _in_parts(self, batch: Batch) -> list[Batch]:
        """With ``pairing.max_tokens``, a micro-batch in several forwards."""
        args = self.unlearn_args
        if args.pairing.max_tokens is None:
            return [batch]
        from axolotl_unlearn.engine.step import in_parts

        return in_parts(batch, args.pairing.max_tokens, padded=not args.padding_free)

    def _get_grad_norm(self, model, grad_norm=None):
        """Not finite, it would end in the weights; the scaler of fp16 skips such steps itself."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scales = self.accelerator.scaler is not None
        if norm is not None and not scales and not math.isfinite(norm):
            raise self._blown_up(f"the gradient is {float(norm)}", model)
        return norm

    def _blown_up(self, what: str, model: nn.Module) -> UnlearnError:
        """Found row by row in one process; several would wait for each other: all rows then."""
        from axolotl_unlearn.training.guard import blame, blown_up

        phase = self._phase(training=True)
        alone = self.args.world_size == 1
        found = blame(
            model,
            map(self._prepare_inputs, self._step_batches),
            phase.entries if alone else [],
            partial(self.loss_of, model),
        )
        out = Path(self.args.output_dir)
        return blown_up(what, self.state.global_step, found, self.axolotl_cfg, out)
