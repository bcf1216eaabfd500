"""Which rows a request is about; and what else in the training data says the same.

Rows are named by the user. Near-duplicates (MinHash, then rapidfuzz) and rows that mention the
names of the chosen rows are found and offered; nothing is taken that was not asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.near import near_rows, plain_text, strings
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.data.typed import Source, row_form, row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.normal_form import normal_form

#: The same for a name in a text, so that misspellings are found.
MISSPELT = 90
#: Names are searched in so many forms at most, the most frequent ones.
NAMES = 20
#: A "name" that so large a share of the other rows has is a phrase of the kind ("Social Security").
PHRASE = 0.1

_WORD = re.compile(r"\w+")
# Two capitalised words, overlapping: "Is Ada Quill here?" has "Is Ada" and "Ada Quill".
_NAME = re.compile(r"\b(?=([^\W\d_][\w'’-]+ (?:(?:de|van|von|af|al|el|bin) )?[^\W\d_][\w'’-]+))")


@dataclass(frozen=True)
class Wanted:
    """How the user names rows; a row that any of them names is chosen.

    All are compared in their normal form: one name has many (`normal_form`).

    Attributes:
        where: (field, value); a field of a nested object as ``meta.person``.
        contains: Parts of texts.
        rows: File of rows, equal to those of the training data.
        documents: Values of the field ``document`` or ``id``, or ids of rows by content.
    """

    where: Sequence[tuple[str, str]] = ()
    contains: Sequence[str] = ()
    rows: Path | None = None
    documents: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """What was asked for in words."""
        return [*self.contains, *(value for _, value in self.where)]

    def __str__(self) -> str:
        parts = [f"--where {name}={value}" for name, value in self.where]
        parts += [f"--contains {text}" for text in self.contains]
        parts += [f"--rows {self.rows}"] if self.rows else []
        return " ".join(
            parts + ([f"--documents {','.join(self.documents)}"] * bool(self.documents))
        )


@dataclass(frozen=True)
class Offered:
    """What else says the same.

    Attributes:
        near: Id of a row that stays -> id of the chosen row that it resembles.
        mentions: Name -> ids of rows that stay and mention it.
    """

    near: dict[str, str] = field(default_factory=dict)
    mentions: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ids(self) -> set[str]:
        return {*self.near, *(name for ids in self.mentions.values() for name in ids)}


@dataclass(frozen=True)
class Chosen:
    """
    Attributes:
        rows: In the order of the data.
        other_forms: Ids of those that are written in other characters than what was asked for.
    """

    rows: list[Source]
    other_forms: set[str]


def choose(rows: Sequence[Source], wanted: Wanted) -> Chosen:
    """The rows that are named.

    Raises:
        UnlearnError: Nothing is named, a name fits no row, or all rows are named.
    """
    if not (wanted.where or wanted.contains or wanted.rows or wanted.documents):
        raise UnlearnError(
            "say which rows to delete: --where FIELD=VALUE, --contains TEXT, --rows FILE or "
            "--documents IDS."
        )
    chosen: set[str] = set()
    exact: set[str] = set()
    for name, value in wanted.where:
        fields = {str(key) for row in rows for key in row.row}
        values = {row.id: _values(row.row, name.split(".")) for row in rows}
        plain = normal_form(value)
        found = {i for i, all_of in values.items() if plain in map(normal_form, all_of)}
        if not found:
            known = (
                "" if name.split(".")[0] in fields else f"; rows have {', '.join(sorted(fields))}"
            )
            raise UnlearnError(f"--where {name}={value} fits none of {len(rows)} rows{known}.")
        chosen |= found
        exact |= {i for i in found if value in values[i]}
    for text in wanted.contains:
        plain = normal_form(text)
        found = {
            row.id for row in rows if any(plain in normal_form(part) for part in strings(row.row))
        }
        if not found or not plain.strip():
            raise UnlearnError(f"--contains: none of {len(rows)} rows has this text.")
        chosen |= found
        exact |= {row.id for row in rows if any(text in part for part in strings(row.row))}
    if wanted.rows:
        forms: dict[str, set[str]] = {}
        for row in rows:
            forms.setdefault(row_form(row.row), set()).add(row.id)
        asked = [(place, row_form(row), row_id(row)) for place, row in read_rows(wanted.rows)]
        strange = [place for place, form, _ in asked if form not in forms]
        if strange:
            raise UnlearnError(
                f"{wanted.rows}, {strange[0]}: {len(strange)} of {len(asked)} rows are not in the "
                "training data; give them as they stand there."
            )
        chosen |= {name for _, form, _ in asked for name in forms[form]}
        exact |= {name for *_, name in asked}
    for name in wanted.documents:
        names = {
            row.id: (row.id, str(row.row.get("document")), str(row.row.get("id"))) for row in rows
        }
        plain = normal_form(name)
        found = {i for i, all_of in names.items() if plain in map(normal_form, all_of)}
        if not found:
            raise UnlearnError(
                f"--documents: no row has {name!r} as `document`, `id` or id by content."
            )
        chosen |= found
        exact |= {i for i in found if name in names[i]}
    if len(chosen) == len(rows):
        raise UnlearnError(
            f"all {len(rows)} rows of the training data are chosen; nothing would be kept: "
            "train again without them, or choose fewer."
        )
    return Chosen([row for row in rows if row.id in chosen], chosen - exact)


def _values(value: Any, way: Sequence[str]) -> list[str]:
    """What stands at a field, as texts; several for a list."""
    if isinstance(value, (list, tuple)):
        return [found for part in value for found in _values(part, way)]
    if way:
        return _values(value.get(way[0]), way[1:]) if isinstance(value, Mapping) else []
    return [] if value is None or isinstance(value, Mapping) else [str(value)]


def offer(chosen: Sequence[Source], others: Sequence[Source], wanted: Wanted) -> Offered:
    """Near-duplicates of the chosen rows, and mentions of their names, among the others."""
    return Offered(near_rows(chosen, others), _mentions(chosen, others, wanted))


def names_of(chosen: Sequence[Source], wanted: Wanted) -> list[str]:
    """What the chosen rows are about: texts that were asked for, and names in several of them."""
    asked = [re.sub(r"[-_]+", " ", text) for text in wanted.texts]
    seen = Counter(
        name
        for row in chosen
        for name in {n for t in strings(row.row) for n in _NAME.findall(normal_form(t, fold=False))}
        if name[0].isupper() and name.split()[-1][0].isupper()
    )
    least = max(2, len(chosen) // 4)
    often = [name for name, count in seen.most_common(NAMES) if count >= least]
    known = [text for text in asked if len(text) >= 4 and not text.isdigit()]
    # The same name in other letters is searched once.
    return list({normal_form(name): name for name in [*known, *often]}.values())


def _mentions(
    chosen: Sequence[Source], others: Sequence[Source], wanted: Wanted
) -> dict[str, list[str]]:
    from rapidfuzz import fuzz

    found: dict[str, list[str]] = {}
    plain = [(row.id, plain_text(row)) for row in others]
    for name in names_of(chosen, wanted):
        low = " ".join(_WORD.findall(normal_form(name)))
        ids = [
            row for row, text in plain if low and (
                low in text or fuzz.partial_ratio(low, text, score_cutoff=MISSPELT) > 0
            )
        ]  # fmt: skip
        asked = any(low in re.sub(r"[\W_]+", " ", normal_form(text)) for text in wanted.texts)
        if ids and (asked or len(ids) <= max(3, PHRASE * len(others))):
            found[name] = ids
    return found
