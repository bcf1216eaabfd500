"""A file of subjects: one request, one training, a record for each of them (`pages.subjects`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from axolotl_unlearn.data.records import SUFFIXES, read_rows, read_text
from axolotl_unlearn.data.typed import Source
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.choose import Wanted, choose

#: Keys of a line that name rows -> the part of `Wanted`.
_KEYS = {
    "person": "people",
    "contains": "contains",
    "matches": "patterns",
    "documents": "documents",
}


@dataclass(frozen=True)
class Subject:
    """Who asked, under a name that says nothing, and for which rows."""

    name: str
    wanted: Wanted


def read_subjects(path: Path) -> list[Subject]:
    """Lines ``{"subject": "T-17", "person": "Ada Quill"}`` of a file of rows, or names, one a line.

    Keys beside ``subject`` are the options of `request new`: ``person``, ``contains``, ``matches``,
    ``documents`` (a text or a list) and ``where`` (an object). Of a file of names the subjects are
    called by their line: 001, 002.

    Raises:
        UnlearnError: A line names nothing, has another key, or a subject occurs twice.
    """
    if path.suffix in SUFFIXES:
        rows = list(read_rows(path))
    else:
        lines = enumerate(read_text(path).split("\n"), start=1)
        named = ((n, line.strip()) for n, line in lines if line.strip())
        rows = [(f"line {n}", {"subject": f"{n:03}", "person": name}) for n, name in named]
    subjects: dict[str, Subject] = {}
    for place, row in rows:
        name = str(row.get("subject") or "")
        strange = sorted(set(row) - {"subject", "where", *_KEYS})
        if not name or Path(name).name != name or not name.isprintable() or name in subjects:
            raise UnlearnError(
                f"{path}, {place}: `subject` is missing, not a plain name, or that of another "
                "line; give each subject a name of its own, such as a number."
            )
        if strange or len(row) < 2:
            raise UnlearnError(
                f"{path}, {place}: `{strange[0] if strange else 'subject'}` alone names no rows; "
                "use person, where, contains, matches or documents."
            )
        parts = {"where": [(k, str(v)) for k, v in dict(row.get("where") or {}).items()]}
        for key, part in _KEYS.items():
            several = row[key] if isinstance(row.get(key), list) else [row.get(key)]
            parts[part] = [str(one) for one in several if one is not None]
        subjects[name] = Subject(name, Wanted(**parts))
    if not subjects:
        raise UnlearnError(f"{path} has no subjects; write one a line.")
    return list(subjects.values())


def together(subjects: Sequence[Subject]) -> Wanted:
    """What they ask for as one."""
    parts = ("where", *_KEYS.values())
    return Wanted(**{p: [one for s in subjects for one in getattr(s.wanted, p)] for p in parts})


def shares(subjects: Sequence[Subject], rows: Sequence[Source]) -> dict[str, list[str]]:
    """Ids of the rows of each subject.

    Raises:
        UnlearnError: A subject has no row.
    """
    ids = {}
    for one in subjects:
        try:
            ids[one.name] = [row.id for row in choose(rows, one.wanted).rows]
        except UnlearnError as error:
            raise UnlearnError(f"subject {one.name}: {error}") from None
    return ids
