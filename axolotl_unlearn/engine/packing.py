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

from axolotl_unlearn.engine.head import final_logits, intercept_head, output_head, text_config
from axolotl_unlearn.errors import UnlearnError

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


#: Model -> whether rows may be laid end to end, found by `probe`.
_VERDICTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def can_pack(model: nn.Module, unwrapped: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether this batch should be laid end to end: the model can, and it pays."""
    if unwrapped not in _VERDICTS:
        _VERDICTS[unwrapped] = probe(model, unwrapped, batch["input_ids"].device)
    config = text_config(unwrapped)
    blockwise = "flash" in str(getattr(config, "_attn_implementation", ""))
    return _VERDICTS[unwrapped] and is_worthwhile(batch, config.hidden_size, blockwise)


def refuse_packing(unwrapped: nn.Module) -> None:
    """Always pad this model's batches (``unlearn.padding_free: false``)."""
    _VERDICTS[unwrapped] = False


@torch.no_grad()
def probe(model: nn.Module, unwrapped: nn.Module, device: torch.device | str) -> bool:
    """Try the model out on a few made-up tokens: does it keep packed rows apart?

    A second row must get the same hidden states whatever stands before it, and those that it gets
    alone. Four forwards of a few tokens, once a model; the same on all processes.

    Raises:
        UnlearnError: The model's logits do not follow from its head as `final_logits` says.
    """
    config = text_config(unwrapped)
    vocabulary = int(config.vocab_size)
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (1, count), generator=generator)

    first, other, second = ids(7), ids(7), ids(9)
    # Pad and special tokens could be treated apart; they are unlikely, not excluded.
    one_row = torch.arange(9)[None]
    two_rows = torch.cat([torch.arange(7)[None], one_row], 1)
    grabbed: list[Tensor] = []

    def run(tokens: Tensor, positions: Tensor, program) -> Tensor:
        inputs = {"input_ids": tokens.to(device), "position_ids": positions.to(device)}
        with intercept_head(output_head(unwrapped), program):
            return model(**inputs, use_cache=False, return_dict=True).logits

    def grab(hidden: Tensor, head) -> Tensor:
        grabbed.append(hidden)
        return head(hidden)

    was_training = unwrapped.training
    unwrapped.eval()
    try:
        logits = run(second, one_row, grab)
        run(torch.cat([first, second], 1), two_rows, grab)
        run(torch.cat([other, second], 1), two_rows, grab)
        expected: list[Tensor] = []

        def compute(hidden: Tensor, head) -> Tensor:
            expected.append(final_logits(head, unwrapped)(hidden))
            return head(hidden)

        run(second, one_row, compute)
    finally:
        unwrapped.train(was_training)
    if not torch.allclose(expected[0].float(), logits.float(), rtol=2e-2, atol=1e-3):
        raise UnlearnError(
            f"{type(unwrapped).__name__} changes its logits after the LM head in a way that is "
            "not known here; please report the model's name."
        )
    if str(getattr(config, "_attn_implementation", "sdpa")) not in _ATTENTION:
        return False
    alone, after_first, after_other = (h[0, -9:].float() for h in grabbed)
    moved = (grabbed[1][0, :7] - grabbed[2][0, :7]).abs().max().float()
    leak = (after_first - after_other).abs().max()
    shift = (after_first - alone).abs().max()
    low = grabbed[0].dtype in (torch.bfloat16, torch.float16)
    keeps_apart = bool(leak <= 1e-4 * moved)
    same = bool(shift <= (5e-2 if low else 1e-3) * alone.abs().max())
    if not (keeps_apart and same):
        LOG.info(
            "%s does not keep rows apart when laid end to end; batches are padded.",
            type(unwrapped).__name__,
        )
    return keeps_apart and same
