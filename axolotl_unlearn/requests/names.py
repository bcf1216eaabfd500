"""Where a person is named, in the ways that people, forms and programs write a name.

A text is decoded first (HTML, links, JSON in JSON, mixed-up encodings), freed of marks of no width
and of letters of other scripts that look alike (Unicode's table of confusables), and read word by
word without accents. Each place is *taken* where it is the name itself, and *offered* with a reason
where it may be another's. Neither list is complete.

nameparser splits the name that was asked for, anyascii writes other scripts in Latin letters, and
rapidfuzz finds what is misspelt.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, pairwise, product
from typing import NamedTuple

import regex

from axolotl_unlearn.normal_form import WORD, normal_form
from axolotl_unlearn.requests.search import forms

#: How the name is written where it is taken; where it is offered, likeliest first; and where it is
#: too often another's to be taken with `--with-mentions`.
WHOLE, TURNED, FIELDS, ADDRESS = SURE = (
    *("the name", "last name first", "in two fields"),
    "an e-mail address or user name of both names",
)
LOWER, SHORTER, JOINED, INITIAL, USER, MISSPELT, LOST = LIKELY = (
    *("in small letters", "without its middle", "joined by a mark", "initial"),
    *("a user name or address like it", "misspelt", "with lost letters"),
)
SCRIPT, WORDS, LAST = WEAK = (
    "in another script", "in small letters, as words are", "the last name alone"
)  # fmt: skip
ORDER = (*SURE, *LIKELY, *WEAK)
#: Letters of a name for each that may be wrong, missing, added or swapped in a misspelt one, and
#: rapidfuzz's ratio (0 to 100) from which words sound like it in another script.
MISTAKE, SOUNDS = 10, 70
#: Least number of letters of what is compared so, or known by an initial and a name in one word.
LONG = 5
#: Words of a text from which its capitals are looked at, and the share from which they say nothing.
HEADLINE, CAPITALS = 5, 0.7
#: Characters of a passage on each side.
AROUND = 40
_CAMEL = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})|(?<=\p{Lu})(?=\p{Lu}\p{Ll})")
_BROKEN = regex.compile(r"(?<=\p{L})[-\u00ad\u2010]\s*\n\s*(?=\p{L})")
_MIXED_UP = regex.compile(r"[\u00c2-\u00f4][\u0080-\u00ff\u0152-\u02dc\u2013-\u2122]+")
_MARKS, _NO_LETTERS = regex.compile(r"\p{M}"), regex.compile(r"[^\p{L}\p{N}\ufffd]+")
_LATIN, _OTHER = regex.compile(r"\p{Latin}"), regex.compile(r"(?V1)[\p{L}--\p{Latin}]")
#: Between two words of a name: space, apostrophe, quotes, brackets, marks of a text's form.
_SOFT, _COMMA = (
    regex.compile(rf"[\s_'\"*`()\[\]<>~#]*{c}[\s_'\"*`()\[\]<>~#]*") for c in ("", ",")
)
#: Between two cells of a table.
_CELL = regex.compile(r'"?[,;]"?| ?\| ?')
_AFTER_LETTER = regex.compile(r"\.?[\s_]*")
_UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ø": "oe", "å": "aa"})
_ATTACHED = frozenset(".@_-/+%&=")
_ADDRESS = regex.compile(r"([\p{L}\p{N}._%+-]+)@|(?<=@)([\p{L}\p{N}._-]+)")


@lru_cache(1 << 16)
def fold(word: str) -> str:
    """Without capitals and accents; Latin letters that are none of English as those that are."""
    return _letters(normal_form(word))


def _letters(small: str) -> str:
    plain = _MARKS.sub("", unicodedata.normalize("NFD", small)) if not small.isascii() else small
    if plain.isascii() or not _LATIN.search(plain) or _OTHER.search(plain):
        return plain
    from anyascii import anyascii

    return anyascii(plain).lower()


@lru_cache(1 << 12)
def _latin(word: str) -> str:
    """A word of any script in small letters of English, as it sounds or is transcribed."""
    from anyascii import anyascii

    return "".join(c for c in anyascii(word).lower() if c.isalnum())


def _sounds(word: str) -> str:
    """Its consonants, each once in a row: what scripts without vowels share with others."""
    heard = [c for c in _latin(word) if c not in "aeiouyw"]
    return "".join(one for one, _ in groupby(heard))


def _one_script(word: str) -> str:
    """Latin letters in the place of those of another script that look the same, beside Latin."""
    if not (_OTHER.search(word) and _LATIN.search(word)):
        return word
    from confusable_homoglyphs.confusables import confusables_data

    def like(char: str) -> str:
        alike = confusables_data.get(char, ()) if _OTHER.match(char) else ()
        return next((one["c"] for one in alike if one["c"].isascii()), char)

    return "".join(map(like, word))


def readings(text: str) -> Iterator[str]:
    """A text, and what it stands for."""

    def decoded(run: regex.Match[str]) -> str:
        for how in ("cp1252", "latin-1"):
            try:
                return run[0].encode(how).decode("utf-8")
            except UnicodeError:
                continue
        return run[0]

    seen = {text}
    for one in forms(text):
        for other in (one, *(forms(one) if one != text else ()), _MIXED_UP.sub(decoded, one)):
            seen.add(other)
    yield from sorted(seen, key=text.__ne__)


class Token(NamedTuple):
    """A word: folded, as written, what stands before it, and where it is."""

    text: str
    raw: str
    gap: str
    start: int
    end: int

    @property
    def capital(self) -> bool:
        """It has one, or its script has none."""
        return not self.raw[0].islower()


class Text:
    """A reading of a text of a row."""

    def __init__(self, text: str) -> None:
        self.shown = _CAMEL.sub(" ", normal_form(_BROKEN.sub("", text), fold=False))
        #: Letters alone: where no part of a name is in it, none is in the text.
        self.compact = _NO_LETTERS.sub("", _letters(self.shown.casefold()))
        self.strange = bool(_OTHER.search(self.shown)) or "\ufffd" in self.shown
        found = _ADDRESS.finditer(self.shown) if "@" in text else ()
        self.addresses = [m[1] or m[2] for m in found]

    @cached_property
    def tokens(self) -> list[Token]:
        made, end = [], 0
        for found in WORD.finditer(self.shown):
            raw = _one_script(found[0])
            made.append(Token(fold(raw), raw, self.shown[end : found.start()], *found.span()))
            end = found.end()
        return made

    @cached_property
    def cased(self) -> bool:
        """Its capitals say something: there are some, and not on nearly every word."""
        cases = [(t.raw[0].isupper(), t.raw[0].islower()) for t in self.tokens]
        written = [upper for upper, lower in cases if upper or lower]
        few = len(written) < HEADLINE or sum(written) <= CAPITALS * len(written)
        return any(written) and few

    def passage(self, first: int, last: int) -> str:
        """Around the words ``first`` to ``last``."""
        start, end = self.tokens[first].start, self.tokens[last].end
        return self.shown[max(0, start - AROUND) : end + AROUND].strip()


class Hit(NamedTuple):
    """A place in a row: how the name is written there, and the passage."""

    how: str
    passage: str

    @property
    def sure(self) -> bool:
        return self.how in SURE


class Corpus:
    """The texts of rows, read once for all names that are looked for; ``read`` has rows by their
    ids that others have read, and gets those that are read here."""

    def __init__(self, rows: Iterable[tuple[str, Iterable[str]]], read: dict | None = None) -> None:
        read, self.rows = {} if read is None else read, {}
        for row, texts in rows:
            if row not in read:
                read[row] = [[Text(one) for one in readings(text)] for text in texts]
            self.rows[row] = read[row]

    def find(self, name: str) -> dict[str, Hit]:
        """Row -> the surest place where it has the name."""
        person, found = Person(name), {}
        if not person.last:
            return {}
        near = {row: texts for row, texts in self.rows.items() if person.may_be_in(texts)}
        person.learn(text for texts in near.values() for readings in texts for text in readings)
        for row, texts in near.items():
            hits = [hit for readings in texts for text in readings for hit in person.hits(text)]
            hits += person.across(texts)
            if hits:
                found[row] = min(hits, key=lambda hit: ORDER.index(hit.how))
        return found


class Person:
    """A name that is looked for.

    Attributes:
        first, last: Ways to write each, all letters together; ``first`` is empty of a single name.
        words: Parts that stand in small letters too, so that only capitals make them a name.
        common: Those of them that stand so without the other part beside them.
    """

    def __init__(self, name: str) -> None:
        from nameparser import HumanName

        self.asked = normal_form(name, fold=False).strip()
        parsed = HumanName(self.asked)
        parts = [WORD.findall(part) for part in (parsed.first, parsed.middle, parsed.last)]
        if not parts[0] or not parts[2]:  # a single name, or a script without spaces
            parts = [[], [], WORD.findall(self.asked)]
        first, middle, last = parts
        self.first, self.middle, self.last = (_ways(part) for part in (first, middle, last))
        self.initial = fold(first[0])[:1] if first else ""
        self.final = fold(last[0])[:1] if last else ""
        self.latin = not _OTHER.search(self.asked)
        self.given = any(c.isupper() for c in self.asked)
        self.words: set[str] = set()
        self.common: set[str] = set()
        pairs, middles = [*product(self.first, self.last)], self.middle or {""}
        #: Letters -> how that is written, and where its second part begins.
        self.glued = {z + f + m: (TURNED, len(z)) for f, z in pairs for m in middles}
        if self.middle:
            self.glued |= {f + z: (SHORTER, len(f)) for f, z in pairs}
        self.glued |= {f + m + z: (WHOLE, len(f)) for f, z in pairs for m in middles}
        if not pairs:
            self.glued = dict.fromkeys(self.last, (WHOLE, 0))
        users = ((f + z, z + f, f[:1] + z, z + f[:1], f + z[:1]) for f, z in pairs)
        self.users = {one for each in users for one in each if len(one) >= LONG}

    def may_be_in(self, texts: Sequence[Sequence[Text]]) -> bool:
        """No part of it is in another text, whatever is between its letters."""
        every, parts = [text for readings in texts for text in readings], self.first | self.last
        return any(
            any(part in text.compact for part in parts)
            or (text.strange if self.latin else bool(_LATIN.search(text.shown)))
            for text in every
        )

    def learn(self, texts: Iterable[Text]) -> None:
        """Which parts of the name stand in small letters where other words have capitals."""
        parts = self.first | self.last if self.given else set()
        for text in texts if parts else ():
            if not text.cased or parts <= self.common:
                continue
            after = [token.gap for token in text.tokens[1:]] + [" "]
            found = [  # no part of an address or a name in one word
                token.text if not token.capital and not {token.gap, gap} & _ATTACHED else ""
                for token, gap in zip(text.tokens, after, strict=True)
            ]
            for before, word, after in zip(["", *found], found, [*found[1:], ""], strict=False):
                if word in parts:
                    self.words.add(word)
                    if not parts & {before, after}:
                        self.common.add(word)

    def hits(self, text: Text) -> Iterator[Hit]:
        """Every place in a text."""
        for local in text.addresses:
            plain = _NO_LETTERS.sub("", fold(local))
            if plain in self.glued and self.first:
                yield Hit(ADDRESS, local)
            elif plain.rstrip("0123456789") in self.users:
                yield Hit(USER, local)
        more = (*self._parts(text), *self._alike(text)) if self.first else self._transcribed(text)
        for first, last, how in (*self._whole(text), *more):
            yield Hit(how, text.passage(first, last))
        if "\ufffd" in text.shown and (lost := self._lost(text)):
            yield Hit(LOST, lost)

    def across(self, texts: Sequence[Sequence[Text]]) -> Iterator[Hit]:
        """First and last name in two texts of a row, each of which is nothing else."""
        whole = [
            {t.compact for t in readings if not self.words or t.tokens and t.tokens[0].capital}
            for readings in texts
        ]
        firsts, lasts = (
            {n for n, one in enumerate(whole) if one & part} for part in (self.first, self.last)
        )
        if firsts and lasts - firsts:
            yield Hit(FIELDS, "")

    def _whole(self, text: Text) -> Iterator[tuple[int, int, str]]:
        """Words that are the name, whatever parts it or joins it."""
        tokens, longest = text.tokens, max(map(len, self.glued))
        for start in range(len(tokens)):
            letters, soft, comma, mark, cell = "", True, False, False, False
            at = [0]
            for end in range(start, len(tokens)):
                if end > start:
                    gap = tokens[end].gap
                    at.append(here := len(letters))
                    if _SOFT.fullmatch(gap):
                        pass
                    elif _CELL.fullmatch(gap):
                        comma, cell = comma or "," in gap, True
                        soft = soft and any(here == split for _, split in self.glued.values())
                    elif _COMMA.fullmatch(gap):
                        comma, soft = True, soft and (TURNED, here) in self.glued.values()
                    elif gap in ("-", "- "):
                        mark |= any(here == split for _, split in self.glued.values())
                    elif gap in ("/", ".", "|", "+", "&"):
                        mark = True
                    else:
                        break
                letters += tokens[end].text
                if len(letters) > longest:
                    break
                if letters in self.glued and soft:
                    how, split = self.glued[letters]
                    if (comma and not cell and how != TURNED) or (mark and how == TURNED):
                        continue
                    if split and split not in at and not self._joined(tokens[start : end + 1]):
                        continue
                    how = JOINED if mark or (cell and not (comma and how == TURNED)) else how
                    before = tokens[start - 1] if comma and start else None
                    if before and before.capital and not tokens[start].gap.strip():
                        if not cell:  # "Maria García, José López": there is a first name before it
                            continue
                        how = JOINED  # of the line before
                    if how in SURE and not self._capitals(text, start, end):
                        how = WORDS if self.common else LOWER
                    yield start, end, how

    @staticmethod
    def _joined(tokens: Sequence[Token]) -> bool:
        """Letter by letter, or a single name in one word."""
        return all(len(token.text) == 1 for token in tokens)

    def _capitals(self, text: Text, first: int, last: int) -> bool:
        """A name, where its parts are words too."""
        if not self.words:
            return True
        inside = text.tokens[first : last + 1]
        return text.cased and inside[0].capital and inside[-1].capital

    def _parts(self, text: Text) -> Iterator[tuple[int, int, str]]:
        """A part of the name with an initial, in one word with one, or the last name alone."""
        tokens, places = self._merged(text.tokens)
        first = any(t.capital and t.text in self.first for t in tokens)
        for n, token in enumerate(tokens):
            capital, how, beside = token.capital or token.text not in self.words, "", n
            if token.text in self.last and capital:
                how = LAST if token.capital and (first or token.text not in self.common) else ""
                if (beside := self._initial(tokens, n)) != n:
                    how = INITIAL
            elif token.text in self.first and capital and n + 1 < len(tokens):
                after = tokens[n + 1]
                if after.text == self.final and after.raw.isupper() and _SOFT.fullmatch(after.gap):
                    how, beside = INITIAL, n + 1
            elif token.text.rstrip("0123456789") in self.users:
                how = USER
            if how:
                yield places[min(n, beside)][0], places[max(n, beside)][1], how

    def _initial(self, tokens: Sequence[Token], n: int) -> int:
        """Where the initial of a last name stands: up to three words before it, or after."""
        for back in range(1, min(n, 3) + 1):
            inside = tokens[n - back + 1 : n + 1]
            named = all(t.capital for t in inside[:-1])
            if tokens[n - back].text == self.initial and named:
                if all(_AFTER_LETTER.fullmatch(t.gap) for t in inside):
                    return n - back
        after = tokens[n + 1] if n + 1 < len(tokens) else None
        beside = after and after.text == self.initial
        near = beside and (_COMMA.fullmatch(after.gap) or _SOFT.fullmatch(after.gap))
        return n + 1 if near else n

    def _merged(self, tokens: Sequence[Token]) -> tuple[list[Token], list[tuple[int, int]]]:
        """A first or last name of several words as one, and where each stands."""
        parts, made, places, start = self.first | self.last, [], [], 0
        while start < len(tokens):
            end = next(
                (e for e in range(min(start + 4, len(tokens)), start + 1, -1)
                 if "".join(t.text for t in tokens[start:e]) in parts
                 and all(_SOFT.fullmatch(t.gap) or t.gap == "-" for t in tokens[start + 1 : e])),
                start + 1,
            )  # fmt: skip
            inside = tokens[start:end]
            letters = "".join(token.text for token in inside)
            made.append(inside[-1]._replace(text=letters, gap=inside[0].gap))
            places.append((start, end - 1))
            start = end
        return made, places

    def _alike(self, text: Text) -> Iterator[tuple[int, int, str]]:
        """Two words that are the name misspelt, or in another script."""
        from rapidfuzz import fuzz

        pairs = [(f, z) for f in self.first for z in self.last]
        sounds = {tuple(map(_sounds, pair)) for pair in pairs}
        heard = {"".join(map(_latin, pair)) for pair in pairs}
        for n, (one, two) in enumerate(pairwise(text.tokens)):
            foreign = bool(_OTHER.search(one.raw + two.raw))
            if foreign != self.latin:  # of one script
                words, beside = (one.text, two.text), one.capital == two.capital
                if beside and words not in pairs and any(_mistaken(words, pair) for pair in pairs):
                    yield n, n + 1, MISSPELT
                continue
            if not (one.capital and two.capital):
                continue
            same = (_sounds(one.text), _sounds(two.text)) in sounds and len(_latin(one.text)) > 1
            like = "".join(map(_latin, (one.text, two.text)))
            near = foreign and any(fuzz.ratio(like, name) >= SOUNDS for name in heard)
            if same or near:
                yield n, n + 1, SCRIPT

    def _transcribed(self, text: Text) -> Iterator[tuple[int, int, str]]:
        """A name of a script without spaces in Latin letters: up to three words."""
        if self.latin:
            return
        heard, tokens = _latin(self.asked), text.tokens
        for first in range(len(tokens)):
            for last in range(first, min(first + 3, len(tokens))):
                inside = tokens[first : last + 1]
                written = all(t.capital and t.raw.isascii() for t in inside)
                if written and "".join(t.text for t in inside) == heard:
                    yield first, last, SCRIPT

    def _lost(self, text: Text) -> str | None:
        """Letters of English stand, others are lost."""
        letters = [
            r"[\W_]{0,3}" if not c.isalnum() else regex.escape(c) if c.isascii() else "\ufffd+"
            for c in unicodedata.normalize("NFC", self.asked.casefold())
        ]
        found = regex.search("".join(letters), text.shown.casefold())
        return found and text.shown[max(0, found.start() - AROUND) : found.end() + AROUND].strip()


def _mistaken(words: tuple[str, str], names: tuple[str, str]) -> bool:
    """One is the name's, and the other has few wrong letters: swapped ones are one mistake."""
    from rapidfuzz.distance import OSA

    return any(
        words[1 - i] == names[1 - i]
        and len(names[i]) > 3
        and OSA.distance(words[i], names[i]) <= 1 + len(names[i]) // MISTAKE
        for i in (0, 1)
    )


def _ways(part: Sequence[str]) -> set[str]:
    """A part of a name in letters alone, also with umlauts as two letters."""
    written = "".join(part)
    plain = unicodedata.normalize("NFC", normal_form(written))
    return {fold(written), fold(plain.translate(_UMLAUTS))} - {""}
