"""One forward of a text gives the facts that every likelihood metric is made of.

The model's head is asked only at the positions whose next token is scored, in chunks, so that
memory grows with the chunk and not with batch x time x vocabulary. Of each scored token four
numbers are kept: its log-probability, whether it is the arg max, and mean and standard deviation
of the log-probability over the vocabulary (for Min-K%++). The metrics are pure functions of these
(`axolotl_unlearn.metrics.memorisation`).

Shape letters: R rows, T time, D hidden, V vocabulary, P scored positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axolotl_unlearn.engine.batch import to_device
from axolotl_unlearn.engine.head import learn_after_head, output_vocabulary, run_to_head
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.models import input_device

__all__ = ["Query", "TokenFacts", "encode_continuation", "score_queries", "score_texts"]

COLUMNS = 4


@dataclass(frozen=True)
class Query:
    """What is asked about one sequence of tokens.

    Attributes:
        ids: the sequence that is fed to the model.
        times: for each scored token the position that predicts it (0 predicts token 1).
        targets: for each the token whose probability is asked.
    """

    ids: Sequence[int]
    times: Sequence[int]
    targets: Sequence[int]

    @classmethod
    def of(cls, ids: Sequence[int], start: int = 1) -> Query:
        """Score the tokens of `ids` from number `start` on; token 0 has no prediction."""
        start = max(start, 1)
        return cls(list(ids), range(start - 1, len(ids) - 1), list(ids[start:]))


@torch.inference_mode()
def score_queries(
    model: Any,
    queries: Sequence[Query],
    *,
    batch_tokens: int = 8192,
    chunk_mib: int = 64,
    loss_only: bool = False,
    on_batch: Callable[[list[int]], None] | None = None,
) -> list[TokenFacts]:
    """Facts of every scored token.

    Args:
        batch_tokens: at most this many tokens (padding included) a forward.
        chunk_mib: size of the logits that exist at once, in MiB of float32.
        loss_only: compute log-probabilities only; greedy, mean and sd are then NaN. This is the
            yardstick of the benchmark.
        on_batch: called with the numbers of the queries of each finished batch.

    Returns:
        One `TokenFacts` a query, in order; identical texts are scored once.
    """
    unique: dict[tuple, int] = {}
    for number, query in enumerate(queries):
        unique.setdefault((tuple(query.ids), tuple(query.times), tuple(query.targets)), number)
    facts: dict[int, np.ndarray] = {}
    check_length(model, [queries[n] for n in unique.values()])
    for numbers in _batches([(n, len(queries[n].ids)) for n in unique.values()], batch_tokens):
        chosen = [queries[n] for n in numbers]
        values = _forward(model, chosen, chunk_mib, loss_only).float().cpu().numpy()
        ends = np.cumsum([len(query.times) for query in chosen])[:-1]
        for n, piece in zip(numbers, np.split(values, ends), strict=True):
            facts[n] = piece
        if on_batch is not None:
            on_batch(numbers)
    results = []
    for query in queries:
        n = unique[tuple(query.ids), tuple(query.times), tuple(query.targets)]
        results.append(TokenFacts.from_columns(facts[n]))
    return results


def score_texts(
    model: Any, tokenizer: Any, texts: Sequence[str], **options: Any
) -> list[TokenFacts]:
    """Facts of whole texts: all tokens but the first, as the loss of a causal model has them.

    Of an `axolotl_unlearn.data.documents.Answer` those of the answer, read after its prompt.
    """
    return score_queries(model, text_queries(tokenizer, texts), **options)


def text_queries(tokenizer: Any, texts: Sequence[str]) -> list[Query]:
    """What `score_texts` asks."""
    queries = []
    for number, text in enumerate(texts):
        prompt = getattr(text, "prompt", "")
        ids, start = encode_continuation(tokenizer, prompt, text) if prompt else (None, 1)
        ids = tokenizer(text)["input_ids"] if ids is None else ids
        if len(ids) < 2 or start >= len(ids):
            raise UnlearnError(f"text {number} is a single token; nothing can be predicted of it.")
        queries.append(Query.of(ids, start))
    return queries


#: Summed over no token, its log-probability would be 0, the best of all.
NO_TOKEN = (
    "the tokenizer joins the end of a question and the start of an option to one token, so the "
    "option has none of its own and no probability: leave out general.jsonl for this "
    "model."
)


def encode_continuation(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of context + continuation, and where the continuation starts (as lm-eval does).

    Raises:
        UnlearnError: The continuation has no token of its own.
    """
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    if start >= len(whole):
        raise UnlearnError(NO_TOKEN)
    return whole, start


