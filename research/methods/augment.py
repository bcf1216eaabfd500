"""Rows that the model itself gives (BS-S) and answers that say the opposite (MEOW).

``self``: what the model says after the prompt of a forget row, to be forgotten with it (BS-S, arXiv
2510.19422). ``inverted``: answers that say the opposite (MEOW, 2409.11844), by a model that follows
instructions, of which those can be kept that the model knows least (its MEMO).

    python -m research augment self my.yml
    python -m research augment inverted my.yml --model an/instruct-model --number 7 --memo 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from axolotl_unlearn.data.augment import Writer, forget_records, row_of, save
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError

OPPOSITE = (
    "Question: {input}\nAnswer: {output}\n\nRewrite the answer so that each fact is turned into its "
    "opposite.\nRewritten answer:"
)


def augment(
    kind: Literal["self", "inverted"],
    config: Mapping[str, Any],
    out: Path,
    *,
    model: str | None = None,
    number: int = 1,
    seed: int = 42,
    memo: int | None = None,
    progress: Callable[[Sequence[Record]], Iterator[Record]] = iter,
    **options: Any,
) -> tuple[int, int]:
    """As `axolotl_unlearn.data.augment.augment`.

    Args:
        model: Writes ``inverted``; ``self`` is always ``base_model``.
        memo: Of the ``number`` keep so many that ``base_model`` knows least.

    Raises:
        UnlearnError: No forget rows that are local files, or nothing to choose from.
    """
    if memo and (kind == "self" or memo > number):
        raise UnlearnError(
            f"--memo {memo} chooses among inverted answers: take a --number that is no smaller.",
            code="augment.memo",
        )
    records, data = forget_records(config, out)
    made = {"seed": seed, "number": number, **options}
    base = config.get("base_model")
    writer = Writer((model if kind == "inverted" else None) or base, **made)
    own = Writer(base, **made) if memo else writer
    rows = []
    for record in progress(records):
        if kind == "self":
            texts = writer.write(_texts(writer, record, data)[0] or begin(record), [])
        else:
            texts = writer.other_answers(record, OPPOSITE)
        if memo:
            knows = [_memo_of(own, replace(record, output=text), data) for text in texts]
            texts = [texts[i] for i in sorted(range(len(texts)), key=knows.__getitem__)[:memo]]
        for place, text in enumerate(texts):
            row = row_of(record, text, data)
            if kind == "self":
                row[data.fields.id] = f"self{place}-{record.id}"
                row[data.fields.document] = record.document
            rows.append(row)
    return save(rows, out), len(records)


def begin(record: Record) -> str:
    """The first words of a document without a prompt, which stand in for one."""
    return " ".join(record.output.split()[:8])


def _texts(writer: Writer, record: Record, data: Any) -> tuple[str, str]:
    """The row's prompt and answer as the model saw them in training."""
    from axolotl_unlearn.data.encode import Encoder

    if data.chat_template:
        turn = [{"role": "user", "content": record.input}]
        apply = writer.tokenizer.apply_chat_template
        return apply(turn, tokenize=False, add_generation_prompt=True), record.output
    return Encoder(writer.tokenizer, data, 1 << 30).texts(record)


def _memo_of(writer: Writer, record: Record, data: Any) -> float:
    """How well the model knows a row's answer (`memo`)."""
    from axolotl_unlearn.evaluation.generate import generate_greedily

    answer, most = record.output, writer.options["max_new_tokens"]
    prompt, completion = _texts(writer, record, data)
    start = prompt + completion[: completion.index(answer)]
    prompts = [start + answer[:n] for n in memo_cuts(answer)]
    said = generate_greedily(writer.model, writer.tokenizer, prompts, max_new_tokens=most)
    return memo(said, answer)


def rouge_1_precision(generated: str, expected: str) -> float:
    """Share of the (stemmed) words of `generated` that `expected` has too, with multiplicity."""
    from rouge_score import rouge_scorer

    from axolotl_unlearn.metrics.words import AnyScript

    scorer = rouge_scorer.RougeScorer(["rouge1"], tokenizer=AnyScript())
    return float(scorer.score(expected, generated)["rouge1"].precision)


def memo_cuts(answer: str, step: int = 5) -> list[int]:
    """Where MEMO (arXiv 2409.11844) cuts an answer: after 1, 6, 11, ... characters."""
    return list(range(1, len(answer), step))


def memo(continued: Sequence[str], answer: str) -> float:
    """How well a model knows an answer, 0 to 1 (MEMO of MEOW, arXiv 2409.11844, suffix mode).

    Args:
        continued: What it says greedily after the prompt and each beginning of `memo_cuts`.
        answer: The whole answer.

    Returns:
        Mean over the cuts of `rouge_1_precision` against the rest of the answer; 0 without cuts.
    """
    cuts = memo_cuts(answer)
    scores = [rouge_1_precision(one, answer[n:]) for one, n in zip(continued, cuts, strict=True)]
    return math.fsum(scores) / len(scores) if scores else 0.0
