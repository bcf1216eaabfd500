"""Rows that are measured: documents, and fields of evaluation files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from axolotl_unlearn.config import FieldArgs
from axolotl_unlearn.data.records import (
    document_name,
    document_of,
    nearest,
    own_id,
    read_rows,
    require_filled,
    require_unicode,
    text_of,
)
from axolotl_unlearn.errors import UnlearnError

#: Fields of a prompt and what follows it.
PAIRS = (("input", "output"), ("question", "answer"))


class Answer(str):
    """A document with what its row says of it.

    Attributes:
        prompt: What it is read after, of which nothing is asked: it is a chat model's answer.
        author: Whose it is: texts of one author are no independent texts.
    """

    prompt: str = ""
    author: str = ""

    def __new__(cls, text: str, prompt: str = "", author: str = "") -> Answer:
        made = super().__new__(cls, text)
        made.prompt, made.author = prompt, author
        return made

    def __getnewargs__(self) -> tuple[str, str, str]:
        return str(self), self.prompt, self.author


def with_prompt(text: str) -> str:
    """A document after its prompt: equal answers to two questions are two documents."""
    return getattr(text, "prompt", "") + text


def author_of(text: str) -> str:
    """The author of a document of `read_documents`; "" where its row names none."""
    return getattr(text, "author", "")


def read_documents(path: str | os.PathLike[str], *, join: str = " ") -> list[tuple[str, str]]:
    """Documents for membership inference, as (id, text).

    The text is the field ``document``, else ``text``, else ``input`` + ``join`` + ``output`` (or
    ``question`` and ``answer``). With a field ``prompt`` or ``author`` it is an `Answer`.
    Rows without an id get ``row0``, ``row1`` ...

    Raises:
        UnlearnError: The first fault of the file.
    """
    documents, places = [], {}
    rows = list(read_rows(path))
    if not rows:
        raise UnlearnError(
            f"{path} has no rows; it needs at least one document.", code="data.no-rows"
        )
    for number, (place, row) in enumerate(rows):
        where = f"{path}, {place}"
        name = next((n for n in ("document", "text") if n in row), None)
        pair = next((p for p in PAIRS if p[0] in row and p[1] in row), None)
        if pair and name == "document" and document_name(row[name]):
            raise UnlearnError(
                f"{where}: 'document' is read as the text here and holds a name beside {pair[0]!r} "
                f"and {pair[1]!r}; put the whole text there, or remove the field.",
                code="data.document-name",
            )
        if name is not None:
            text = require_text(row, name, where)
        elif pair:
            fields = FieldArgs(input=pair[0], output=pair[1])
            before, text = (text_of(row, key, fields, where) for key in ("input", "output"))
            text = before + join + text if before else text
        else:
            raise UnlearnError(
                f"{where}: there is no field 'document'{nearest('document', row)}; a document "
                "needs 'document', 'text', or 'input' and 'output'.",
                code="data.field-missing",
            )
        require_filled(text, name or "output", where)
        known = text_of(row, "id", FieldArgs(), where, True) if "id" in row else f"row{number}"
        own_id(places, known, str(path), place)
        prompt = "" if row.get("prompt") is None else row["prompt"]
        require_unicode(prompt, "prompt", where)  # turns of a chat would not be read
        author = document_of(row.get("author"))
        documents.append((known, Answer(text, prompt, author) if prompt or author else text))
    return documents


def require_texts(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    """The texts of a field; one text that stands there without a list counts as one.

    Raises:
        UnlearnError: It is missing, or one of them is no text (a number, null) or empty.
    """
    value = row.get(field)
    texts = [value] if isinstance(value, str) else value
    if field not in row:
        raise UnlearnError(
            f"{where}: field {field!r} is missing{nearest(field, row)}; add it.",
            code="data.field-missing",
        )
    if not isinstance(texts, (list, tuple)) or not texts:
        raise UnlearnError(
            f"{where}: field {field!r} must be a list of texts, at least one.",
            code="data.field-type",
        )
    for text in texts:
        require_unicode(text, field, where)
        require_filled(text, field, where)
    return list(texts)


def require_text(row: Mapping[str, Any], field: str, where: str) -> str:
    """The one text of a field; raises as `require_texts`."""
    return require_texts({**row, field: [row[field]]} if field in row else row, field, where)[0]
