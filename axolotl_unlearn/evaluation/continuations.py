"""Log-probs of given continuations after given prompts: "how likely is this answer?"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.engine.token_scoring import Query, TokenFacts, score_queries
from axolotl_unlearn.errors import UnlearnError

#: A prompt and what follows it.
Pair = tuple[str, str]


def encode_pairs(
    tokenizer: Any, pairs: Sequence[Pair], join: str = " "
) -> list[tuple[list[int], list[int]]]:
    """Token ids (prompt, continuation) as training would see them, without EOS.

    Raises:
        UnlearnError: for a continuation without tokens, or a pair without any prompt token.
    """
    encoder = Encoder(tokenizer, DataArgs(join=join, eos=False), max_length=2**31)
    encoded = []
    for number, (prompt, answer) in enumerate(pairs):
        row = encoder.encode(Record(id=f"row{number}", input=prompt, output=answer))
        if not row.completion or not row.prompt:
            raise UnlearnError(
                f"pair {number + 1} has no tokens to predict or none to predict from, as where a "
                "prompt is empty and the tokenizer begins with no token; text without a prompt "
                "belongs into member.jsonl.",
                code="eval.no-tokens",
            )
        labelled = sum(label != IGNORE for label in row.answer)
        encoded.append((row.prompt, row.completion[:labelled]))
    return encoded


def score_pairs(
    model: Any, tokenizer: Any, pairs: Sequence[Pair], join: str = " ", **options: Any
) -> list[TokenFacts]:
    """Facts of each continuation, in the order of ``pairs``; ``options``: of `score_queries`.

    Args:
        model: Causal language model in evaluation mode.
    """
    encoded = encode_pairs(tokenizer, pairs, join)
    asked = [Query.of([*prompt, *answer], len(prompt)) for prompt, answer in encoded]
    return score_queries(model, asked, **options)
