"""Which rows a request is about; and what else in the training data may be about the same.

Rows are named by the user. Near-duplicates (MinHash, then rapidfuzz) and rows that mention the
names of the chosen rows are found and offered with a reason each; nothing is taken that was not
asked for (`requests.names`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.near import near_texts, plain_text
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.data.typed import Source, row_form, row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.normal_form import normal_form, words
from axolotl_unlearn.requests.names import WEAK, Corpus, fold, readings
from axolotl_unlearn.requests.request import fault, one_line
from axolotl_unlearn.requests.search import leaves, said

#: Names are searched in so many forms at most, the most frequent ones.
NAMES = 20
#: A "name" that so large a share of the other rows has is a phrase of the kind ("Social Security").
PHRASE = 0.1

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
        people: Names, whole or last name first, in any text of any dataset.
    """

    where: Sequence[tuple[str, str]] = ()
    contains: Sequence[str] = ()
    rows: Path | None = None
    documents: Sequence[str] = ()
    people: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """What was asked for in words."""
        return [*self.people, *self.contains, *(value for _, value in self.where)]


@dataclass(frozen=True)
class Offered:
    """What else says the same.

    Attributes:
        near: Id of a row that stays -> id of the chosen row that it resembles.
        mentions: Name -> ids of rows that stay and likely mention it.
        hints: Name -> ids of rows that stay and may be about another: its last name alone, ...
        reasons: Id -> why it is offered, without a name.
        passages: Id -> where the name stands, for mentions and hints.
        frequent: Name -> number of rows, where so many have it that it is rather a phrase of the
            kind ("Social Security"): counted, not offered.
        fields: ``FIELD=VALUE`` of other fields that hold what `--where` asked for -> rows.
    """

    near: dict[str, str] = field(default_factory=dict)
    mentions: dict[str, list[str]] = field(default_factory=dict)
    hints: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    passages: dict[str, list[str]] = field(default_factory=dict)
    frequent: dict[str, int] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)

    @property
    def ids(self) -> set[str]:
        """Of all rows that are offered."""
        named = (*self.mentions.values(), *self.hints.values())
        return {*self.near, *(row for ids in named for row in ids)}


def require(wanted: Wanted) -> None:
    """Raises `UnlearnError`: nothing is named."""
    parts = (wanted.where, wanted.contains, wanted.documents, wanted.people)
    if not (wanted.rows or any(map(any, parts))):
        ways = "--person NAME, --where FIELD=VALUE, --contains TEXT, --rows FILE or --documents IDS"
        raise fault("choose.nothing-named", f"say which rows to delete: {ways}.")


def choose(rows: Sequence[Source], wanted: Wanted, corpus: Corpus | None = None) -> list[Source]:
    """The rows that are named, and their copies in other characters, in the order of the data.

    Args:
        corpus: The rows' texts, where they are read already.

    Raises:
        UnlearnError: Nothing is named, a name fits no row, or all rows are named.
    """
    require(wanted)
    chosen: set[str] = set()
    for ids, nothing in _named_by(rows, wanted, corpus):
        if not ids:
            raise UnlearnError(nothing, code="choose.no-row")
        chosen |= ids
    forms = {row.form for row in rows if row.id in chosen}
    chosen = {row.id for row in rows if row.form in forms}
    if len(chosen) == len(rows):
        says = f"all {len(rows)} rows of the training data are chosen"
        cure = "nothing would be kept: train again without them, or choose fewer"
        raise fault("choose.every-row", f"{says}; {cure}.")
    return [row for row in rows if row.id in chosen]


