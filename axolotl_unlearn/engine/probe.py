"""What is learnt once about a model, on a few made-up tokens, and is no part of a batch's way.

Two questions: what does the model do to its logits after the LM head, and does it keep rows apart
that are laid end to end. Both are tried out, not assumed.

Shape letters: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError

LOG = logging.getLogger(__name__)

Change = Callable[[Tensor], Tensor]
#: Runs a model on made-up rows ``[1, n]`` laid end to end, without gradient: hidden states before
#: its head ``[N, D]``, what the head makes of them and the model's logits, ``[N, V]``.
Run = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]

#: What models do to the logits that their head gives, with a number of their config: capped as
#: Gemma 2 does, multiplied (Cohere, HyperCLOVA X), divided (Granite).
_CHANGES: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda z, value: torch.tanh(z / value) * value,
    lambda z, value: z * value,
    lambda z, value: z / value,
)
_NAMES = ("logit", "lm_head", "softcap")


def made_up_rows(config: Any, *lengths: int) -> list[Tensor]:
    """Rows ``[1, n]`` of random tokens, the same on all processes.

    Pad and special tokens could be treated apart; they are unlikely, not excluded.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(config.vocab_size)
    return [torch.randint(0, vocabulary, (1, n), generator=generator) for n in lengths]


def change_after_head(run: Run, config: Any, name: str) -> Change | None:
    """What a model does to its logits after the head; None where it does nothing.

    Of all that its config allows, what comes nearest to the model's own logits. One forward.

    Args:
        config: of the language model; ``name`` of its class.

    Raises:
        UnlearnError: Nothing comes near, or the model gives NaN.
    """
    _, made, logits = run(made_up_rows(config, 9))
    if made.isnan().any():
        raise UnlearnError(
            f"{name} gives NaN at made-up tokens: its numbers overflow. Load it in float32 or "
            "bfloat16; if that does not help, the run that made it failed."
        )
    logits = logits.to(made.device).float()  # the head of a spread model may lie elsewhere

    def changed(change: Change | None) -> Tensor:
        return (made if change is None else change(made)).float()

    def error(change: Change | None) -> float:
        gap = (changed(change) - logits).abs().max().item()
        return gap if math.isfinite(gap) else math.inf

    best = min(_candidates(config), key=error)
    if not torch.allclose(changed(best), logits, rtol=2e-2, atol=1e-3):
        raise UnlearnError(
            f"{name} changes its logits after the LM head in a way that is not known here; please "
            "report the model's name."
        )
    return best


def _candidates(config: Any) -> list[Change | None]:
    """One or two changes with numbers that the config keeps under fitting names, then none."""
    values = [
        value
        for key, value in vars(config).items()
        if any(name in key for name in _NAMES)
        and isinstance(value, (int, float))
        and value not in (0, 1)  # of no effect, and True and False
    ]
    single = [partial(change, value=value) for value in values for change in _CHANGES]
    double: list[Change] = [
        lambda z, first=first, second=second: second(first(z))
        for first, second in permutations(single, 2)
        if first.keywords != second.keywords
    ]
    return [*single, *double, None]


def keeps_rows_apart(run: Run, config: Any, name: str) -> bool:
    """Whether a model keeps rows apart that are laid end to end.

    A second row must get the same hidden states whatever stands before it, and those that it gets
    alone. Three forwards of a few tokens.
    """
    first, other, second = made_up_rows(config, 7, 7, 9)
    alone, after_first, after_other = (
        run(rows)[0] for rows in ([second], [first, second], [other, second])
    )
    moved = (after_first[:7] - after_other[:7]).abs().max().float()
    leak = (after_first[7:].float() - after_other[7:].float()).abs().max()
    shift = (after_first[7:].float() - alone.float()).abs().max()
    low = alone.dtype in (torch.bfloat16, torch.float16)
    same = bool(shift <= (5e-2 if low else 1e-3) * alone.float().abs().max())
    apart = bool(leak <= 1e-4 * moved) and same
    if not apart:
        LOG.info(
            "%s does not keep rows apart when laid end to end; batches are padded.",
            name,
        )
    return apart
