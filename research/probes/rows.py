"""What a model says token by token of rows' answers, and rows as tensors to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.engine.token_scoring import Query, score_queries
from axolotl_unlearn.evaluation.continuations import encode_pairs
from axolotl_unlearn.metrics.memorisation import TokenFacts


def answer_facts(model: Any, tokenizer: Any, records: Sequence[Record]) -> list[TokenFacts]:
    """Facts of each row's output after its input, without EOS."""
    pairs = encode_pairs(tokenizer, [(row.input, row.output) for row in records])
    return score_queries(model, [Query.of(before + said, len(before)) for before, said in pairs])


def labelled(tokenizer: Any, records: Sequence[Record]) -> list[tuple[list[int], list[int]]]:
    """Token ids of each row, and labels of its answer alone (-100 before it)."""
    pairs = encode_pairs(tokenizer, [(row.input, row.output) for row in records])
    return [(before + said, [-100] * len(before) + said) for before, said in pairs]
