"""The starting model as the reference: its adapters switched off, or a copy of what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from axolotl_unlearn.engine.head import output_head
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing
from axolotl_unlearn.reference.base import Reference, modules_of
from axolotl_unlearn.reference.sharded import is_part, whole


def make_reference(
    mode: str,
    model: nn.Module,
    *,
    starting_adapter: bool,
    will_precompute: bool = False,
    sharded: bool = False,
) -> Reference:
    """The starting model as the reference: as it stands now (call before any resume).

    A fresh LoRA is the identity at the start, so switching it off gives the reference. Else it is a
    copy of the *trained* weights alone (a starting adapter, or all weights in full fine-tuning).

    Args:
        mode: ``auto``, ``frozen_copy`` or ``cached``.
        starting_adapter: the adapter changes the model at the start.
        will_precompute: `precompute` comes before the first training step, so nothing is copied.
        sharded: the weights are, or will be, in parts, so that no copy can be swapped in.

    Raises:
        UnlearnError: A copy of weights in parts is asked for.
    """
    remember = mode == "cached"
    fresh = hasattr(model, "disable_adapter") and not (starting_adapter or trained_outside(model))
    if fresh and mode != "frozen_copy":
        return AdapterOff(remember)
    if sharded and mode == "frozen_copy":
        raise UnlearnError(SHARDED)
    return FrozenCopy(model, remember, not (sharded or (remember and will_precompute)))


def adapter_changes_model(model: nn.Module) -> bool:
    """Whether switching the adapters off would change the model as it stands.

    A LoRA is the identity while one of its factors is zero: B, or A for embeddings. Initialisations
    such as PiSSA, OLoRA and LoftQ are not, and the first two move a part of the base weights into
    the adapter. Weights that are not here (meta device, a ZeRO-3 partition) count as zero.
    """
    factors = (
        parameter
        for name, parameter in model.named_parameters()
        if "lora_B." in name or "lora_embedding_A." in name
    )
    return any(not p.is_meta and bool(p.detach().any()) for p in factors)


#: What PEFT calls the weights that `disable_adapter` switches off, beside a tuner's own prefix.
_SWITCHED = ("modules_to_save", "trainable_tokens_")


def check_trained(model: nn.Module) -> None:
    """Something is trained, and an adapter's folder will hold all of it.

    Raises:
        UnlearnError: Nothing is trained, or weights of the base beside an adapter are.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UnlearnError("no parameter is trained; check `adapter:` and `unfrozen_parameters`.")
    if hasattr(model, "disable_adapter") and (outside := trained_outside(model)):
        raise UnlearnError(
            f"{len(outside)} weights outside of the adapter are trained (first {outside[0]}), "
            "which an adapter's folder does not hold, so what they forget would be lost: remove "
            "`unfrozen_parameters` or `adapter`, or name the module in `lora_modules_to_save`."
        )


def trained_outside(model: nn.Module) -> list[str]:
    """Names of trained parameters that switching the adapters off would leave as they are."""
    own = (getattr(model.base_model, "prefix", "lora_"), *_SWITCHED)
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [name for name in trained if not any(part in name for part in own)]


class AdapterOff(Reference):
    """The base model under a LoRA adapter that started fresh."""

    without_adapter = True

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        with adapters_off(model):
            yield

    def head(self, model: nn.Module) -> Head:
        head = output_head(model)
        if hasattr(head, "base_layer"):  # LoRA on the head
            return head.base_layer
        if hasattr(head, "original_module"):  # head among modules_to_save
            return head.original_module
        # `forward` of the class: the instance's may be intercepted at that moment.
        return lambda hidden: type(head).forward(head, hidden)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """PEFT's ``disable_adapter`` without its look at every parameter (64 ms in 32 layers): no
    gradient is taken inside, so none needs to be switched off.

    Raises:
        UnlearnError: An adapter was switched on inside, so the reference was the policy.
    """
    layers = None if torch.is_grad_enabled() else _switches(model)
    if layers is None:
        with model.disable_adapter():
            yield
        return
    on = [layer for layer in layers if not layer._disable_adapters]
    for layer in on:
        layer._disable_adapters = True
    try:
        yield
        if not all(layer._disable_adapters for layer in layers):
            raise UnlearnError(
                "an adapter was on while the reference ran, so the policy was its own reference: "
                "use `unlearn.reference: frozen_copy`."
            )
    finally:
        for layer in on:
            layer._disable_adapters = False


def _switches(model: nn.Module) -> list[nn.Module] | None:
    """The adapter layers of a LoRA, which a flag switches; None of other adapters."""
    if type(getattr(model, "base_model", None)) is not LoraModel:
        return None
    modules = modules_of(model)
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    switched = {kind for kind in set(map(type, modules)) if issubclass(kind, kinds)}
    return [module for module in modules if type(module) in switched]


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

    def __init__(self, model: nn.Module, remember_hidden: bool = False, copy: bool = True) -> None:
        """``copy=False``: `precompute` and `release` follow before any weight has moved."""
        super().__init__(remember_hidden)
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
            save_file(tensors, draft, {"store": self._known.path.parent.name})

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
        if hasattr(output_head(model), "base_layer"):
            raise UnlearnError(
                "a KL objective with a starting adapter on the LM head is not supported: "
                "remove lm_head from lora_target_modules."
            )
        if self._head is None:
            self._require_swappable(model)
            weight, bias = _weights(model)
            if not isinstance(weight, nn.Parameter):  # PEFT makes it anew of trained tokens
                with self.active(model):
                    weight = _weights(model)[0]
            weight, bias = map(self._at_start, (weight, bias))
        else:
            weight, bias = self._head
        return lambda hidden: F.linear(hidden, weight.to(hidden.dtype), bias)


def _weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the LM head; of one among `modules_to_save`, of what is trained."""
    head = output_head(model)
    if hasattr(head, "modules_to_save"):
        head = head.modules_to_save[head.active_adapters[0]]
    return head.weight, getattr(head, "bias", None)
