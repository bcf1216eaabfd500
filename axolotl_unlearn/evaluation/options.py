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
        question, choices, answer = (row.get(k) for k in ("question", "choices", "answer"))
        texts = choices if isinstance(choices, list) else []
        texts = [one for one in texts if isinstance(one, str) and one.strip()]
        faults = {
            "field 'question' must be a text that is not empty":
                not isinstance(question, str) or not question.strip(),
            "field 'choices' must be a list of two or more texts, all different":
                len(set(texts)) < 2 or len(set(texts)) < len(choices),
            f"field 'answer' must be the number of a choice, from 0 to {len(texts) - 1}":
                type(answer) is not int or not 0 <= answer < len(texts),
        }  # fmt: skip
        if fault := next((says for says, is_so in faults.items() if is_so), None):
            raise UnlearnError(f"{path}, {place}: {fault}.", code="eval.bad-question")
        name, group = str(row.get("id", f"row{len(options)}")), str(row.get("group", ""))
        following = tuple(f" {choice.strip()}" for choice in texts)
        options.append(Option(name, question.strip(), following, answer, group))
    return options
