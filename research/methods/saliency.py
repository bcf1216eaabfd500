"""Saliency masks: only the weights that the forget loss depends on most are trained.

SalUn (arXiv 2310.12508) chooses weights by the size of their gradient, SURE (the "FailureLLM" code,
2410.16454) neurons, rows of a weight, by its norm. The gradient is that of the forget objectives at
the start, over all forget rows. Of a fresh LoRA only B has one, so A stays as it was drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor, nn

from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Run
from research.methods.surgery import BySide

FILE = "saliency.safetensors"


def salient(gradients: Sequence[Tensor], share: float, by: str) -> list[Tensor]:
    """1 at the ``share`` of weights, or of rows of weights, with the largest gradients, else 0.

    Tensors without any gradient are left out of the count, and are 0.

    Example: gradients ((3, 4), (1, 0)), half of the neurons: norms 5 and 1, mask ((1, 1), (0, 0)).
    """
    sizes = []
    for g in gradients:
        rows = g.detach().float()
        sizes.append(
            rows.abs() if by == "weight" or rows.dim() < 2 else rows.flatten(1).norm(dim=1)
        )
    known = torch.cat([size.flatten() for size in sizes if bool(size.any())])
    kept = max(1, round(share * len(known)))
    least = known.topk(kept).values[-1]
    masks = []
    for g, size in zip(gradients, sizes, strict=True):
        mask = (size >= least) & (size > 0)
        wide = mask.view(-1, *[1] * (g.dim() - 1)) if mask.shape != g.shape else mask
        masks.append(wide.expand_as(g).to(g.dtype))
    return masks


def chosen(
    model: nn.Module, gradients: Sequence[Tensor], share: float, by: str
) -> dict[str, Tensor]:
    """The masks by name of the weight.

    Raises:
        UnlearnError: The forget objectives have no gradient.
    """
    if not any(bool(g.any()) for g in gradients):
        raise UnlearnError(
            "`Saliency` chooses weights by the gradient of the forget objectives, which is "
            "0 at the start; take objectives that move the starting model, or remove it."
        )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return dict(zip(names, salient(gradients, share, by), strict=True))


def save(folder: Path, masks: dict[str, Tensor]) -> None:
    """For a resume: the weights are then no longer those of the start."""
    from safetensors.torch import save_file

    from axolotl_unlearn.files import replacing

    with replacing(folder / FILE) as draft:
        save_file({name: mask.bool().contiguous().cpu() for name, mask in masks.items()}, draft)


def load(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """What `save` wrote.

    Raises:
        UnlearnError: There is none, or it is of another model.
    """
    from safetensors.torch import load_file

    path = folder / FILE
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masks = load_file(path) if path.is_file() else {}
    if masks.keys() != trained.keys():
        raise UnlearnError(
            f"{path} does not hold the masks of this run's weights, which a resumed run needs; "
            "start it again from its beginning."
        )
    return {name: masks[name].to(p.device, p.dtype) for name, p in trained.items()}


class Saliency(BySide):
    """Masks by the gradient over all forget rows at the start; a resumed run has its own.

    Args:
        share: Of the neurons, or weights, that are trained.
        by: neuron: rows of a weight by their gradient's norm; weight: each.
    """

    def __init__(
        self,
        *,
        share: Annotated[float, Gt(0), Lt(1)] = 0.1,
        by: Literal["neuron", "weight"] = "neuron",
    ) -> None:
        self.share, self.by = share, by

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        moves = "`Saliency` keeps weights as they are, but `weight_decay` would move them; set it "
        return super().faults(cfg, args) + [f"{moves}to 0."] * bool(cfg.get("weight_decay"))

    def on_start(self, run: Run, resumed: Path | None) -> None:
        if resumed:
            self.masks = load(run.out, run.model)
            return
        model = run.model.to(run.device).train()
        gradient = self.forget_gradient(model, run.batches())
        self.masks = chosen(model, gradient, self.share, self.by)
        if run.rank == 0:
            save(run.out, self.masks)

    def on_joined(self, gradient: list[Tensor]) -> list[Tensor]:
        return [g * m for g, m in zip(gradient, self.masks.values(), strict=True)]
