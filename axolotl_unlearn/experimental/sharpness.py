"""Sharpness-aware forgetting (NPO-SAM, arXiv 2502.05374): forgotten also around the weights.

The forget gradient is that at the weights moved by ``rho g / |g|``, the direction in which the
forget loss rises fastest, so that small changes (relearning, rounding) undo less of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.training.extensions import Batch, Extension


@contextmanager
def moved_uphill(
    weights: Sequence[Tensor], gradient: Sequence[Tensor], rho: float
) -> Iterator[None]:
    """While inside, ``weights`` are ``rho`` further along ``gradient``; then as before, bit by bit.

    Example: weights (3, 4), gradient (3, 4), rho 1: (3.6, 4.8).
    """
    length = sum((g.double() ** 2).sum() for g in gradient).sqrt()
    before = [weight.detach().clone() for weight in weights]
    scale = rho / float(length) if length > 0 else 0.0
    try:
        with torch.no_grad():
            for weight, g in zip(weights, gradient, strict=True):
                weight.add_(g.to(weight.dtype), alpha=scale)
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)


class Sharpness(Extension):
    """The direction is that of the whole step, taken once."""

    by_side = apart = True

    def on_batch(self, batches: Sequence[Batch]) -> None:
        self.batches, self.uphill = batches, None

    def forgetting(self, trainer: Any, model: nn.Module) -> AbstractContextManager:
        weights = [p for p in model.parameters() if p.requires_grad]
        if self.uphill is None:
            self.uphill = trainer.surgery.forget_gradient(trainer, model, self.batches)
        return moved_uphill(weights, self.uphill, trainer.unlearn_args.sharpness)
