"""How the gradients of forgetting and of retaining meet.

Both come from one forward, are summed over micro-batches and processes, and become one gradient
before clipping and the optimizer. Vectors are lists of tensors, one a trained weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Batch, Extension

if TYPE_CHECKING:
    from axolotl_unlearn.training.trainer import UnlearnTrainer

Vector = Sequence[Tensor]


def dot(first: Vector, second: Vector) -> Tensor:
    """Inner product over all weights, scalar float64."""
    return sum((a.double() * b.double()).sum() for a, b in zip(first, second, strict=True))


def pcgrad(forget: Vector, retain: Vector) -> list[Tensor]:
    """PCGrad, arXiv 2001.06782 algorithm 1 for two tasks.

    Where ``<f, r> < 0``, each loses its component along the other:
    ``f - <f, r>/<r, r> r + r - <f, r>/<f, f> f``; else ``f + r``.
    """
    product = dot(forget, retain)
    if product >= 0:
        return [f + r for f, r in zip(forget, retain, strict=True)]
    keep_f, keep_r = 1 - product / dot(forget, forget), 1 - product / dot(retain, retain)
    return [
        f * keep_f.to(f.dtype) + r * keep_r.to(r.dtype) for f, r in zip(forget, retain, strict=True)
    ]


def gru(forget: Vector, retain: Vector) -> list[Tensor]:
    """Gradient rectified unlearning, arXiv 2503.09117: where ``<f, r> < 0`` the forget gradient
    loses its part along the retain gradient, ``f - <f, r>/<r, r> r + r``; else ``f + r``.

    The retain gradient is that of the step, not an average over steps as in the released code.
    """
    product = dot(forget, retain)
    share = product / dot(retain, retain) if product < 0 else torch.zeros_like(product)
    return [f + (1 - share).to(f.dtype) * r for f, r in zip(forget, retain, strict=True)]


def gu(forget: Vector, retain: Vector, scales: Sequence[Tensor | None]) -> list[Tensor]:
    """Geometric-disentanglement unlearning, arXiv 2511.17100: the forget gradient without its
    part along the retain gradient, plus the retain gradient.

    Each weight tensor by itself, in the metric of the optimizer: an update moves a weight by
    ``g / h`` (``h``: ``scales``), so ``f' = f - <f, r>_h / <r, r>_h r`` with
    ``<a, b>_h = sum(a b / h)`` makes ``<f'/h, r> = 0``: to first order the forget part of the
    update leaves the retain loss as it is.

    Args:
        scales: h of each weight, like it, or None for 1.
    """
    joined = []
    for f, r, h in zip(forget, retain, scales, strict=True):
        along = r.double() if h is None else r.double() / h.double()
        length = (along * r.double()).sum()
        share = (along * f.double()).sum() / length if length > 0 else length
        joined.append(f + (1 - share).to(f.dtype) * r)
    return joined


def adam_scales(optimizer: Any, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """``sqrt(v / (1 - beta2^t)) + eps`` of each weight as Adam has it before this step; None
    before its first step, and for optimizers without second moments.

    Raises:
        UnlearnError: The optimizer keeps its second moments in 8 bits.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    scales: list[Tensor | None] = []
    for parameter in parameters:
        state, group = optimizer.state.get(parameter, {}), groups.get(parameter, {})
        moments = state.get("exp_avg_sq", state.get("state2"))
        if moments is None:
            scales.append(None)
            continue
        if moments.shape != parameter.shape or not moments.is_floating_point():
            raise UnlearnError(
                "`unlearn.surgery: gu` needs the optimizer's second moments in full: use "
                "`optimizer: adamw_torch` or paged_adamw_32bit."
            )
        correction = 1 - group["betas"][1] ** float(state["step"])
        scales.append((moments / correction).sqrt() + group.get("eps", 1e-8))
    return scales


def gradients(loss: Tensor, parameters: Sequence[Tensor], *, keep: bool = False) -> list[Tensor]:
    """Of a loss by each of the weights; ``keep`` the graph for another one."""
    grads = (
        torch.autograd.grad(loss, parameters, retain_graph=keep, allow_unused=True)
        if loss.requires_grad  # a batch may hold no row of any of a side's entries
        else [None] * len(parameters)
    )
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


