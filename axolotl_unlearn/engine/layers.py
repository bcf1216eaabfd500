"""Meeting a model at its decoder layers: take their outputs, and stop after the last one needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from axolotl_unlearn.engine.batch import indices, to_device
from axolotl_unlearn.engine.head import bare_model
from axolotl_unlearn.errors import UnlearnError

#: States of a layer, rows and times of positions, to ``[P, D]`` (`packing.Layout.pick`).
Pick = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def _place_of(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the decoder's layers, and under which name."""
    base = bare_model(model)
    count = base.config.get_text_config().num_hidden_layers
    for owner in base.get_decoder().modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return owner, name
    raise UnlearnError(
        f"{type(base).__name__} has no list of {count} decoder layers, so objectives that see "
        "hidden states (rmu, adaptive_rmu, hidden_mse, hidden_matching) cannot be used with it.",
        code="engine.no-layers",
    )


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder's layers."""
    owner, name = _place_of(model)
    return getattr(owner, name)


def freeze_after(model: nn.Module, last: int) -> None:
    """Train nothing that a forward which stops at layer ``last`` leaves out.

    DDP would wait for the gradients of those weights, and its next step would fail.
    """
    base = bare_model(model)
    layers = decoder_layers(model)
    used = {p for part in (base.get_input_embeddings(), *layers[: last + 1])
            for p in part.parameters()}  # fmt: skip
    if not any(parameter.requires_grad for parameter in used):
        return  # an objective below all that is trained: the plugin names its layer
    for part in (*layers[last + 1 :], base.get_output_embeddings()):
        for parameter in part.parameters():
            if parameter not in used:  # a tied head is the embedding matrix
                parameter.requires_grad_(False)


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
    owner, name = _place_of(model)
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


def row_profiles(layers: Sequence[Tensor], where: NDArray, pick: Pick) -> Tensor:
    """Mean, then standard deviation of each row's states over its positions ``where`` ``[R, T]``,
    layer by layer, ``[R, S]`` in at least float32; 0 for a row without."""
    row, time = indices(where, layers[0].device)
    place = to_device((where.cumsum(-1) - 1)[where], layers[0].device)
    counts = where.sum(-1)
    shape = len(where), int(counts.max(initial=0))
    count = to_device(counts.clip(min=1)[:, None], layers[0].device)
    profile = []
    for layer in layers:
        states = pick(layer, row, time).to(row.device)
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        # In rows, and not by `index_add`: a GPU adds to one place in an order of its own, and no
        # run would give the bits of another.
        nothing = states.new_zeros(*shape, states.shape[-1])
        rows = nothing.index_put((row, place), states)
        mean = rows.sum(1) / count
        squares = (rows - mean[:, None])[row, place] ** 2
        variance = nothing.index_put((row, place), squares).sum(1) / count
        # Where all states are the same the root has no derivative.
        profile += [mean, variance.clamp(min=1e-12).sqrt() * (count > 1)]
    return torch.cat(profile, -1)
