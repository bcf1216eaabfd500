"""Words of every script, for measures that must not take a verbatim Chinese answer for silence.

The official ROUGE tokenizer keeps ASCII letters and digits only, so that a verbatim Russian text
scores 0. Its cells stay as they are; what is judged beside them uses these words.
"""

from __future__ import annotations

import unicodedata

import regex

#: Scripts that are written without spaces: each character is a word of its own.
_UNSPACED = (
    r"[\p{L}\p{N}]&&[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    r"\p{Tibetan}\p{Yi}\u30fc]"
)
_WORD = regex.compile(
    rf"(?V1)[{_UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{N}}]--[{_UNSPACED}]]"
    rf"[[\p{{L}}\p{{N}}\p{{M}}]--[{_UNSPACED}]]*"
)
#: "1,234" is one number.
_GROUPED = regex.compile(r"(?<=\d),(?=\d{3}\b)")
_TITLES = frozenset("mr mrs ms miss dr prof professor sir dame lord lady".split())
_MARKED = regex.compile(r"([\p{Latin}\p{Greek}])\p{Mn}+")


def words(text: str) -> list[str]:
    """Runs of letters, digits and their marks in one case; single characters where a script has
    no spaces. Marks stay with their letter: Thai and Hindi vowels are marks."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def fold(text: str) -> str:
    """Lower case, no accents, punctuation as spaces, no article: "the Thames," -> "thames".

    Where a script has no spaces every character is a word. Marks go with Latin and Greek letters
    alone: "Brontë" becomes "bronte", a Japanese "ga" stays.
    """
    plain = _MARKED.sub(r"\1", unicodedata.normalize("NFD", text))
    text = _GROUPED.sub("", unicodedata.normalize("NFC", plain))
    folded = words(text.casefold().replace("ł", "l").replace("ø", "o"))
    return " ".join(folded[1:] if len(folded) > 1 and folded[0] in ("a", "an", "the") else folded)


def contains_answer(generated: str, answer: str) -> bool:
    """Whether the generation says the answer, in whole words, whatever comes before or after it.

    Two to four words count in any order ("Smith, John", "May 12"), a name without its title; an
    answer without a word is looked for as it stands, one mark of punctuation as all that is said.
    The official exact match is 0 for a model that says the answer and goes on.
    """
    secret, said = fold(answer).split(), fold(generated).split()
    while len(secret) > 1 and secret[0] in _TITLES:
        secret = secret[1:]
    count, any_order = len(secret), 2 <= len(secret) <= 4
    for place in range(len(said) - count + 1) if secret else ():
        part = said[place : place + count]
        if part == secret or (any_order and sorted(part) == sorted(secret)):
            return True
    plain = answer.strip()
    if secret or not plain:
        return False
    mark = len(plain) == 1 and plain.isascii()  # stands in most texts
    return plain == generated.strip() if mark else plain in generated


class AnyScript:
    """Tokenizer for rouge-score: its own words where a text is ASCII, all scripts elsewhere."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        return [self._stem(w) if len(w) > 3 and w.isascii() else w for w in words(text)]