class Surgery:
    """Gathers the gradients of both sides over a step and writes their union into ``.grad``.

    Args:
        method: ``pcgrad``, ``gu`` or ``gru``; None adds them.
        reduce: mean over processes of a tensor.
    """

    def __init__(
        self,
        method: str | None,
        reduce: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        self.method, self.reduce = method, reduce
        self.parameters: list[nn.Parameter] = []
        self.sides: dict[str, list[Tensor]] = {}

    def step(
        self, trainer: UnlearnTrainer, model: nn.Module, batch: Batch, sides: set[str]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """One micro-batch: its losses, and with the last one of a step the cosine of `finish`."""
        extensions = trainer.extensions
        # Gradients are taken from the graph, so DDP has nothing to reduce: `reduce` does.
        with trainer.accelerator.no_sync(model), trainer.compute_loss_context_manager():
            if "forget" in sides and any(one.apart for one in extensions):
                rest = sides - {"forget"}
                losses = self._of_batch(trainer, model, batch, rest) if rest else {}
                with ExitStack() as stack:
                    for one in extensions:
                        stack.enter_context(one.forgetting(trainer, model))
                    losses |= self._of_batch(trainer, model, batch, {"forget"})
            else:
                losses = self._of_batch(trainer, model, batch, sides)
        last = trainer.accelerator.sync_gradients
        return losses, self.finish(trainer.optimizer, extensions) if last else None

    def _of_batch(
        self, trainer: UnlearnTrainer, model: nn.Module, batch: Batch, sides: set[str]
    ) -> dict[str, Tensor]:
        parts = trainer.current_gradient_accumulation_steps
        losses = {side: x / parts for side, x in trainer._losses(model, batch, sides).items()}
        scaler = trainer.accelerator.scaler
        self.add(
            model, losses if scaler is None else {s: scaler.scale(x) for s, x in losses.items()}
        )
        return {side: loss.detach() for side, loss in losses.items()}

    def forget_gradient(
        self, trainer: UnlearnTrainer, model: nn.Module, batches: Sequence[Batch]
    ) -> list[Tensor]:
        """That of the forget objectives over some batches, up to a factor; logs nothing."""
        weights = [p for p in model.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in weights]
        for batch in map(trainer._prepare_inputs, batches):
            loss = trainer._losses(model, batch, {"forget"}, log=False)["forget"]
            for sum_, g in zip(total, gradients(loss, weights), strict=True):
                sum_ += g
        return [self.reduce(g) for g in total]

    def add(self, model: nn.Module, losses: dict[str, Tensor]) -> None:
        """Gradients of one micro-batch, from one graph."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        remaining = len(losses)
        for side, loss in losses.items():
            remaining -= 1
            grads = gradients(loss, self.parameters, keep=remaining > 0)
            before = self.sides.get(side)
            self.sides[side] = (
                grads if before is None else [a + b for a, b in zip(before, grads, strict=True)]
            )

    def finish(self, optimizer: Any, extensions: Sequence[Extension] = ()) -> Tensor | None:
        """Write the joined gradient; returns the cosine between the two, if there are two."""
        sides = {side: [self.reduce(g) for g in grads] for side, grads in self.sides.items()}
        self.sides = {}
        for one in extensions:
            sides = one.on_gradients(sides)
        cosine, joined = None, next(iter(sides.values()))
        if len(sides) > 1:
            forget, retain = sides["forget"], sides["retain"]
            joined = self._joined(forget, retain, optimizer)
            lengths = (dot(forget, forget) * dot(retain, retain)).sqrt()
            cosine = dot(forget, retain) / lengths.clamp(min=1e-300)
        for one in extensions:
            joined = one.on_joined(joined)
        for parameter, gradient in zip(self.parameters, joined, strict=True):
            parameter.grad = gradient
        return cosine

    def _joined(self, forget: Vector, retain: Vector, optimizer: Any) -> list[Tensor]:
        if self.method == "gu":
            return gu(forget, retain, adam_scales(optimizer, self.parameters))
        if self.method is None:
            return [f + r for f, r in zip(forget, retain, strict=True)]
        return {"pcgrad": pcgrad, "gru": gru}[self.method](forget, retain)
