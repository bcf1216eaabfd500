"""Batched greedy generation with exactly the result of one prompt at a time, and draws.

No row is padded. A batch begins at its shortest prompt; the other rows take their own next tokens
until their prompts end. So no mask is needed (transformers reads one back at every token), and the
host waits for the device once in `EVERY` tokens. In float32 the tokens are those of
``model.generate`` on each prompt alone (rounding matters where two tokens are equally probable to
about 1e-6); in bfloat16 use batch size 1 for that.

Shape letters: R rows of the batch, T time, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from axolotl_unlearn.device import give_memory_back
from axolotl_unlearn.engine.token_scoring import context_of
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.models import input_device

#: Takes the numbers of the prompts of a finished batch, and what was written, without special
#: tokens.
OnBatch = Callable[[list[int], list[str]], None]
#: Tokens between two looks at what has stopped, and how much longer than the shortest prompt of a
#: batch another one may be.
EVERY, SPREAD = 8, 32
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
) -> list[str]:
    """Greedy continuations of raw prompts (no chat template; BOS only if the tokenizer adds one).

    They end with the model's context: what follows it is not what a model learned.

    Args:
        model: A causal language model in evaluation mode, on its device.
        seed: Draw tokens from the model's own distribution (temperature 1) instead.

    Raises:
        UnlearnError: A prompt has no token, or leaves no room for one.
    """
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    limit = context_of(model)
    check_room(limit, list(map(len, encoded)), 1)
    room = [min(max_new_tokens, (limit or math.inf) - len(ids)) for ids in encoded]
    stop = stop_tokens(model, tokenizer)
    own = seed is not None or _only_greedy(model)
    draw = None if seed is None else torch.Generator(input_device(model)).manual_seed(seed)
    results = [""] * len(prompts)
    # Longest first: what does not fit into memory shows at once.
    order = sorted(range(len(prompts)), key=lambda i: (-len(encoded[i]), i))
    todo: list[list[int]] = []
    # Prompts of one length where a repetition penalty of `generate` would count padding, and where
    # shards are found by whole prompts.
    spread = SPREAD if own and not hasattr(model, "routes") else 0
    for i in order:
        shortest = len(encoded[todo[-1][0]]) - spread if todo else 0
        if todo and len(todo[-1]) < batch_size and len(encoded[i]) >= shortest:
            todo[-1].append(i)
        else:
            todo.append([i])
    while todo:
        numbers = todo.pop(0)
        rows, most = [encoded[i] for i in numbers], max(room[i] for i in numbers)
        try:
            if own:
                new = _decode(model, rows, most, stop, draw)
            else:
                pad = tokenizer.pad_token_id
                pad = min(stop, default=0) if pad is None else pad
                new = _generate(model, rows, most, stop, pad)
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise
            give_memory_back()
            half = len(numbers) // 2
            todo[:0] = [numbers[:half], numbers[half:]]
            continue
        for number, ids in zip(numbers, new, strict=True):  # up to the first that ends a text
            ends = (i + 1 for i, token in enumerate(ids[: room[number]]) if token in stop)
            del ids[next(ends, room[number]) :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        for i, text in zip(numbers, texts, strict=True):
            results[i] = text
        if on_batch is not None:
            on_batch(numbers, texts)
    return results


def check_room(limit: int | None, lengths: Sequence[int], new: int) -> None:
    """Raise an `UnlearnError` where texts of so many tokens, and ``new`` more, are too long, or
    have none to go on from."""
    if new and not all(lengths):
        raise UnlearnError(
            f"{counted([*lengths].count(0), 'prompt has', 'prompts have')} no tokens, as where an "
            "`input` is empty and the tokenizer begins with no token; fill it or remove the row.",
            code="eval.no-tokens",
        )
    if long := [length + new for length in lengths if limit is not None and length + new > limit]:
        told, fewer = "", ""
        if new > 1:
            told = f" ({new} new)"
            fewer = "ask for fewer (`--max-gen-toks`, `--max-new-tokens`, lm-eval `--gen_kwargs`), "
        raise UnlearnError(
            f"{counted(len(long), 'text needs', 'texts need')} up to {max(long)} tokens{told} but "
            f"the model takes {limit}; {fewer}shorten the texts or take a model of longer context.",
            code="eval.no-room",
        )


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """What ends a text, as of ``model.generate`` in the official script."""
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stop = tokenizer.eos_token_id if stop is None else stop
    return {stop} if isinstance(stop, int) else set(stop or ())


def other_end(model: Any, tokenizer: Any) -> str:
    """A note where the tokenizer's end of sequence does not end a text."""
    stop, end = stop_tokens(model, tokenizer), tokenizer.eos_token_id
    if end is None or end in stop:
        return ""
    return (
        f"texts go on past the tokenizer's end of sequence (token {end}), as in the official "
        f"script: its generation_config.json ends them at {sorted(stop)}; lm-eval's stop at either."
    )


