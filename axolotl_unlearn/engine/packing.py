"""Rows laid end to end, so that padding is not computed, where the model keeps them apart.

Whether it does is tried once on a few made-up tokens, not assumed.

Shape letters: R rows, T time, N tokens, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from axolotl_unlearn.engine.batch import Batch, to_device
from axolotl_unlearn.engine.head import bare_model, made_up_rows, run_made_up

LOG = logging.getLogger(__name__)


#: Tokens of rows without padding from which a kernel without a mask is worth a wait.
LONG = 1024


@dataclass(frozen=True)
class Layout:
    """How the rows of a batch lie in the model's input.

    Attributes:
        inputs: keyword arguments of the model.
        place: ``[R, T]`` index of each token in the packed row; None if padded.
    """

    inputs: dict[str, Tensor]
    place: Tensor | None = None

    def pick(self, hidden: Tensor, row: Tensor, time: Tensor) -> Tensor:
        """``[R, T, D]`` or ``[1, N, D]`` hidden states at positions of the batch, ``[P, D]``."""
        if self.place is None:
            return hidden[row.to(hidden.device), time.to(hidden.device)]
        return hidden[0, self.place.to(row.device)[row, time].to(hidden.device)]


def layout_of(model: nn.Module, unwrapped: nn.Module, batch: Batch) -> Layout:
    """The batch laid end to end where the model can take that and it pays, else as it is.

    Padding on the right is behind all that a token sees, so where the model takes a mask as it
    stands, it gets that of one row: transformers reads the padding, for which the host waits twice.
    Long rows without padding are better off with a kernel that needs no mask.
    """
    blocks, dtype = can_pack(model, unwrapped, batch), _attention_dtype(unwrapped, batch.device)
    if blocks is not None:
        return packed_layout(batch, blocks, dtype)
    ids, real = batch["input_ids"], batch.on_host("attention_mask").astype(bool)
    long = real.all() and ids.shape[1] > LONG
    if _PACKING[unwrapped] is not block_mask or long or (real[:, 1:] > real[:, :-1]).any():
        return Layout({name: batch[name] for name in ("input_ids", "attention_mask")})
    told = block_mask(np.array([ids.shape[1]]), ids.device, dtype)
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return Layout({"input_ids": ids, "position_ids": places, **told})


def packed_layout(batch: Batch, blocks: Blocks, dtype: torch.dtype) -> Layout:
    """All real tokens in one row, ``[1, N]``, with positions from 0 in each.

    Args:
        blocks: what the model is told of the rows; ``dtype`` its attention's.
    """
    real = batch.on_host("attention_mask").astype(bool)
    inputs = np.stack([batch.on_host("input_ids")[real], (real.cumsum(-1) - 1)[real]])
    place = real.ravel().cumsum() - 1
    ids, positions, place = to_device(np.concatenate([*inputs, place]), batch.device).split(
        [*[inputs.shape[1]] * 2, place.size]
    )
    packed = {"input_ids": ids[None], "position_ids": positions[None]}
    packed |= blocks(real.sum(-1), batch.device, dtype)
    return Layout(packed, place.view(real.shape))


#: Lengths of rows laid end to end to what a model is told of them beside their positions.
Blocks = Callable[[NDArray, torch.device, torch.dtype], dict[str, Any]]


def positions_alone(lengths: NDArray, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Transformers finds the rows in their positions; it waits for the device."""
    return {}


