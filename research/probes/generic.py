"""General knowledge outside the forget set: did unlearning damage what looks like it?

The questions have the patterns of the forget questions of LUME (who founded, where was ... born,
what is the ... address of) but ask for things that every educated reader knows. ZJUKLAB's model
fell from 0.88 to 0.35 on such a list (arXiv 2503.21088, section 6.1); theirs is unpublished, this
one is our own. Each item has accepted answers for free generation and three wrong options for the
four-option form; files in the manner of TOFU (question, answer, perturbed_answer) serve as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.continuations import continuation_logps
from axolotl_unlearn.metrics.intervals import Mean, mean_interval, paired_difference
from axolotl_unlearn.metrics.words import fold

#: What is measured, as keys of an item's result.
MEASURES = ("generation", "option", "probability")
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        answers: Accepted answers; the first one is the right option of the four-option form.
        distractors: Wrong options.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    distractors: tuple[str, ...]
    category: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        return (self.answers[0], *self.distractors)


def builtin_items() -> list[Item]:
    """Our own questions."""
    return read_items(Path(__file__).with_name("generic_questions.jsonl"))


def read_items(path: str | os.PathLike[str]) -> list[Item]:
    """Questions of a file (.jsonl, .json, .parquet).

    A row has ``question`` and either ``answers`` (list) or ``answer`` (text), and wrong options
    in ``distractors`` or, as in TOFU, ``perturbed_answer``. Ids and categories are optional.

    Raises:
        UnlearnError: Names the first row that lacks something.
    """
    items: list[Item] = []
    for number, (place, row) in enumerate(read_rows(Path(path))):
        where = f"{path}, {place}"
        question = row.get("question")
        answers = row.get("answers", row.get("answer"))
        wrong = row.get("distractors", row.get("perturbed_answer"))
        answers = [answers] if isinstance(answers, str) else answers
        wrong = [wrong] if isinstance(wrong, str) else wrong
        if not isinstance(question, str) or not question.strip():
            raise UnlearnError(f"{where}: field 'question' must be a text that is not empty.")
        for name, texts in (("answers", answers), ("distractors", wrong)):
            if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
                other = {"answers": "answer", "distractors": "perturbed_answer"}[name]
                raise UnlearnError(
                    f"{where}: field {name!r} (or {other!r}) must be a list of texts, none empty."
                )
        folded = {fold(answer) for answer in answers}
        same = [option for option in wrong if fold(option) in folded]
        if same:
            raise UnlearnError(
                f"{where}: a wrong option is among the accepted answers; change one of them."
            )
        items.append(
            Item(
                id=str(row.get("id", f"row{number}")),
                question=question.strip(),
                answers=tuple(a.strip() for a in answers),
                distractors=tuple(w.strip() for w in wrong),
                category=str(row.get("category", "")),
            )
        )
    if not items:
        raise UnlearnError(f"{path} has no rows; it needs at least one question.")
    if len({item.id for item in items}) < len(items):
        raise UnlearnError(f"{path}: two rows have the same id; give every question its own.")
    return items


def outside(items: Sequence[Item], texts: Sequence[str]) -> list[Item]:
    """Items that no text gives away: none holds an accepted answer and a name of the question.

    Args:
        texts: Documents of the forget set.
    """
    documents = [f" {fold(text)} " for text in texts]

    def told(item: Item) -> bool:
        names = [n for n in _names(item.question) if len(n.split()) > 1 or len(n) > 3]
        answers = [a for a in map(fold, item.answers) if len(a) > 2]
        return any(
            any(f" {answer} " in text for answer in answers)
            and any(f" {name} " in text for name in names)
            for text in documents
        )

    return [item for item in items if not told(item)]


def _names(question: str) -> list[str]:
    """Runs of capitalised words after the first word, folded: "George Washington"."""
    rest = question.split(" ", 1)[-1]
    return [fold(m) for m in re.findall(r"[^\W\d_a-z]\w*(?:[ -][^\W\d_a-z]\w*)*", rest)]


def is_correct(generated: str, item: Item) -> bool:
    """Whether the first line names an accepted answer before any wrong option.

    Whole words count: "10" is not in "1066". A model that goes on after its answer is judged by
    what it says first.
    """
    line = next((line for line in generated.splitlines() if line.strip()), "")
    words = f" {fold(line)} "

    def first(options: Sequence[str]) -> int:
        places = [words.find(f" {fold(option)} ") for option in options if fold(option)]
        return min((place for place in places if place >= 0), default=len(words))

    # "Emily Brontë" must not be right because a wrong option "Emily" stands at the same place.
    return first(item.answers) < len(words) and first(item.answers) <= first(item.distractors)


def score_generic(
    model: Any, tokenizer: Any, items: Sequence[Item], batch_size: int = 32
) -> list[dict[str, Any]]:
    """Ask every question as it stands, freely and with options; one result a question.

    Four options: the option with the highest mean log-prob a token is the answer given;
    ``probability`` is that of the right one, ``p ** (1 / n)`` normalised over the options (TOFU,
    arXiv 2401.06121, section 2.2.1; chance 0.25).

    Args:
        model: Causal language model in evaluation mode.
        batch_size: Prompts that are generated from at once.
    """
    from axolotl_unlearn.evaluation.generate import generate_greedily

    pairs = [(item.question, option) for item in items for option in item.options]
    logps = iter(continuation_logps(model, tokenizer, pairs))
    asked = [item.question for item in items]
    said = generate_greedily(
        model, tokenizer, asked, max_new_tokens=MAX_NEW_TOKENS, batch_size=batch_size
    )
    rows: list[dict[str, Any]] = []
    for item, answer in zip(items, said, strict=True):
        means = np.array([next(logps).mean() for _ in item.options])
        share = np.exp(means - means.max())
        rows.append(
            {
                "id": item.id,
                "category": item.category,
                "option": float(means[0] > means[1:].max()),
                "probability": float(share[0] / share.sum()),
                "generation": float(is_correct(answer.text, item)),
            }
        )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the results of `score_generic`.

    Returns:
        ``n``; the mean of each of `MEASURES`, and ``intervals``; ``by_category`` means; ``items``.
    """
    report: dict[str, Any] = {"n": len(rows), "intervals": {}, "by_category": {}}
    ids = [row["id"] for row in rows]
    for measure in MEASURES:
        values = [row[measure] for row in rows]
        report[measure] = float(np.mean(values))
        report["intervals"][measure] = list(mean_interval(Mean(values, ids)))
    for category in sorted({row["category"] for row in rows} - {""}):
        group = [row for row in rows if row["category"] == category]
        report["by_category"][category] = {"n": len(group)} | {
            measure: float(np.mean([row[measure] for row in group])) for measure in MEASURES
        }
    report["items"] = [dict(row) for row in rows]
    return report


def drop(original: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How much lower a model scores than the original, over the questions both were asked.

    Args:
        original, model: As `summary` gives them.

    Returns:
        For each measure ``value`` (positive: lost), ``low``, ``high`` and ``p`` of the paired
        difference.

    Raises:
        UnlearnError: if they share no question.
    """
    before = {row["id"]: row for row in original["items"]}
    after = {row["id"]: row for row in model["items"]}
    ids = sorted(set(before) & set(after))
    if not ids:
        raise UnlearnError("the two models were asked no common question: evaluate both again.")
    found = {}
    for measure in MEASURES:
        values = [[rows[i][measure] for i in ids] for rows in (before, after)]
        gap = paired_difference(Mean(values[0], ids), Mean(values[1], ids))
        found[measure] = {"value": gap.value, "low": gap.low, "high": gap.high, "p": gap.p}
    return found
