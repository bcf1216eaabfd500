"""Questions with options, for utility: a data folder's ``general``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError


@dataclass(frozen=True)
class Option:
    """A question with options; the option with the highest log-probability is the answer given.

    Attributes:
        continuations: the texts whose log-probability after `context` is compared.
        subject: the group that the question names.
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
