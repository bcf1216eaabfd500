"""The gradients of a step: of either side, how they meet, and what to say of a bad one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from axolotl.core.trainers.base import AxolotlTrainer
from rich.progress import Progress
from torch import Tensor, nn

from axolotl_unlearn.columns import SIDES
from axolotl_unlearn.config import ObjectiveArgs
from axolotl_unlearn.engine.entries import make_entries
from axolotl_unlearn.engine.parts import in_parts
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.experimental import saliency
from axolotl_unlearn.experimental.attribution import attributions
from axolotl_unlearn.experimental.sharpness import moved_uphill
from axolotl_unlearn.training.guard import blame, blown_up
from axolotl_unlearn.training.surgery import gradients

#: The loss of a row of either side whose gradients tell what rows share.
LOSS_OF = {
    entry.side: entry
    for entry in make_entries([(side, ObjectiveArgs(objective="nll")) for side in SIDES])
}


class GradientSteps(AxolotlTrainer):
    """What `UnlearnTrainer` does with gradients; the losses are its own."""

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """The loss is read after the backward pass, which the host would else start late."""
        loss = self._both_passes(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise self._blown_up(f"the loss is {loss.item()}", model)
        return loss

    def _both_passes(self, model, inputs, num_items_in_batch) -> Tensor:
        """With surgery, the gradients of both sides by themselves, joined at the end of a step."""
        args, sides = self.unlearn_args, self._phase(training=True).sides
        alone = len(sides) < 2 and not (args.sharpness or args.saliency or args.flatten)
        if self.surgery is None or alone:
            *first, last = self._in_parts(self._prepare_inputs(inputs))
            with self.accelerator.no_sync(model) if first else nullcontext():
                losses = [super(GradientSteps, self).training_step(model, part) for part in first]
            return sum(losses, super().training_step(model, last, num_items_in_batch))
        model.train()
        inputs = self._prepare_inputs(inputs)
        # Gradients are taken from the graph, so DDP has nothing to reduce: `Surgery` does.
        with self.accelerator.no_sync(model), self.compute_loss_context_manager():
            if args.sharpness and "forget" in sides:
                losses = self._add_gradients(model, inputs, {"retain"}) if "retain" in sides else {}
                weights = [p for p in model.parameters() if p.requires_grad]
                if self._uphill is None:
                    self._uphill = self._forget_gradient(model, self._step_batches)
                with moved_uphill(weights, self._uphill, args.sharpness):
                    losses |= self._add_gradients(model, inputs, {"forget"})
            else:
                losses = self._add_gradients(model, inputs, sides)
        if self.accelerator.sync_gradients:
            cosine = self.surgery.finish(self.optimizer)
            if cosine is not None:
                self._meters["train"]["gradient_cosine"] = [float(cosine), 1.0]
        return sum(losses.values())

    def _in_parts(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """With ``pairing.max_tokens``, a micro-batch in several forwards."""
        args = self.unlearn_args
        return in_parts(batch, args.pairing.max_tokens, padded=not args.padding_free)

    def _add_gradients(
        self, model: nn.Module, inputs: dict[str, Tensor], sides: set[str]
    ) -> dict[str, Tensor]:
        """Those of some sides for a micro-batch, from one forward; the losses for the log."""
        parts = self.current_gradient_accumulation_steps
        losses = {side: x / parts for side, x in self._losses(model, inputs, sides).items()}
        scaler = self.accelerator.scaler
        self.surgery.add(
            model, losses if scaler is None else {s: scaler.scale(x) for s, x in losses.items()}
        )
        return {side: loss.detach() for side, loss in losses.items()}

    def _forget_gradient(
        self, model: nn.Module, batches: Sequence[dict[str, Tensor]]
    ) -> list[Tensor]:
        """That of the forget objectives over some batches, up to a factor; logs nothing."""
        weights = [p for p in model.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in weights]
        for batch in batches:
            batch = self._prepare_inputs(batch)
            loss = self._losses(model, batch, {"forget"}, log=False)["forget"]
            for sum_, g in zip(total, gradients(loss, weights), strict=True):
                sum_ += g
        return [self.surgery.reduce(g) for g in total]

    def _choose_salient(self, resumed: bool) -> None:
        """Masks by the gradient over all forget rows at the start; a resumed run has its own."""
        model, out = self.accelerator.unwrap_model(self.model), Path(self.args.output_dir)
        if resumed:
            self.surgery.masks = saliency.load(out, model)
            return
        pairs = self._pairs(self.train_dataset, training=True)
        size, first = self._train_batch_size, self.args.process_index
        places = range(first, len(pairs), self.args.world_size)
        batches = [
            self.data_collator([pairs[i] for i in places[k : k + size]])
            for k in range(0, len(places), size)
        ]
        counts = sum(self._counts(batch, self.phases[0].entries) for batch in batches)
        self._step_counts = self.accelerator.reduce(counts.to(self.args.device), reduction="sum")
        self.current_gradient_accumulation_steps = 1
        model.to(self.args.device).train()
        with self.compute_loss_context_manager():
            found = self._forget_gradient(model, batches)
        self.surgery.masks = saliency.chosen(model, found, self.unlearn_args.saliency)
        if self.is_world_process_zero():
            saliency.save(out, self.surgery.masks)

    def _weigh_rows(self) -> None:
        """By the gradients of single rows at the start; each process takes all of them."""
        model = self.accelerator.unwrap_model(self.model).to(self.args.device).eval()
        weights = [p for p in model.parameters() if p.requires_grad]
        rows = {
            side: [self.data_collator([row]) for row in self._rows_with_role(side)]
            for side in SIDES
        }

        def each(side: str) -> Iterator[list[Tensor]]:
            for row in bar.track(rows[side], description=f"gradients of {side} rows"):
                with self.compute_loss_context_manager():
                    loss = self._loss_of(model, self._prepare_inputs(row), LOSS_OF[side])
                yield gradients(loss, weights)

        with Progress(disable=not self.is_world_process_zero(), transient=True) as bar:
            found = attributions(each("forget"), each("retain"))
        self.row_weights.fit(rows["forget"], found, self.unlearn_args.attribution)

    def _get_grad_norm(self, model, grad_norm=None):
        """Not finite, it would end in the weights; the scaler of fp16 skips such steps itself."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scales = self.accelerator.scaler is not None
        if norm is not None and not scales and not math.isfinite(norm):
            raise self._blown_up(f"the gradient is {float(norm)}", model)
        return norm

    def _blown_up(self, what: str, model: nn.Module) -> UnlearnError:
        """Found row by row in one process; several would wait for each other: all rows then."""
        phase = self._phase(training=True)
        alone = self.args.world_size == 1
        found = blame(
            model,
            map(self._prepare_inputs, self._step_batches),
            phase.entries if alone else [],
            partial(self._loss_of, model),
        )
        out = Path(self.args.output_dir)
        return blown_up(what, self.state.global_step, found, self.axolotl_cfg, out)
