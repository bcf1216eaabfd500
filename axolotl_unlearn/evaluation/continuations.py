"""Log-probs of given continuations after given prompts: "how likely is this answer?"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.engine.token_scoring import Query, score_queries

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
        labelled = sum(label != IGNORE for label in row.answer)
        encoded.append((row.prompt, row.completion[:labelled]))
    return encoded


def continuation_logps(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    options: DataArgs | None = None,
    batch_tokens: int = 8192,
) -> list[NDArray[np.float64]]:
    """Log-prob of each token of each continuation, in the order of ``pairs``.

    Args:
        model: Causal language model in evaluation mode.
        options: How prompt and continuation are joined (``join``, ``template`` ...).
    """
    queries = [
        Query.of(prompt + answer, len(prompt))
        for prompt, answer in encode_pairs(tokenizer, pairs, options)
    ]
    facts = score_queries(model, queries, loss_only=True, batch_tokens=batch_tokens)
    return [np.asarray(fact.logp, dtype=float) for fact in facts]
