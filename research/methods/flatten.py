"""Gradients without their loudest directions: forgetting where little else lives (RepSelect).

The top principal components of a weight's gradient are what all texts share: to forget along them
harms what is retained, and a little fine-tuning brings it back (arXiv 2606.17168). They are
flattened on both sides of each weight: directions of its inputs (right singular vectors) and of its
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from axolotl_unlearn.config import UnlearnArgs
from research.methods.surgery import BySide

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


def flattened(gradient: Tensor, of: Tensor, args: Flatten) -> Tensor:
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
    forget: Sequence[Tensor], retain: Sequence[Tensor] | None, args: Flatten
) -> list[Tensor]:
    """The forget gradients of all weights; ``retain``: those that ``of: retain`` looks at."""
    source = forget if args.of == "forget" else retain
    return [flattened(g, of, args) for g, of in zip(forget, source, strict=True)]


class Flatten(BySide):
    """The forget gradient of a step, flattened before it meets that of retaining.

    Args:
        components: Top principal components of each weight.
        how: Divided by their singular values, by the squares, or removed.
        of: Whose gradient's components: forget, or retain.
        side: Directions of a weight's inputs, of its outputs, or both.
    """

    def __init__(
        self,
        *,
        components: Annotated[int, Gt(0)] = 512,
        how: Literal["soft", "quadratic", "hard"] = "soft",
        of: Literal["forget", "retain"] = "forget",
        side: Literal["both", "input", "output"] = "both",
    ) -> None:
        self.components, self.how, self.of, self.side = components, how, of, side

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        of = {one.parameters.get("of") for one in args.extensions if one.kind is cls}
        lacks = any(part.forget and not part.retain for part in args.phases or [args])
        says = "`Flatten` with `of: retain` looks at the retain gradient: add `retain` beside each "
        return super().faults(cfg, args) + [f"{says}`forget`."] * (lacks and "retain" in of)

    def on_gradients(self, sides: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        if "forget" not in sides:
            return sides
        return sides | {"forget": all_flattened(sides["forget"], sides.get("retain"), self)}
