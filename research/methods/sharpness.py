"""Sharpness-aware forgetting (NPO-SAM, arXiv 2502.05374): forgotten also around the weights.

The forget gradient is that at the weights moved by ``rho g / |g|``, the direction in which the
forget loss rises fastest, so that small changes (relearning, rounding) undo less of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn

from axolotl_unlearn.training.extensions import Batch
from research.methods.surgery import BySide


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


class Sharpness(BySide):
    """The direction is that of the whole step, taken once; published: ``rho`` 0.01."""

    apart = True

    def __init__(self, *, rho: Annotated[float, Gt(0)] = 0.01) -> None:
        self.rho = rho

    def on_batch(self, batches: Sequence[Batch]) -> None:
        self.batches, self.uphill = batches, None

    def forgetting(self, model: nn.Module) -> AbstractContextManager:
        weights = [p for p in model.parameters() if p.requires_grad]
        if self.uphill is None:
            self.uphill = self.forget_gradient(model, self.batches)
        return moved_uphill(weights, self.uphill, self.rho)