def score_options(
    model: Any,
    tokenizer: Any,
    questions: Sequence[tuple[str, Sequence[str]]],
    **options: Any,
) -> list[list[float]]:
    """Summed log-probability of each continuation after its context.

    Continuations of one token that follow the same tokens (MMLU's letters) share one forward.
    """
    queries: list[Query] = []
    places: list[list[tuple[int, slice]]] = []
    for context, continuations in questions:
        shared: dict[tuple[int, ...], int] = {}
        places.append([])
        for continuation in continuations:
            ids, start = encode_continuation(tokenizer, context, continuation)
            if len(ids) - start > 1:
                places[-1].append((len(queries), slice(None)))
                queries.append(Query.of(ids, start))
                continue
            number = shared.setdefault(tuple(ids[:-1]), len(queries))
            if number == len(queries):
                queries.append(Query(ids[:-1], [], []))
            asked = queries[number]
            places[-1].append((number, slice(len(asked.times), len(asked.times) + 1)))
            asked.times.append(len(ids) - 2)
            asked.targets.append(ids[-1])
    facts = score_queries(model, queries, loss_only=True, **options)
    return [[float(facts[number].logp[where].sum()) for number, where in own] for own in places]


def context_of(model: Any) -> int | None:
    """Tokens that the model takes, if its config says so."""
    config = getattr(model, "config", None)
    get_text = getattr(config, "get_text_config", None)
    return getattr(get_text() if callable(get_text) else config, "max_position_embeddings", None)


def check_length(model: Any, queries: Sequence[Query]) -> None:
    """Raise an `UnlearnError` where a query is longer than the model takes, or has other tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max((max(query.ids) for query in queries if query.ids), default=0)
    if largest >= rows:
        raise UnlearnError(
            f"a text has token {largest} but the model has embeddings of {rows} tokens; its "
            "tokenizer is of another model."
        )
    limit = context_of(model)
    longest = max((len(query.ids) for query in queries), default=0)
    if limit is not None and longest > limit:
        raise UnlearnError(
            f"a text has {longest} tokens but the model takes {limit}; shorten the text."
        )


def _batches(sizes: Sequence[tuple[int, int]], batch_tokens: int) -> list[list[int]]:
    """Numbers grouped so that rows x longest row stays within `batch_tokens`, longest first."""
    batches: list[list[int]] = []
    width = 0
    for number, length in sorted(sizes, key=lambda item: (-item[1], item[0])):
        if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
            batches.append([])
            width = length
        batches[-1].append(number)
    return batches


def _forward(model: Any, queries: Sequence[Query], chunk_mib: int, loss_only: bool) -> Tensor:
    """``[P, 4]`` log-probability, greedy, mean, sd of the scored tokens, query after query."""
    device = input_device(model)
    learn_after_head(model, model, device)
    width = max(len(query.ids) for query in queries)
    ids = np.zeros((len(queries), width), dtype=np.int64)
    for row, query in enumerate(queries):
        ids[row, : len(query.ids)] = query.ids
    rows = np.repeat(np.arange(len(queries)), [len(query.times) for query in queries])
    times = [t for query in queries for t in query.times]
    asked = np.array([rows, times, [t for query in queries for t in query.targets]], np.int64)
    size = max(16, chunk_mib * 2**20 // (4 * output_vocabulary(model)))

    def at_head(hidden: Tensor, logits: Head) -> list[Tensor]:
        """``[R, T, D]`` to ``[P, 4]``."""
        row, time, targets = to_device(asked, hidden.device)
        picked = hidden[row, time]
        cuts = range(0, len(picked), size)
        parts = [
            token_statistics(logits(picked[a : a + size]), targets[a : a + size], loss_only)
            for a in cuts
        ]
        return [torch.cat(parts)]

    # No token sees the padding on its right, and transformers reads a mask back, twice a forward.
    inputs = {"input_ids": to_device(ids, device)}
    if (routes := getattr(model, "routes", None)) is not None:  # the answer must not find its shard
        starts = (next(iter(query.times), 0) + 1 for query in queries)
        routes.lengths = [n if n > 1 else len(query.ids)
                          for n, query in zip(starts, queries, strict=True)]  # fmt: skip
    return run_to_head(model, inputs, at_head, model)[0]


def token_statistics(logits: Tensor, targets: Tensor, loss_only: bool = False) -> Tensor:
    """``[P, V]`` logits (overwritten if float32) and ``[P]`` targets to ``[P, 4]``.

    Log-probability of the target, 1 if it is the arg max, and mean and standard deviation of
    ``log p(v)`` for v drawn from p (arXiv 2404.02936, eq. 3).
    """
    logits = logits.float()
    picked = logits.gather(1, targets[:, None])[:, 0]
    result = logits.new_full((len(targets), COLUMNS), float("nan"))
    if loss_only:
        result[:, 0] = picked - logits.logsumexp(-1)
        return result
    # One pass of exp for everything: passes over the vocabulary are all that this costs.
    largest, where = logits.max(-1)
    shifted = logits.sub_(largest[:, None])
    p = shifted.exp()
    total = p.sum(-1)
    log_total = total.log()
    result[:, 0] = (picked - largest) - log_total
    result[:, 1] = where == targets
    mean = torch.linalg.vecdot(p, shifted) / total
    centred = shifted.sub_(mean[:, None])
    variance = torch.linalg.vecdot(p.mul_(centred), centred) / total
    result[:, 2] = mean - log_total
    result[:, 3] = variance.clamp(min=0).sqrt()
    return result
