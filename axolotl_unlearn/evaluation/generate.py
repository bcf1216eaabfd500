"""Batched greedy generation with exactly the result of one prompt at a time, and draws.

Prompts are sorted by length, padded on the left, and a row leaves its batch when it has stopped. In
float32 the tokens are those of ``model.generate`` on each prompt alone (rounding matters where two
tokens are equally probable to about 1e-6); in bfloat16 use batch size 1 for that.

Shape letters: R rows of the batch, T time, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.device import give_memory_back
from axolotl_unlearn.evaluation.generation import Generation, OnBatch
from axolotl_unlearn.models import input_device

#: Settings of a generation config that do not change greedy tokens. With any other one (for
#: example a repetition penalty) the model's own ``generate`` is used. Axolotl saves ``use_cache:
#: false``; without a cache generation is quadratic.
_HARMLESS = {
    "bos_token_id", "cache_implementation", "chat_format", "do_sample", "eos_token_id",
    "max_length", "max_new_tokens", "max_window_size", "min_p", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "temperature", "top_k", "top_p",
    "transformers_version", "use_cache", "typical_p",
}  # fmt: skip
_FACTORS = ("_penalty", "num_beams", "num_beam_groups", "num_return_sequences")


@torch.inference_mode()
def generate_greedily(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    on_batch: OnBatch | None = None,
    seed: int | None = None,
) -> list[Generation]:
    """Greedy continuations of raw prompts (no chat template; BOS only if the tokenizer adds one).

    Args:
        model: A causal language model in evaluation mode, on its device.
        seed: Draw tokens from the model's own distribution (temperature 1) instead.
        on_batch: Called with the numbers of the prompts of a finished batch and their results.
    """
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for number, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"prompt {number} has no tokens")
    stop = stop_tokens(model, tokenizer)
    own = seed is not None or _only_greedy(model)
    draw = None if seed is None else torch.Generator(input_device(model)).manual_seed(seed)
    results: list[Generation | None] = [None] * len(prompts)
    # Longest first: what does not fit into memory shows at once.
    order = sorted(range(len(prompts)), key=lambda i: (-len(encoded[i]), i))
    todo = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    while todo:
        numbers = todo.pop(0)
        rows = [encoded[i] for i in numbers]
        try:
            given = (model, tokenizer, rows, max_new_tokens, stop)
            new = _decode(*given, draw) if own else _generate(*given)
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise
            give_memory_back()
            half = len(numbers) // 2
            todo[:0] = [numbers[:half], numbers[half:]]
            continue
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        batch = [
            Generation(text, len(ids), bool(ids) and ids[-1] in stop)
            for text, ids in zip(texts, new, strict=True)
        ]
        for i, generation in zip(numbers, batch, strict=True):
            results[i] = generation
        if on_batch is not None:
            on_batch(numbers, batch)
    return results


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids that end a generation: those of the model's generation config, else the tokenizer's."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = tokenizer.eos_token_id if ids is None else ids
    return {ids} if isinstance(ids, int) else set(ids or ())


def _only_greedy(model: Any) -> bool:
    """Whether plain arg max reproduces the model's own ``generate`` and our cache handling fits."""
    config = getattr(model, "generation_config", None)
    settings = config.to_diff_dict() if config is not None else {}
    # Values that say "off": null, false, 0, and 1 for a factor or a number of beams.
    off = {k for k, v in settings.items() if not v or (v == 1 and k.endswith(_FACTORS))}
    changed = {k for k in settings if k[0] != "_"} - off
    parameters = inspect.signature(model.forward).parameters
    return (
        changed <= _HARMLESS
        and getattr(config, "cache_implementation", None) is None
        and {"position_ids", "past_key_values", "attention_mask"} <= set(parameters)
        and not getattr(model, "_is_stateful", False)
    )


def _left_padded(rows: Sequence[Sequence[int]], pad: int, device) -> tuple[Tensor, Tensor]:
    """``[R, T]`` ids and mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _decode(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], limit: int, stop: set[int],
    draw: torch.Generator | None = None,
) -> list[list[int]]:  # fmt: skip
    """New tokens of each row; finished rows leave the batch."""
    device = input_device(model)
    ids, mask = _left_padded(rows, _pad_id(tokenizer, stop), device)
    padded = not bool(mask.all())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    stop_ids = torch.tensor(sorted(stop), dtype=torch.long, device=device)
    options: dict[str, Any] = {"past_key_values": _cache(model.config, limit)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    new: list[list[int]] = [[] for _ in rows]
    alive = list(range(len(rows)))
    while True:
        # Without padding the mask says nothing, and without a mask attention is cheaper.
        seen = mask if padded else None
        output = model(
            input_ids=ids, attention_mask=seen, position_ids=positions, use_cache=True, **options
        )
        logits = output.logits[:, -1].float()
        following = logits.argmax(-1)
        if draw is not None:
            following = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
        for row, token in zip(alive, following.tolist(), strict=True):
            new[row].append(token)
        going = (~torch.isin(following, stop_ids)).nonzero()[:, 0]
        if len(going) == 0 or len(new[alive[0]]) == limit:
            return new
        positions = positions[:, -1:] + 1
        if len(going) < len(alive):
            options["past_key_values"].batch_select_indices(going)
            alive = [alive[i] for i in going.tolist()]
            following, mask, positions = following[going], mask[going], positions[going]
        ids = following[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], -1)


def _cache(config: Any, limit: int) -> Any:
    """A key-value cache whose plain layers have room for `limit` new tokens from the start:
    Transformers' own copies all keys and values at every token."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.room = None
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            if self.room is None or end > self.room[0].shape[-2]:
                states = (key_states, value_states)
                self.room = [x.new_empty(*x.shape[:-2], end + limit, x.shape[-1]) for x in states]
                if start:
                    for room, old in zip(self.room, (self.keys, self.values), strict=True):
                        room[..., :start, :] = old
            for room, new in zip(self.room, (key_states, value_states), strict=True):
                room[..., start:end, :] = new
            self.keys, self.values = (room[..., :end, :] for room in self.room)
            return self.keys, self.values

        def batch_select_indices(self, indices: Tensor) -> None:
            end = self.get_seq_length()
            self.room = [room[indices.to(room.device)] for room in self.room]
            self.keys, self.values = (room[..., :end, :] for room in self.room)

    cache = DynamicCache(config=config)
    cache.layers = [
        RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def _generate(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], limit: int, stop: set[int]
) -> list[list[int]]:
    """The same through the model's own ``generate``, which knows its special settings."""
    # Prompts of one length at a time: a repetition penalty would count the padding too.
    new: list[list[int]] = [[] for _ in rows]
    for length in sorted({len(row) for row in rows}):
        numbers = [i for i, row in enumerate(rows) if len(row) == length]
        ids = torch.tensor([list(rows[i]) for i in numbers], device=input_device(model))
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=_pad_id(tokenizer, stop),
            eos_token_id=sorted(stop) or None,
        )
        for i, row in zip(numbers, output[:, length:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in stop), len(row) - 1)
            new[i] = row[: end + 1]
    return new


def _pad_id(tokenizer: Any, stop: set[int]) -> int:
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return min(stop) if stop else 0