def _named_by(
    rows: Sequence[Source], wanted: Wanted, corpus: Corpus | None
) -> Iterator[tuple[set[str], str]]:
    """Of each thing that was asked for: ids of the rows that it names, and the sentence where there
    is none. Values are read once, however many are asked for."""
    none = f"none of {len(rows)} rows"

    def having(values: Callable[[Source], Sequence[str]]) -> dict[Any, set[str]]:
        found: dict[Any, set[str]] = defaultdict(set)
        for row in rows:
            for key in (key for one in values(row) for key in _keys(one)):
                found[key].add(row.id)
        return found

    def equal(asked: str, found: Mapping[Any, set[str]]) -> set[str]:
        return set().union(*(found.get(key, ()) for key in _keys(asked)))

    ways = {name: name.split(".") for name, _ in wanted.where}
    held = {n: having(lambda row, way=way: values_at(row.row, way)) for n, way in ways.items()}
    fields = sorted({str(key) for row in rows for key in row.row})
    for name, value in wanted.where:
        cure = f"rows have {', '.join(fields)}"
        if ways[name][0] in fields:
            cure = "--person NAME looks into their texts"
        yield equal(value, held[name]), f"--where {name}={value}: {none} fits; {cure}."
    texts = rows if wanted.contains else ()
    every = [
        (row.id, [normal_form(one) for _, t in said(row.row) for one in readings(str(t))])
        for row in texts
    ]
    for text in map(normal_form, wanted.contains):
        told = {name for name, own in every if text.strip() and any(text in one for one in own)}
        yield told, f"--contains: {none} has this text."
    if wanted.rows:
        # By content, too: as Arrow hands it on, a 1 is 1.0 where another row has 0.5.
        known = {name for row in rows for name in (row.id, row.form)}
        asked = list(read_rows(wanted.rows))
        given = [(place, {row_id(row), row_form(row)}) for place, row in asked]
        if strange := [place for place, own in given if known.isdisjoint(own)]:
            says = f"{len(strange)} of {len(asked)} rows are not in the training data"
            where, cure = f"{wanted.rows}, {strange[0]}", "give them as they stand there"
            raise fault("choose.strange-row", f"{where}: {says}; {cure}.")
        names = {one for _, own in given for one in own}
        found = {row.id for row in rows if row.id in names or row.form in names}
        yield found, f"--rows {wanted.rows} has no rows; name others."
    names = having(lambda row: [
        row.id, *values_at(row.row, ["document"]), *values_at(row.row, ["id"])
    ]) if wanted.documents else {}  # fmt: skip
    for name in wanted.documents:
        nothing = f"--documents: {none} has {name!r} as document, id or content."
        yield equal(name, names), nothing
    if corpus is None:
        corpus = corpus_of(rows if wanted.people else ())
    for name in wanted.people:
        hits, nothing = corpus.find(name), f"--person: {none} has this name; {_CURE}."
        if hits:
            how = ", ".join(sorted({hit.how for hit in hits.values()}))
            nothing = (
                f"--person: {none} surely has this name; {len(hits)} may be about it ({how}): "
                "name them with --contains or --documents."
            )
        yield {row.id for row in rows if row.id in hits and hits[row.id].sure}, nothing


#: Of a name that is not found.
_CURE = "check its spelling, or look with --contains (a part of it)"


def values_at(value: Any, way: Sequence[str]) -> list[str]:
    """What stands at a field (``meta.person`` is a way of two), as texts; several for a list."""
    if isinstance(value, (list, tuple)):
        return [text for part in value for text in values_at(part, way)]
    if isinstance(value, Mapping):  # a table made of nested rows has the way as one name
        return [text for n in range(1, len(way) + 1)
                for text in values_at(value.get(".".join(way[:n])), way[n:])]  # fmt: skip
    return [] if value is None or way else [str(value)]


