"""One form of a text for comparisons: the same name may be written in many sequences of characters.

"José" has one code point for its last letter or two (Unicode NFC, NFD); a space, a dash or a quote
may be any of several; a zero-width mark may stand between any two letters.
"""

from __future__ import annotations

import re
import unicodedata

import regex

_QUOTES = {"'": "‘’‚‛‹›′ʹʼˈ＇´", '"': "“”„‟″«»＂"}
_PLAIN = {char: plain for plain, chars in _QUOTES.items() for char in chars}
# Dashes (Unicode Pd), hyphen bullet and minus.
_PLAIN |= dict.fromkeys("֊־᐀᠆‐‑‒–—―⁃−⸺⸻〰﹘﹣－", "-")
_VARIANT = re.compile(f"[{''.join(_PLAIN)}]")  # `str.translate` looks up every letter
#: Shown as nothing: joiners, directions, soft hyphen, byte order mark, variation selectors; and
#: the stroke that stretches a word in Arabic.
_NO_WIDTH = re.compile(
    "[\u00ad\u034f\u061c\u0640\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)
_SPACE = re.compile(r"\s+")
#: Scripts without spaces: each character is a word. Vowel signs of others belong to their words.
_SINGLE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = regex.compile(rf"(?V1)[{_SINGLE}]|[[\p{{L}}\p{{N}}\p{{M}}]--[{_SINGLE}]]+")


def normal_form(text: str, *, fold: bool = True) -> str:
    """NFKC with one kind of space, dash and quote and without marks of no width.

    Args:
        fold: Also without the difference of capital and small letters.
    """
    if not text.isascii():
        # Before NFKC: it takes an acute accent that stands alone apart.
        text = unicodedata.normalize("NFKC", _plain(_NO_WIDTH.sub("", text)))
        if fold:
            text = unicodedata.normalize("NFKC", text.casefold())
        text = _plain(text)
    elif fold:
        text = text.lower()
    return _SPACE.sub(" ", text)


def _plain(text: str) -> str:
    return _VARIANT.sub(lambda found: _PLAIN[found[0]], text)


def words(text: str) -> list[str]:
    """Letters and digits in their normal form; punctuation, spaces and line ends do not count."""
    return WORD.findall(normal_form(text))
