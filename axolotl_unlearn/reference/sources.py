"""The starting model as the reference.

It is the model as it stood when training started, before any resume and with any starting adapter.
Two sources give it without a second model in memory:

- `AdapterOff` (`reference/base.py`): a fresh LoRA is the identity at the start, so switching it off
  gives the reference;
- `FrozenCopy`: a copy of the *trained* weights alone (a starting adapter, or all weights in full
  fine-tuning), swapped in for the reference forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

from axolotl_unlearn.engine.forward import output_head
from axolotl_unlearn.engine.head_losses import DEFAULT_PLAN, ChunkPlan
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.base import AdapterOff, Reference, is_part


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
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(is_part(p) for p in trained):
            raise UnlearnError(_SHARDED)
        self._frozen = {p: p.detach().clone() for p in trained} if copy else {}
        self._head: list[Tensor | None] | None = None  # weight and bias, after `release`

    def release(self, model: nn.Module, keep_head: bool) -> None:
        """Drop the copy; of a trained head keep one, from which distributions are formed."""
        super().release(model, keep_head)
        if keep_head:
            self._head = [
                p.detach().clone() if p is not None and p.requires_grad and not self._frozen
                else self._at_start(p)
                for p in _weights(model)
            ]  # fmt: skip
        self._frozen = {}

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
            raise UnlearnError(_SHARDED)

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


_SHARDED = (
    "the trained weights are sharded over processes (FSDP, ZeRO-3), where no copy of them can "
    "stand in for the reference: start from a fresh LoRA adapter (`adapter: lora` without "
    "`lora_model_dir` or `peft_init_lora_weights`), or train with DDP."
)


def _weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the LM head."""
    head = output_head(model)
    return head.weight, getattr(head, "bias", None)


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


def make_reference(
    mode: str,
    model: nn.Module,
    *,
    starting_adapter: bool,
    plan: ChunkPlan,
    will_precompute: bool = False,
) -> Reference:
    """Take the reference from the model as it stands now (call before any resume).

    Args:
        mode: ``auto``, ``adapter_off``, ``frozen_copy`` or ``cached``.
        starting_adapter: whether the adapter changes the model at the start: it was loaded from
            ``lora_model_dir``, or see `adapter_changes_model`.
        will_precompute: `precompute` comes before the first training step, so nothing is copied.

    Raises:
        UnlearnError: If the adapter cannot simply be switched off.
    """
    has_adapter = hasattr(model, "disable_adapter")
    moves = has_adapter and bool(trained_outside(model))
    fresh_adapter = has_adapter and not starting_adapter and not moves
    if mode == "adapter_off" and not fresh_adapter:
        why = (
            "there is no adapter"
            if not has_adapter
            else "weights outside of the adapter are trained"
            if moves
            else "the adapter changes the model from the start (lora_model_dir, "
            "peft_init_lora_weights)"
        )
        raise UnlearnError(
            f"`unlearn.reference: adapter_off` does not give the starting model because {why}; "
            "use `auto` or `frozen_copy`."
        )
    remember = mode == "cached"
    if fresh_adapter and mode != "frozen_copy":
        return AdapterOff(plan, remember)
    return FrozenCopy(model, plan, remember, copy=not (remember and will_precompute))
