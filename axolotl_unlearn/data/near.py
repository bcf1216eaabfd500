"""Rows that hardly differ: MinHash finds candidates, rapidfuzz compares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axolotl_unlearn.data.typed import Source
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


def plain_text(row: Source) -> str:
    """The words of a row, case-folded, without punctuation."""
    return " ".join(" ".join(_WORD.findall(normal_form(part))) for part in strings(row.row))


def near_rows(chosen: Sequence[Source], others: Sequence[Source]) -> dict[str, str]:
    """Row that stays -> chosen row that it hardly differs from, by their ids."""
    from datasketch import MinHash, MinHashLSH
    from rapidfuzz import fuzz

    def sketch(text: str) -> MinHash:
        words = text.split()
        grams = {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
        minhash = MinHash(num_perm=PERMUTATIONS)
        minhash.update_batch([gram.encode() for gram in grams])
        return minhash

    index = MinHashLSH(threshold=SIMILAR, num_perm=PERMUTATIONS)
    plain = {row.id: plain_text(row) for row in chosen}
    for name, text in plain.items():
        index.insert(name, sketch(text))
    near = {}
    for row in others:
        text = plain_text(row)
        close = [(fuzz.ratio(text, plain[name]), name) for name in index.query(sketch(text))]
        if close and max(close)[0] >= NEAR:
            near[row.id] = max(close)[1]
    return near