def _only_greedy(model: Any) -> bool:
    """Whether plain arg max reproduces the model's own ``generate`` and it takes our cache."""
    config = getattr(model, "generation_config", None)
    settings = config.to_diff_dict() if config is not None else {}
    # Values that say "off": null, false, 0, and 1 for a factor or a number of beams.
    off = {k for k, v in settings.items() if not v or (v == 1 and k.endswith(_FACTORS))}
    return (
        {k for k in settings if k[0] != "_"} - off <= _HARMLESS
        and getattr(config, "cache_implementation", None) is None
        and "past_key_values" in inspect.signature(model.forward).parameters
        and not getattr(model, "_is_stateful", False)
    )


def _decode(
    model: Any, rows: Sequence[Sequence[int]], limit: int, stop: set[int],
    draw: torch.Generator | None,
) -> list[list[int]]:  # fmt: skip
    """New tokens of each row, some more of those that stop; finished rows leave the batch."""
    from transformers import DynamicCache

    device, lengths = input_device(model), [len(row) for row in rows]
    start, width = min(lengths), max(lengths)
    # [R, T], -1 after the end of a prompt.
    given = torch.tensor([[*row] + [-1] * (width - len(row)) for row in rows], device=device)
    options: dict[str, Any] = {"past_key_values": DynamicCache(config=model.config)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    every = 1 if device.type == "cpu" else EVERY
    new: list[list[int]] = [[] for _ in rows]
    alive, ids, steps = list(range(len(rows))), given[:, :start], []
    for time in range(start, width + limit):
        logits = model(input_ids=ids, use_cache=True, **options).logits[:, -1].float()
        following = logits.argmax(-1)
        if draw is not None:
            following = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
        if time < width:
            following = torch.where(given[:, time] < 0, following, given[:, time])
        steps.append(following)
        ids = following[:, None]
        if len(steps) < every and time + 1 < width + limit:
            continue
        for row, tokens in zip(alive, torch.stack(steps, 1).tolist(), strict=True):
            first = max(0, lengths[row] - (time + 1 - len(steps)))
            new[row] += tokens[first:]
        steps = []
        new_of = [new[row] for row in alive]
        going = [i for i, own in enumerate(new_of) if len(own) < limit and stop.isdisjoint(own)]
        if not going:
            break
        if len(going) < len(alive):
            kept = torch.tensor(going, device=device)
            cache = options["past_key_values"]
            cache.batch_select_indices(kept)
            if hasattr(cache, "routes"):  # adapters of the rows, of a routed model
                cache.routes = [cache.routes[i] for i in going]
            alive, given, ids = [alive[i] for i in going], given[kept], ids[kept]
    return new


def _generate(
    model: Any, rows: Sequence[Sequence[int]], limit: int, stop: set[int], pad: int
) -> list[list[int]]:
    """The same through the model's own ``generate``, which knows its special settings; of rows of
    one length."""
    ids = torch.tensor([list(row) for row in rows], device=input_device(model))
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        pad_token_id=pad,
        eos_token_id=sorted(stop) or None,
    )
    return output[:, ids.shape[1] :].tolist()
