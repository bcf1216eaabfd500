"""Words of every script, for measures that must not take a verbatim Chinese answer for silence.

The official ROUGE tokenizer keeps ASCII letters and digits only, so that a verbatim Russian text
scores 0. Its cells stay as they are; what is judged beside them uses these words.
"""

from __future__ import annotations

import functools
import unicodedata

#: Scripts that are written without spaces: each character is a word of its own.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "YI")


def words(text: str) -> list[str]:
    """Runs of letters, digits and their marks in one case; single characters where a script has
    no spaces. Marks stay with their letter: Thai and Hindi vowels are marks."""
    found: list[str] = []
    inside = False
    for char in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(char)[0]
        if kind not in "LNM" or (kind == "M" and not inside):
            inside = False
        elif kind != "M" and _unspaced(char):
            found.append(char)
            inside = True
        elif inside and (kind == "M" or not _unspaced(found[-1][0])):
            found[-1] += char
        else:
            found.append(char)
            inside = True
    return found


@functools.cache
def _unspaced(char: str) -> bool:
    return char > "\u0dff" and unicodedata.name(char, "").startswith(_UNSPACED)


def without_accents(text: str) -> str:
    """Latin and Greek letters without marks: "Brontë" to "Bronte"; a Japanese "ga" stays."""
    kept: list[str] = []
    plain = False
    for char in unicodedata.normalize("NFD", text):
        if unicodedata.combining(char):
            if plain:
                continue
        else:
            plain = unicodedata.name(char, "").startswith(("LATIN", "GREEK"))
        kept.append(char)
    return unicodedata.normalize("NFC", "".join(kept))


def fold(text: str) -> str:
    """Lower case, no accents, punctuation as spaces, no article: "the Thames," -> "thames".

    Where a script has no spaces every character is a word.
    """
    found = words(without_accents(text).casefold().replace("ł", "l").replace("ø", "o"))
    return " ".join(found[1:] if len(found) > 1 and found[0] in ("a", "an", "the") else found)


def contains_answer(generated: str, answer: str) -> bool:
    """Whether the generation says the answer, in whole words, whatever comes before or after it.

    The official exact match is 0 for a model that says the answer and goes on.
    """
    secret = fold(answer)
    return bool(secret) and f" {secret} " in f" {fold(generated)} "


class AnyScript:
    """Tokenizer for rouge-score: its own words where a text is ASCII, all scripts elsewhere."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        return [self._stem(w) if len(w) > 3 and w.isascii() else w for w in words(text)]
