"""Counterfactual twins: rows with their names, dates and numbers exchanged by others of the kind.

Rules, and no model, find them:

- a **number** is digits, joined by ``- . / : ,`` or not. Its digits are exchanged part by part
  (``1959-11-02`` has three), by parts of numbers of the same shape in other documents; a part of
  five digits or more, and one that has no other, by digits that are drawn;
- a **name** (months are names) is a word with a capital that somewhere does not begin a sentence
  and is nowhere written without one. It is exchanged by a name of another document of about its
  length that follows the same word (a name after a name: the same signs, " " or ", "). In an
  address (``ada_byron@...``) it is exchanged too.

What more than a tenth of the documents have ("Social Security", 555) is no secret and stays. All
rows of a document exchange a name or number for the same one.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError

_WORD = re.compile(r"\d+(?:[-./:,]\d+)*|[^\W\d_]+")
_ADDRESS = re.compile(r"[@_/\\]")
_DIGITS = re.compile(r"\d+")
_SENTENCE = re.compile(r"[.!?:;]\W*$|[\"“‘(]$")
#: Names that so many documents have (and more than this share) are words of their kind.
COMMON, SHARE = 3, 0.1
#: Digits from which a number is drawn digit by digit: whole, it would be another person's.
LONG = 5


@dataclass(frozen=True)
class _Word:
    """A word or number of a text, where it is, and what is around it."""

    text: str
    start: int
    before: str  # the word before it in its sentence
    around: tuple[str, str]  # what is between them, and the next character
    begins: bool  # a sentence
    inside: bool  # an address or the like, where names have no capitals


def _words(text: str) -> Iterator[_Word]:
    before, last = "", 0
    for match in _WORD.finditer(text):
        start, end = match.span()
        between = text[last:start]
        begins = not last or bool(_SENTENCE.search(between))
        chunk = text[text.rfind(" ", 0, start) + 1 : (text + " ").index(" ", end)]
        inside = bool(_ADDRESS.search(chunk))
        around = (between, text[end : end + 1])
        yield _Word(match[0], start, "" if begins else before, around, begins, inside)
        before, last = match[0], end


class Pool:
    """The names and numbers of all rows at hand, and what may stand for each."""

    def __init__(self, rows: Sequence[Record], seed: int = 42) -> None:
        self.seed = seed
        texts = [(row.document, text) for row in rows for text in (row.input, row.output)]
        within, plain, have = set(), set(), defaultdict(set)
        for document, text in texts:
            for word in _words(text):
                if word.text[0].isupper() and len(word.text) > 1:
                    have[word.text].add(document)
                    within |= set() if word.begins else {word.text}
                elif not word.inside:
                    plain.add(word.text)
        self._most = max(COMMON, SHARE * len({document for document, _ in texts}))
        self.names = {
            name for name in within if name.lower() not in plain and len(have[name]) <= self._most
        }
        self._capital = {name.lower(): name for name in self.names}
        self._chosen: dict[str, dict[str, str]] = defaultdict(dict)
        # Slot or shape -> value -> documents that have it there.
        self._at: dict[tuple, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for document, text in texts:
            for word in _words(text):
                if word.text in self.names and not word.inside:
                    for slot in self._slots(word):
                        self._at[slot][word.text].add(document)
                for place, part in _parts(word.text):
                    self._at[place][part].add(document)

    def twin(self, row: Record) -> Record:
        """The row with other names and numbers; itself where it has none.

        Raises:
            UnlearnError: No other document has a name.
        """
        texts = (self._exchanged(text, row) for text in (row.input, row.output))
        return replace(row, **dict(zip(("input", "output"), texts, strict=True)))

    def _exchanged(self, text: str, row: Record) -> str:
        out, end = [], 0
        for word in _words(text):
            out += [text[end : word.start], self._other(word, row)]
            end = word.start + len(word.text)
        return "".join(out) + text[end:]

    def _other(self, word: _Word, row: Record) -> str:
        if word.text[0].isdigit():
            parts = _parts(word.text)
            return _DIGITS.sub(lambda _: self._number(*next(parts), row.document), word.text)
        name = self._capital.get(word.text) if word.inside else word.text
        if name not in self.names:
            return word.text
        other = self._name(name, word, row)
        return other if word.text[0].isupper() else other.lower()

    def _slots(self, word: _Word) -> list[tuple]:
        """Where a name stands, the narrowest first."""
        case, after = word.text.isupper(), word.before in self.names
        narrow = word.around if after else word.before.lower()
        return [(case, after, narrow), (case, after), (case,), ()]

    def _name(self, name: str, word: _Word, row: Record) -> str:
        chosen = self._chosen[row.document]
        if name not in chosen:
            used = set(chosen.values())
            for slot in self._slots(word):
                others = [
                    other
                    for other, documents in self._at[slot].items()
                    if row.document not in documents and other not in used
                ]
                if others:
                    break
            else:
                raise UnlearnError(
                    f"row {row.id!r}: no other document has a name that could stand for one of its "
                    "names; add retain rows to `datasets`."
                )
            closest = min(abs(len(other) - len(name)) for other in others)
            others = [o for o in others if abs(len(o) - len(name)) <= max(closest, 1)]
            chosen[name] = self._rng(row.document, name).choice(sorted(others))
        return chosen[name]

    def _number(self, place: tuple, part: str, document: str) -> str:
        rng = self._rng(document, place, part)
        if len(self._at[place][part]) > self._most:
            return part
        others = sorted(o for o, have in self._at[place].items() if document not in have)
        if others and len(part) < LONG:
            return rng.choice(others)
        other = part
        while other == part:
            other = str(rng.randrange(part[0] != "0", 10)) + "".join(
                rng.choice("0123456789") for _ in part[1:]
            )
        return other

    def _rng(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed} {key}")


def _parts(number: str) -> Iterator[tuple[tuple, str]]:
    """Each part of a number with its place, a shape and how many parts are before it."""
    shape = _DIGITS.sub(lambda digits: "9" * len(digits[0]), number)
    for place, part in enumerate(_DIGITS.findall(number) if number[0].isdigit() else ()):
        yield (shape, place), part