def offer(
    chosen: Sequence[Source], others: Sequence[Source], wanted: Wanted, read: dict | None = None
) -> Offered:
    """What else among the others may be about the same: near-duplicates of the chosen rows, other
    ways to write the names that were asked for or that stand in the chosen rows, and the value of
    ``--where`` in other fields; ``read`` as of `Corpus`."""
    near = near_texts(*({row.id: plain_text(row.row) for row in s} for s in (chosen, others)))
    offered = Offered(
        near, reasons={row: [f"nearly the same as {like}"] for row, like in near.items()}
    )
    most, asked = max(3, PHRASE * len(others)), set(map(normal_form, wanted.texts))
    corpus = corpus_of(others, read)
    for name in names_of(chosen, wanted):
        hits = corpus.find(name)
        weak = {row: hits[row] for row in hits if hits[row].how in WEAK}
        sure = {row: hits[row] for row in hits if row not in weak}
        if normal_form(name) not in asked and len(sure) > most:
            offered.frequent[repr(name)] = len(sure)
            continue
        if sure:
            offered.mentions[name] = [*sure]
        if name in wanted.people and weak:
            if len(weak) > most:
                offered.frequent[f"{name!r} (its last name, or small letters)"] = len(weak)
            else:
                offered.hints[name], sure = [*weak], hits
        for row, hit in sure.items():
            offered.reasons.setdefault(row, []).append(hit.how)
            offered.passages.setdefault(row, []).append(hit.passage)
    for _, value in wanted.where:
        held = Counter(
            other
            for row in others
            for other in {
                key
                for key, text in leaves(row.row)
                if _same(str(text), value) or _same(str(text).lstrip("0"), value)
            }
        )
        offered.fields.update({f"{other}={value}": count for other, count in held.items()})
    return offered


def corpus_of(rows: Sequence[Source], read: dict | None = None) -> Corpus:
    return Corpus(((row.id, _texts(row)) for row in rows), read)


def _texts(row: Source) -> Iterator[str]:
    return (text for _, text in said(row.row) if isinstance(text, str))


#: 1.777e3 is one and 1e+22; 12e4 may be an id.
_NUMBER = re.compile(r"\s*[-+]?(\d+(\.\d*)?|\d+\.\d*[eE][-+]?\d{1,9}|\d+[eE][-+]\d{1,9})\s*")


def _keys(text: str) -> Iterator[Any]:
    """Two texts are the same that share one: their normal form, or the number that they are: 1777,
    1777.0 and " 1777" are one, 01777 is an id."""
    yield normal_form(text)
    if _NUMBER.fullmatch(text) and not re.match(r"\s*[-+]?0\d", text):
        yield Decimal(text.strip())


def _same(one: str, other: str) -> bool:
    return not {*_keys(one)}.isdisjoint(_keys(other))


