"""Gradients without their loudest directions: forgetting where little else lives (RepSelect).

The top principal components of a weight's gradient are what all texts share: to forget along them
harms what is retained, and a little fine-tuning brings it back (arXiv 2606.17168). They are
flattened on both sides of each weight: directions of its inputs (right singular vectors) and of its
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.experimental.args import FlattenArgs
from axolotl_unlearn.training.extensions import Extension, Sides

#: The power of the singular values by which components are divided; hard leaves nothing of them.
POWERS = {"soft": 1, "quadratic": 2}


def principal(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` largest singular triples ``U, S, V`` of ``[out, in]``, without null ones."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    tiny = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    kept = min(count, int((s > s[0] * tiny).sum()))
    return u[:, :kept], s[:kept], vh[:kept].mT


def collapsed(matrix: Tensor, directions: Tensor, sizes: Tensor, how: str) -> Tensor:
    """``[out, in]`` with its parts along ``directions`` (``[in, k]``) made small or removed.

    ``M - M D D' + M D diag((s_k / s)^power) D'``: each is divided by its size over the smallest;
    ``hard`` leaves out the last term.
    """
    along = matrix @ directions
    left = along * (sizes[-1] / sizes) ** POWERS[how] if how in POWERS else torch.zeros_like(along)
    return matrix + (left - along) @ directions.mT


def flattened(gradient: Tensor, of: Tensor, args: FlattenArgs) -> Tensor:
    """A weight's gradient with the top components of ``of`` flattened, both ``[out, in]``.

    Example: diag(4, 2, 1), two components of itself, soft, both sides: 4 (2/4)^2 = 1, 2 (2/2)^2 = 2
    and 1 stays: diag(1, 2, 1).
    """
    if gradient.dim() != 2 or not bool(of.any()) or not bool(of.isfinite().all()):
        return gradient  # what overflowed is refused, or skipped by the scaler, afterwards
    exact = of.dtype if of.dtype == torch.float64 else torch.float32
    u, s, v = principal(of.to(exact), args.components)
    flat = gradient.to(exact)
    if args.side in ("input", "both"):
        flat = collapsed(flat, v, s, args.how)
    if args.side in ("output", "both"):
        flat = collapsed(flat.mT, u, s, args.how).mT
    return flat.to(gradient.dtype)


def all_flattened(
    forget: Sequence[Tensor], retain: Sequence[Tensor] | None, args: FlattenArgs
) -> list[Tensor]:
    """The forget gradients of all weights; ``retain``: those that ``of: retain`` looks at."""
    source = forget if args.of == "forget" else retain
    return [flattened(g, of, args) for g, of in zip(forget, source, strict=True)]


class Flatten(Extension):
    """The forget gradient of a step, flattened before it meets that of retaining."""

    by_side = True

    def __init__(self, args: FlattenArgs) -> None:
        self.args = args

    @classmethod
    def of(cls, trainer: Any) -> Flatten:
        return cls(trainer.unlearn_args.flatten)

    def on_gradients(self, sides: Sides) -> Sides:
        if "forget" not in sides:
            return sides
        return sides | {"forget": all_flattened(sides["forget"], sides.get("retain"), self.args)}
