"""Log-probs of given continuations after given prompts, batched: "how likely is this answer?"."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.args import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import Record

#: A prompt and what follows it.
Pair = tuple[str, str]


def encode_pairs(
    tokenizer: Any, pairs: Sequence[Pair], options: DataArgs | None = None
) -> list[tuple[list[int], list[int]]]:
    """Token ids (prompt, continuation) as training would see them, without EOS.

    Raises:
        ValueError: for a continuation without tokens, or a pair without any prompt token.
    """
    options = (options or DataArgs()).model_copy(update={"eos": False})
    encoder = Encoder(tokenizer, options, max_length=2**31)
    encoded = []
    for number, (prompt, answer) in enumerate(pairs):
        row = encoder.encode(Record(id=f"row{number}", input=prompt, output=answer))
        if not row.completion or not row.prompt:
            raise ValueError(f"pair {number} has no tokens to predict or none to predict from.")
        encoded.append((row.prompt, row.completion))
    return encoded


@torch.inference_mode()
def continuation_logps(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    options: DataArgs | None = None,
    batch_size: int = 32,
) -> list[NDArray[np.float64]]:
    """Log-prob of each token of each continuation, in the order of ``pairs``.

    Args:
        model: Causal language model in evaluation mode.
        options: How prompt and continuation are joined (``join``, ``template`` ...).
    """
    encoded = encode_pairs(tokenizer, pairs, options)
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, encoded[i])))
    results: list[NDArray[np.float64] | None] = [None] * len(pairs)
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch, where = pack([encoded[i] for i in numbers])
        logps = target_logps(model, batch, where)
        sizes = [len(encoded[i][1]) for i in numbers]
        for i, values in zip(numbers, logps.split(sizes), strict=True):
            results[i] = values.double().cpu().numpy()
    return results


def pack(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[dict[str, Tensor], Tensor]:
    """Right-padded batch and where continuations are predicted.

    Returns:
        ``input_ids`` and ``attention_mask`` ``[R, T]``, and ``[P, 3]`` (row, position, target) of
        every continuation token, row by row.
    """
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    where = []
    for number, (prompt, answer) in enumerate(rows):
        tokens = prompt + answer
        ids[number, : len(tokens)] = torch.tensor(tokens)
        mask[number, : len(tokens)] = 1
        where += [(number, len(prompt) + i - 1, token) for i, token in enumerate(answer)]
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor(where)


def target_logps(model: Any, batch: dict[str, Tensor], where: Tensor) -> Tensor:
    """``[P]`` float32 log-probs of the targets of `pack`."""
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    row, time, target = where.to(device).unbind(-1)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # Logits of the positions that some row needs, not of whole prompts.
        keep = time.unique()
        logits = model(**batch, use_cache=False, logits_to_keep=keep).logits
        time = torch.searchsorted(keep, time.contiguous())
    else:
        logits = model(**batch, use_cache=False).logits
    chosen = logits[row, time].float()
    return chosen.log_softmax(-1).gather(-1, target[:, None])[:, 0]