def names_of(chosen: Sequence[Source], wanted: Wanted) -> list[str]:
    """What the chosen rows are about: texts that were asked for, and names in several of them (in
    the one, if it is one): two words with capitals, the first of which is no word elsewhere."""
    asked = [re.sub(r"[-_]+", " ", text) for text in wanted.texts]
    texts = [[normal_form(t, fold=False) for t in _texts(row)] for row in chosen]
    seen = Counter(
        name
        for row in texts
        for name in {n for t in row for n in _NAME.findall(t)}
        if name[0].isupper() and name.split()[-1][0].isupper()
    )
    cased = [t for row in texts for t in row if t != t.lower()]
    small = {word for t in cased for word in re.findall(r"\w+", t) if word.islower()}
    least = min(len(chosen), max(2, len(chosen) // 4))
    often = [
        name
        for name, count in seen.most_common(NAMES)
        if count >= least and name.split()[0].casefold() not in small
    ]
    known = [text for text in asked if len(text) >= 4 and not text.isdigit()]
    known += [text for text in wanted.people if text not in known]
    # The same name in other letters is searched once, a person's as it was asked for.
    return list({normal_form(name): name for name in [*known, *often, *wanted.people]}.values())


# --- a file of subjects --------------------------------------------------------------------------

#: Keys of a line, and options, that name rows -> the part of `Wanted`.
_KEYS = {"person": "people", "contains": "contains", "documents": "documents"}


def read_subjects(path: Path) -> dict[str, Wanted]:
    """Who asked, under a name that says nothing, and for which rows: lines ``{"subject": "T-17",
    "person": "Ada Quill"}`` of a file of rows.

    Keys beside ``subject`` are the options of `request new`: ``person``, ``contains``,
    ``documents`` (a text or a list) and ``where`` (an object).

    Raises:
        UnlearnError: A line names nothing, has another key, or a subject occurs twice.
    """
    subjects: dict[str, Wanted] = {}
    for place, row in read_rows(path):
        name = "" if row.get("subject") is None else str(row["subject"])
        strange = sorted(set(row) - {"subject", "where", *_KEYS})
        plain = name.strip(".") and Path(name).name == name and name.isprintable()
        if not plain or len(name.encode()) > 255 or name in subjects:  # it is that of a folder
            says = f"{path}, {place}: `subject` is missing, too long, no plain name, or that of "
            cure = "give each subject a name of its own, such as a number"
            raise fault("choose.subject-name", f"{says}another line; {cure}.")
        where = row.get("where") or {}
        if not isinstance(where, Mapping):
            says = f"{path}, {place}: `where` is no object"
            raise fault("choose.subject-where", f'{says}; write it as {{"FIELD": "VALUE"}}.')
        if strange or len(row) < 2:
            says = f"{path}, {place}: `{strange[0] if strange else 'subject'}` alone names no rows"
            cure = "use person, where, contains or documents"
            raise fault("choose.subject-names-nothing", f"{says}; {cure}.")
        parts = {"where": [(k, str(v)) for k, v in where.items()]}
        for key, part in _KEYS.items():
            several = row[key] if isinstance(row.get(key), list) else [row.get(key)]
            parts[part] = [str(one) for one in several if one is not None]
        subjects[name] = Wanted(**parts)
    if not subjects:
        raise UnlearnError(f"{path} has no subjects; write one a line.", code="choose.no-subject")
    return subjects


def together(subjects: Mapping[str, Wanted]) -> Wanted:
    """What they ask for as one."""
    parts = ("where", *_KEYS.values())
    each = subjects.values()
    return Wanted(**{part: [one for s in each for one in getattr(s, part)] for part in parts})


def shares(
    subjects: Mapping[str, Wanted], rows: Sequence[Source], read: dict | None = None
) -> dict[str, list[str]]:
    """Ids of the rows of each subject; ``read`` as of `Corpus`.

    Raises:
        UnlearnError: A subject has no row.
    """
    people = any(one.people for one in subjects.values())
    ids, corpus = {}, corpus_of(rows if people else (), read)
    for name, wanted in subjects.items():
        try:
            ids[name] = [row.id for row in choose(rows, wanted, corpus)]
        except UnlearnError as error:
            raise UnlearnError(f"subject {name}: {error}", code=error.code) from None
    return ids


def share_offered(
    subjects: Mapping[str, Wanted], shares: dict[str, list[str]], rows: Sequence[Source],
    offered: Offered, more: set[str],
) -> None:  # fmt: skip
    """Give offered rows that are deleted, too, to the subjects whose rows or names they are like.

    Raises:
        UnlearnError: One is nobody's.
    """
    left = set(more)
    for subject, wanted in subjects.items():
        own, ids = [row for row in rows if row.id in shares[subject]], shares[subject]
        names = map(normal_form, names_of(own, wanted))
        named = {normal_form(name): found for name, found in offered.mentions.items()}
        like = {row for name in names for row in named.get(name, ())}
        like |= {row for row, other in offered.near.items() if other in ids}
        ids += sorted(like & more - {*ids})
        left -= like
    if left:
        says = f"{len(left)} of the offered rows cannot be told to be of one of the subjects"
        raise fault("choose.nobodys", f"{says}; name them in a line of a subject.")


def speaking(names: Sequence[str], wanted: Wanted) -> list[str]:
    """Ids that may name somebody: they stand in the record, the ledger and every export.

    Returns:
        Those with a word in them, to be warned of.

    Raises:
        UnlearnError: One is an address, or has a name that was asked for.
    """

    def joined(text: str) -> str:
        return "".join(map(fold, words(text)))

    asked = {word for text in wanted.texts for word in words(text) if len(word) > 2}
    # Written in one word, without accents, or in a script whose words are single characters.
    whole = {one for one in map(joined, wanted.texts) if not one.isdigit()}
    whole = {one for one in whole if len(one) > 3 or (len(one) > 1 and not one.isascii())}
    for name in names:
        one_line(name, "an id")
        found = any(one in joined(name) for one in whole)
        if "@" in name or found or asked & {w for w in words(name) if not w.isdigit()}:
            says = f"{name!r} names somebody, and as an id it stands in every record and export"
            raise fault("choose.id-names", f"{says}; take a number.")
    return [name for name in names if re.search(r"[^\W\d_]{3}", name)]
