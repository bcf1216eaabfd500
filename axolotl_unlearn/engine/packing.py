"""Rows laid end to end instead of padded: the same numbers without computing on padding.

LUME rows have 77 tokens on average and up to several hundred, so a padded batch is mostly padding.
transformers builds a block mask from position ids that start anew (``attention_mask`` None, batch
of one); whether a given model really keeps the rows apart is tried out once, not assumed.

Shape letters: R rows, T time, N real tokens, D hidden.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from axolotl_unlearn.engine.head import intercept_head, output_head, text_config
from axolotl_unlearn.engine.needs import Head

LOG = logging.getLogger(__name__)

_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


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
            return hidden[row, time]
        return hidden[0, self.place[row, time]]


def padded_layout(batch: dict[str, Tensor]) -> Layout:
    """The batch as it is."""
    return Layout({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]})


def packed_layout(batch: dict[str, Tensor]) -> Layout:
    """All real tokens in one row, ``[1, N]``, with positions from 0 in each."""
    real = batch["attention_mask"].bool()
    positions = real.cumsum(-1) - 1
    inputs = {
        "input_ids": batch["input_ids"][real][None],
        "position_ids": positions[real][None],
    }
    place = (real.flatten().cumsum(0) - 1).view_as(real)
    return Layout(inputs, place)


def layout_of(model: nn.Module, unwrapped: nn.Module, batch: dict[str, Tensor]) -> Layout:
    """The batch laid end to end where the model can take that and it pays, else as it is."""
    return packed_layout(batch) if can_pack(model, unwrapped, batch) else padded_layout(batch)


def is_worthwhile(batch: dict[str, Tensor], hidden_size: int, blockwise: bool) -> bool:
    """Whether laying rows end to end saves computation.

    A layer costs about ``12 D^2`` multiplications a token outside attention and ``2 D`` a pair of
    positions inside; without a kernel for blocks, attention runs over all pairs of the one row.
    """
    lengths = batch["attention_mask"].sum(-1).double()
    rows, width = batch["attention_mask"].shape
    if rows == 1:
        return False
    tokens = lengths.sum()
    pairs = (lengths**2).sum() if blockwise else tokens**2
    packed = 6 * hidden_size * tokens + pairs
    padded = 6 * hidden_size * rows * width + rows * width**2
    return bool(packed < 0.95 * padded)


#: Model -> whether rows may be laid end to end, found by `keeps_rows_apart`.
_VERDICTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def can_pack(model: nn.Module, unwrapped: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether this batch should be laid end to end: the model can, and it pays."""
    if unwrapped not in _VERDICTS:
        _VERDICTS[unwrapped] = keeps_rows_apart(model, unwrapped, batch["input_ids"].device)
    config = text_config(unwrapped)
    blockwise = "flash" in str(getattr(config, "_attn_implementation", ""))
    return _VERDICTS[unwrapped] and is_worthwhile(batch, config.hidden_size, blockwise)


def refuse_packing(unwrapped: nn.Module) -> None:
    """Always pad this model's batches (``unlearn.padding_free: false``)."""
    _VERDICTS[unwrapped] = False


@torch.no_grad()
def keeps_rows_apart(model: nn.Module, unwrapped: nn.Module, device: torch.device | str) -> bool:
    """Try the model out on a few made-up tokens: does it keep packed rows apart?

    A second row must get the same hidden states whatever stands before it, and those that it gets
    alone. Three forwards of a few tokens, once a model; the same on all processes.
    """
    config = text_config(unwrapped)
    if str(getattr(config, "_attn_implementation", "sdpa")) not in _ATTENTION:
        return False
    generator = torch.Generator().manual_seed(0)
    # Pad and special tokens could be treated apart; they are unlikely, not excluded.
    first, other, second = (
        torch.randint(0, int(config.vocab_size), (1, count), generator=generator)
        for count in (7, 7, 9)
    )
    was_training = unwrapped.training
    unwrapped.eval()
    try:
        alone = _head_inputs(model, unwrapped, [second], device)
        after_first = _head_inputs(model, unwrapped, [first, second], device)
        after_other = _head_inputs(model, unwrapped, [other, second], device)
    finally:
        unwrapped.train(was_training)
    moved = (after_first[:7] - after_other[:7]).abs().max().float()
    leak = (after_first[7:].float() - after_other[7:].float()).abs().max()
    shift = (after_first[7:].float() - alone.float()).abs().max()
    low = alone.dtype in (torch.bfloat16, torch.float16)
    same = bool(shift <= (5e-2 if low else 1e-3) * alone.float().abs().max())
    apart = bool(leak <= 1e-4 * moved) and same
    if not apart:
        LOG.info(
            "%s does not keep rows apart when laid end to end; batches are padded.",
            type(unwrapped).__name__,
        )
    return apart


def _head_inputs(
    model: nn.Module, unwrapped: nn.Module, rows: list[Tensor], device: torch.device | str
) -> Tensor:
    """Hidden states before the head, ``[N, D]``, of rows ``[1, n]`` laid end to end."""
    grabbed: list[Tensor] = []

    def grab(states: Tensor, head: Head) -> Tensor:
        grabbed.append(states)
        return head(states)

    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    inputs = {"input_ids": torch.cat(rows, 1).to(device), "position_ids": positions.to(device)}
    with intercept_head(output_head(unwrapped), grab):
        model(**inputs, use_cache=False, return_dict=True)
    return grabbed[0][0]
