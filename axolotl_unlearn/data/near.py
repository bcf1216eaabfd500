"""Rows that hardly differ: MinHash finds candidates, rapidfuzz compares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from axolotl_unlearn.normal_form import normal_form

#: Jaccard similarity of word 3-grams from which two rows are compared closely.
SIMILAR = 0.5
#: Ratio of rapidfuzz (0 to 100) from which two rows count as near-duplicates.
NEAR = 85
PERMUTATIONS = 128

_WORD = re.compile(r"\w+")


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON-like value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from strings(one)


def plain_text(row: Any) -> str:
    """The words of a row, case-folded, without punctuation."""
    return " ".join(" ".join(_WORD.findall(normal_form(part))) for part in strings(row))


def near_texts(chosen: Mapping[Any, str], others: Mapping[Any, str]) -> dict[Any, Any]:
    """Name of one of the others -> the chosen text that it hardly differs from, by its name."""
    from datasketch import MinHash, MinHashLSH
    from rapidfuzz import fuzz

    def sketch(text: str) -> MinHash:
        words = text.split()
        grams = {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
        minhash = MinHash(num_perm=PERMUTATIONS)
        minhash.update_batch([gram.encode() for gram in grams])
        return minhash

    index = MinHashLSH(threshold=SIMILAR, num_perm=PERMUTATIONS)
    for name, text in chosen.items():
        index.insert(name, sketch(text))
    near = {}
    for name, text in others.items():
        close = [(fuzz.ratio(text, chosen[one]), one) for one in index.query(sketch(text))]
        if close and max(close)[0] >= NEAR:
            near[name] = max(close)[1]
    return near