def block_lengths(lengths: NDArray, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Where rows begin, as kernels of flash attention take it; transformers would read it from the
    positions in every layer."""
    lengths = lengths[lengths > 0]
    ends = to_device(np.concatenate([[0], lengths.cumsum()]).astype(np.int32), device)
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def block_mask(lengths: NDArray, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What is added to the scores of sdpa, ``[1, 1, N, N]``: a mask of bools would be made into
    this, and copied to a stride that its kernels take, in every layer."""
    row = to_device(np.repeat(np.arange(len(lengths)), lengths), device)
    width = -(-len(row) // 16) * 16
    mask = torch.full((len(row), width), -torch.inf, dtype=dtype, device=device)[:, : len(row)]
    return {"attention_mask": mask.masked_fill_((row[:, None] == row).tril(), 0)[None, None]}


#: Attentions that may keep rows apart, and what they are told.
_TOLD: dict[str, Blocks] = {
    "eager": positions_alone,
    "sdpa": block_mask,
    "flash_attention_2": block_lengths,
    "flash_attention_3": block_lengths,
    "flex_attention": positions_alone,  # transformers builds one block mask a forward
}


def is_worthwhile(batch: Batch, hidden_size: int, blockwise: bool) -> bool:
    """Whether laying rows end to end saves computation.

    A layer costs about ``12 D^2`` multiplications a token outside attention and ``2 D`` a pair of
    positions inside; without a kernel for blocks, attention runs over all pairs of the one row.
    With one, padding saves nothing.
    """
    if blockwise:
        return True
    lengths = batch.on_host("attention_mask").sum(-1).astype(float)
    rows, width = batch["attention_mask"].shape
    if rows == 1:
        return False
    tokens = lengths.sum()
    packed = 6 * hidden_size * tokens + tokens**2
    padded = 6 * hidden_size * rows * width + rows * width**2
    return bool(packed < 0.95 * padded)


#: Model -> what it is told of rows laid end to end, learnt once; None: it does not keep them apart.
_PACKING: WeakKeyDictionary[nn.Module, Blocks | None] = WeakKeyDictionary()


def can_pack(model: nn.Module, unwrapped: nn.Module, batch: Mapping[str, Tensor]) -> Blocks | None:
    """What the model must be told of this batch laid end to end; None: it should not be, since the
    model cannot keep rows apart or it does not pay."""
    batch = Batch.of(batch)
    if unwrapped not in _PACKING:
        _PACKING[unwrapped] = _learn_packing(model, unwrapped, batch.device)
    config = unwrapped.config.get_text_config()
    # Over blocks, and not over all pairs of the one row.
    blockwise = _attention_of(config).startswith(("flash", "flex"))
    worthwhile = is_worthwhile(batch, config.hidden_size, blockwise)
    return _PACKING[unwrapped] if worthwhile else None


def _learn_packing(model: nn.Module, unwrapped: nn.Module, device: torch.device) -> Blocks | None:
    config, name = unwrapped.config.get_text_config(), type(unwrapped).__name__
    # Chunks are counted from the beginning of the one row, which a few tokens do not show.
    if _attention_of(config) not in _TOLD or getattr(config, "attention_chunk_size", None):
        return None
    told, kinds = _TOLD[_attention_of(config)], getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None)
    # One mask would not do where some layers see less than all that stands before.
    if told is block_mask and (windowed or {*(kinds or ())} - {"full_attention"}):
        told = positions_alone
    for blocks in dict.fromkeys((told, positions_alone)):
        try:
            if _keeps_rows_apart(model, unwrapped, device, blocks):
                return blocks
        except (RuntimeError, TypeError, ValueError):  # a model that cannot be told so
            if blocks is positions_alone:
                raise
    LOG.info("%s does not keep rows apart when laid end to end; batches are padded.", name)
    return None


def _keeps_rows_apart(
    model: nn.Module, unwrapped: nn.Module, device: torch.device, blocks: Blocks
) -> bool:
    """A second row must get the same hidden states whatever stands before it, and those that it
    gets alone. Three forwards of a few tokens."""
    first, other, second = made_up_rows(unwrapped, 7, 7, 9)
    real = np.repeat([[1], [1]], 9, axis=1)
    real[0, 7:] = 0

    def after(row: Tensor) -> dict[str, Any]:
        ids = torch.cat([nn.functional.pad(row, (0, 2)), second])
        rows = {"input_ids": ids.numpy(), "attention_mask": real}  # copied without a wait
        both = Batch({name: to_device(one, device) for name, one in rows.items()})
        return packed_layout(both, blocks, _attention_dtype(unwrapped, device)).inputs

    alone, after_first, after_other = (
        run_made_up(model, unwrapped, inputs)[0]
        for inputs in ({"input_ids": second.to(device)}, after(first), after(other))
    )
    moved = (after_first[:7] - after_other[:7]).abs().max().float()
    leak = (after_first[7:].float() - after_other[7:].float()).abs().max()
    shift = (after_first[7:].float() - alone.float()).abs().max()
    low = alone.dtype in (torch.bfloat16, torch.float16)
    same = bool(shift <= (5e-2 if low else 1e-3) * alone.float().abs().max())
    return bool(leak <= 1e-4 * moved) and same


def _attention_of(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", "sdpa"))


def _attention_dtype(unwrapped: nn.Module, device: torch.device) -> torch.dtype:
    """Of queries and keys."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return bare_model(unwrapped).get_input_embeddings().weight.dtype
