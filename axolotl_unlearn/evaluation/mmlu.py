"""Four-option questions for utility: MMLU's own files, or a data folder's ``general``."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from axolotl_unlearn.data.records import read_rows, read_text
from axolotl_unlearn.errors import UnlearnError

LETTERS = ("A", "B", "C", "D")


@dataclass(frozen=True)
class Option:
    """A question with options; the option with the highest log-probability is the answer given.

    Attributes:
        continuations: the texts whose log-probability after `context` is compared.
        subject: of MMLU, or the group that a data folder's question names.
    """

    id: str
    context: str
    continuations: tuple[str, ...]
    answer: int
    subject: str = ""


def read_options(path: str | os.PathLike[str]) -> list[Option]:
    """Four-option questions: question, choices (texts), answer (0-based index), perhaps a group.

    The options' texts are compared, ``question + " " + option``, not letters.
    """
    options = []
    for place, row in read_rows(path):
        where = f"{path}, {place}"
        question, choices, answer = (row.get(k) for k in ("question", "choices", "answer"))
        if not isinstance(question, str) or not question.strip():
            raise UnlearnError(f"{where}: field 'question' must be a text that is not empty.")
        texts = isinstance(choices, list) and all(isinstance(c, str) and c.strip() for c in choices)
        if not texts or len(choices) < 2:
            raise UnlearnError(f"{where}: field 'choices' must be a list of two or more texts.")
        if len(set(choices)) != len(choices):
            raise UnlearnError(f"{where}: two of the 'choices' are the same; make them differ.")
        if isinstance(answer, bool) or not isinstance(answer, int):
            raise UnlearnError(f"{where}: field 'answer' must be the number of a choice, from 0.")
        if not 0 <= answer < len(choices):
            says = f"but the choices are numbered 0 to {len(choices) - 1}"
            raise UnlearnError(f"{where}: 'answer' is {answer} {says}.")
        name, group = str(row.get("id", f"row{len(options)}")), str(row.get("group", ""))
        texts = tuple(f" {choice.strip()}" for choice in choices)
        options.append(Option(name, question.strip(), texts, answer, group))
    if not options:
        raise UnlearnError(f"{path} has no rows; remove it or fill it.")
    return options


def read_mmlu(folder: Path, shots: int = 0) -> list[Option]:
    """MMLU (arXiv 2009.03300) from its CSV files, ``dev/<subject>_dev.csv`` and ``test/``.

    The prompt is the paper's: a line with the subject, `shots` solved examples of ``dev``, the
    question with its options, ``Answer:``; the letters' probabilities are compared.
    """
    files = sorted((folder / "test").glob("*_test.csv"))
    if not files:
        raise UnlearnError(
            f"{folder} holds no test/<subject>_test.csv; MMLU is read in its original layout "
            "(folders dev and test with one CSV file a subject), or as general.jsonl."
        )
    options, letters = [], tuple(f" {letter}" for letter in LETTERS)
    for path in files:
        subject = path.name.removesuffix("_test.csv")
        title = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {title}.\n\n"
        if shots:
            dev = folder / "dev" / f"{subject}_dev.csv"
            if not dev.is_file():
                raise UnlearnError(f"{dev} does not exist; {shots} solved examples need it.")
            solved = list(_mmlu_rows(dev))[:shots]
            if len(solved) < shots:
                raise UnlearnError(f"{dev} has {len(solved)} rows but mmlu_shots is {shots}.")
            head += "".join(f"{_mmlu_question(row)} {row[5].strip()}\n\n" for row in solved)
        for number, row in enumerate(_mmlu_rows(path)):
            answer, text = LETTERS.index(row[5].strip()), head + _mmlu_question(row)
            options.append(Option(f"{subject}/{number}", text, letters, answer, subject))
    return options


def _mmlu_rows(path: Path) -> Iterator[list[str]]:
    # "NA" and the like stay the texts that they are.
    rows = csv.reader(io.StringIO(read_text(path), newline=""))
    for number, row in enumerate(rows, start=1):
        if len(row) != 6 or row[5].strip() not in LETTERS:
            raise UnlearnError(
                f"{path}, row {number}: expected question, four options and a letter A to D."
            )
        yield row


def _mmlu_question(row: Sequence[str]) -> str:
    lines = [row[0].strip()]
    lines += [f"{letter}. {text}" for letter, text in zip(LETTERS, row[1:5], strict=True)]
    return "\n".join([*lines, "Answer:"])
