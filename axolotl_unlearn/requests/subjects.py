"""A file of subjects: one request, one training, a record for each of them.

``subjects.json`` of a request says which rows are whose. ``subjects/NAME/record.json`` is the
record of the request without the rows of others; the record of the request binds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import SUFFIXES, read_rows, read_text
from axolotl_unlearn.data.typed import Source
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.choose import Wanted, choose
from axolotl_unlearn.requests.ledger import Ledger, canonical

SUBJECTS = "subjects.json"
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
    found: dict[str, Subject] = {}
    for place, row in rows:
        name = str(row.get("subject") or "")
        strange = sorted(set(row) - {"subject", "where", *_KEYS})
        if not name or Path(name).name != name or not name.isprintable() or name in found:
            raise UnlearnError(
                f"{path}, {place}: `subject` is missing, not a plain name, or that of another "
                "line; give each subject a name of its own, such as a number."
            )
        if strange or len(row) < 2:
            raise UnlearnError(
                f"{path}, {place}: `{strange[0] if strange else 'subject'}` alone names no rows; "
                "use person, where, contains, matches or documents."
            )
        where = [(key, str(value)) for key, value in dict(row.get("where") or {}).items()]
        parts = {part: _several(row.get(key)) for key, part in _KEYS.items()}
        found[name] = Subject(name, Wanted(where=where, **parts))
    if not found:
        raise UnlearnError(f"{path} has no subjects; write one a line.")
    return list(found.values())


def _several(value: Any) -> list[str]:
    return [str(one) for one in (value if isinstance(value, list) else [value]) if one is not None]


def together(subjects: Sequence[Subject]) -> Wanted:
    """What they ask for as one."""
    parts = ("where", *_KEYS.values())
    return Wanted(**{p: [one for s in subjects for one in getattr(s.wanted, p)] for p in parts})


def shares(subjects: Sequence[Subject], rows: Sequence[Source]) -> dict[str, list[str]]:
    """Ids of the rows of each subject.

    Raises:
        UnlearnError: A subject has no row.
    """
    found = {}
    for one in subjects:
        try:
            found[one.name] = [row.id for row in choose(rows, one.wanted).rows]
        except UnlearnError as error:
            raise UnlearnError(f"subject {one.name}: {error}") from None
    return found


def pages(folder: Path, statement: Mapping[str, Any]) -> dict[str, bytes]:
    """The records of a request's subjects and their pages, by name below its folder."""
    from axolotl_unlearn.requests.pages import page

    path = folder / SUBJECTS
    if not path.is_file():
        return {}
    ledger, found = Ledger(folder.parent), {}
    every = json.loads(path.read_text("utf-8"))
    for name, rows in every.items():
        mine = {ledger.keyed(row) for row in rows}
        whole = statement["predicate"]
        documents = [line for line in whole["documents"] if line["document"] in mine]
        counts = {"forget": len(rows), "documents": len(documents)}
        request = whole["request"] | {"subject": name, "counts": counts, "chosen": {}}
        limits = [
            *whole["limits"],
            f"The model was made for {len(every)} subjects together: verdict, attacks and times "
            "are those of all their rows.",
        ]
        own = {"request": request, "documents": documents, "limits": limits}
        rest = {key: value for key, value in whole.items() if key not in ("files", "data")}
        record = {**statement, "predicate": rest | {"data": {}} | own}
        found[f"subjects/{name}/record.json"] = canonical(record) + b"\n"
        found[f"subjects/{name}/REPORT.html"] = page(record).encode()
    return found
