"""The starting model as the reference: as it stood when training started, before any resume and
with any starting adapter. Two sources give it without a second model in memory:

- `AdapterOff` (`reference/base.py`): a fresh LoRA is the identity at the start, so switching it off
  gives the reference;
- `FrozenCopy` (`reference/frozen.py`): a copy of the *trained* weights alone (a starting adapter,
  or all weights in full fine-tuning), swapped in for the reference forward.
"""

from __future__ import annotations

from torch import nn

from axolotl_unlearn.engine.head_losses import ChunkPlan
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.base import AdapterOff, Reference


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
    sharded: bool = False,
) -> Reference:
    """Take the reference from the model as it stands now (call before any resume).

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
        return AdapterOff(plan, remember)
    from axolotl_unlearn.reference.frozen import SHARDED, FrozenCopy

    if sharded and mode == "frozen_copy":
        raise UnlearnError(SHARDED)
    return FrozenCopy(model, plan, remember, not (sharded or (remember and will_precompute)))
