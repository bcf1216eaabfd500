"""A copy of the trained weights, swapped in where the starting model is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from axolotl_unlearn.engine.head import output_head
from axolotl_unlearn.engine.head_losses import DEFAULT_PLAN, ChunkPlan
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing
from axolotl_unlearn.reference.base import Reference, is_part, whole

#: Of the head, as `FrozenCopy.save_start` calls them.
_HEAD = ("weight", "bias")
SHARDED = (
    "the trained weights are sharded over processes (FSDP, ZeRO-3), where no copy of them can "
    "stand in for the reference: set `unlearn.reference` to `auto`, which asks the starting model "
    "before the first step, or to `{model: BASE}`."
)


class FrozenCopy(Reference):
    """A copy of the trained weights as they stand now, swapped in for reference forwards.

    Costs the memory of the trained weights only: an adapter's few, or all in full fine-tuning.
    The copy is held by parameter, never by name: wrappers (torch.compile, DDP) change names.

    Raises:
        UnlearnError: The weights are sharded over processes, which would leave the policy in
            place of the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ChunkPlan = DEFAULT_PLAN,
        remember_hidden: bool = False,
        copy: bool = True,
    ) -> None:
        """``copy=False``: `precompute` and `release` follow before any weight has moved."""
        super().__init__(plan, remember_hidden)
        trained = [p for p in model.parameters() if p.requires_grad] if copy else []
        if any(is_part(p) for p in trained):
            raise UnlearnError(SHARDED)
        self._frozen = {p: p.detach().clone() for p in trained}
        self._head: list[Tensor | None] | None = None  # weight and bias, after `release`

    def release(self, model: nn.Module, keep_head: bool) -> None:
        """Drop the copy; of a trained head keep one, from which distributions are formed."""
        super().release(model, keep_head)
        if keep_head:
            self._head = [self._kept(p) for p in _weights(model)]
        self._frozen = {}

    def _kept(self, parameter: Tensor | None) -> Tensor | None:
        """What stays of a weight of the head; of one in parts all of it, in each process."""
        if parameter is None or self._frozen:
            return self._at_start(parameter)
        start = whole(parameter).detach()
        return start.clone() if parameter.requires_grad else start

    def save_start(self, path: Path) -> None:
        """After `precompute` into a folder beside ``path``, and `release`: the kept head, and the
        name of that folder."""
        head = dict(zip(_HEAD, self._head or (), strict=False))
        tensors = {name: value.cpu() for name, value in head.items() if value is not None}
        with replacing(path) as draft:
            save_file(tensors, draft, {"store": self._logp.path.parent.name})

    def load_start(self, path: Path, device: torch.device, part: int) -> None:
        """On resume, where the model is no longer the one that was asked: what `save_start` wrote.

        Raises:
            UnlearnError: There is none.
        """
        if not path.is_file():
            raise UnlearnError(
                f"{path} is missing, which holds what the starting model said: start the run again "
                "from its beginning."
            )
        with safe_open(path, "pt") as file:  # which knows no device `cpu:0`
            self.keep_in(path.parent / file.metadata()["store"], part)
            kept = {name: file.get_tensor(name).to(device) for name in file.keys()}
        self._head = [kept.get(name) for name in _HEAD] if kept else None
        self.complete = True

    def _at_start(self, parameter: Tensor | None) -> Tensor | None:
        """The value a parameter had; one that is not trained, or nothing yet, still has it."""
        if parameter is None:
            return None
        return self._frozen.get(parameter, parameter.detach())

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        self._require_swappable(model)
        policy = {parameter: parameter.data for parameter in self._frozen}
        try:
            for parameter, start in self._frozen.items():
                parameter.data = start.to(parameter.device, parameter.dtype)
            yield
        finally:
            for parameter, data in policy.items():
                parameter.data = data

    def _require_swappable(self, model: nn.Module) -> None:
        """Every copied parameter must still be one that a forward of this model uses."""
        present = {id(p) for p in model.parameters() if not is_part(p)}
        if any(id(p) not in present for p in self._frozen):
            raise UnlearnError(SHARDED)

    def head(self, model: nn.Module) -> Head:
        head = output_head(model)
        if hasattr(head, "base_layer") or hasattr(head, "original_module"):
            raise UnlearnError(
                "a KL objective with a starting adapter on the LM head is not supported: "
                "remove lm_head from lora_target_modules or modules_to_save."
            )
        if self._head is None:
            self._require_swappable(model)
            weight, bias = map(self._at_start, _weights(model))
        else:
            weight, bias = self._head
        return lambda hidden: F.linear(hidden, weight.to(hidden.dtype), bias)


def _weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the LM head."""
    head = output_head(model)
    return head.weight, getattr(head, "bias", None)
