"""Meeting a model at its decoder layers: take their outputs, and stop after the last one needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError


class _Tapped(nn.Module):
    """A decoder layer whose output is shown to ``keep``.

    A module around the layer, not a hook: hooks run inside gradient checkpointing, where the
    tensors are not those that the next layer gets.
    """

    def __init__(self, layer: nn.Module, keep: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layer, self.keep = layer, keep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.layer(*args, **kwargs)
        self.keep(output[0] if isinstance(output, tuple) else output)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask their layers, e.g. for `attention_type`
            return getattr(super().__getattr__("layer"), name)


def decoder_layers(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the decoder's layers, and under which name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    count = base.config.get_text_config().num_hidden_layers
    for owner in base.get_decoder().modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return owner, name
    raise UnlearnError(
        f"{type(base).__name__} has no list of {count} decoder layers, so objectives that see "
        "hidden states or gradients (rmu, adaptive_rmu, hidden_mse, alike_states, "
        "alike_gradients) cannot be used with it."
    )


@contextmanager
def tap_layers(
    model: nn.Module, layers: Sequence[int], *, stop: bool
) -> Iterator[dict[int, Tensor]]:
    """While inside, a forward of ``model`` leaves the outputs of ``layers`` in the yielded dict.

    Args:
        layers: numbers of decoder layers, from 0; at least one.
        stop: leave out the layers after the last one, whose output then goes to the final norm.

    Raises:
        UnlearnError: The model has no such layer.
    """
    taken: dict[int, Tensor] = {}
    owner, name = decoder_layers(model)
    whole = getattr(owner, name)
    if max(layers) >= len(whole):
        raise UnlearnError(
            f"`layer: {max(layers)}` of an objective in `unlearn:` does not exist: the model has "
            f"layers 0 to {len(whole) - 1}."
        )
    last = max(layers) + 1 if stop else len(whole)
    run = nn.ModuleList(
        _Tapped(layer, partial(taken.__setitem__, number)) if number in layers else layer
        for number, layer in enumerate(whole[:last])
    )
    setattr(owner, name, run)
    try:
        yield taken
    finally:
        setattr(owner, name, whole)
