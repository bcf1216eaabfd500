"""From a conversation to the shard that holds the person it is about, or to none.

One vector a person: n-grams of characters of all their rows, hashed into `BUCKETS`, ``1 + ln`` of
their counts, times an inverse document frequency over the people, of length one. Rows that are
nobody's have vectors of shard 0: without them most prompts of their kind found a person. Nothing
depends on order or chance: a router made without a person is the router of people among whom they
never were, to the bit. It holds no text and no name, but who guesses a text can ask whether it is
near to somebody.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from axolotl_unlearn import files
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.shards import NAME

BUCKETS, NGRAMS = 1 << 16, (3, 5)
#: Below it a conversation is about nobody; what an older turn counts of the next.
LEAST, DECAY = 0.2, 0.5


def place(key: bytes, person: str, count: int) -> int:
    """Shard of a person, from 1, by a hash with a key of 32 bytes; it depends on no other."""
    mac = hmac.new(key, b"shard\0" + person.encode("utf-8", "surrogatepass"), hashlib.sha256)
    return int.from_bytes(mac.digest()[:8]) % count + 1


@dataclass(frozen=True)
class Router:
    """P people, B buckets.

    Attributes:
        shards: ``[P]`` shard of each; 0 is nobody's.
        idf: ``[B]`` ``ln((2 + P) / (1 + df))``: the frame of all prompts counts next to nothing.
        people: ``[P, B]``, sparse, rows of length one.
    """

    shards: np.ndarray
    idf: np.ndarray
    people: Any

    @classmethod
    def of(cls, people: Iterable[tuple[int, Iterable[str]]]) -> Router:
        """Of shard and texts of each, at least one, in any order."""
        # Grams end with words, so joined texts have their sum. Ordered by digest: names tell none.
        joined = [(shard, " ".join(sorted(texts)).encode(errors="replace"))
                  for shard, texts in people]  # fmt: skip
        joined.sort(key=lambda one: (one[0], hashlib.sha256(one[1]).digest()))
        counts = grams([text.decode() for _, text in joined])
        frequency = np.bincount(counts.indices, minlength=BUCKETS)
        idf = np.log((2 + len(joined)) / (1 + frequency)).astype(np.float32)
        return cls(np.array([shard for shard, _ in joined]), idf, _weighed(counts, idf))

    def near(self, texts: Sequence[str]) -> np.ndarray:
        """``[text, P]`` cosine of each with each person."""
        return (_weighed(grams(texts), self.idf) @ self.people.T).toarray()

    def route(self, turns: Sequence[str]) -> int:
        """The nearest shard of a conversation, its newest turn last; 0 where it is about nobody."""
        near = self.near(turns)
        faded = DECAY ** np.arange(len(turns))[::-1] @ near
        return int(self.shards[faded.argmax()]) if near.max() >= LEAST else 0

    def save(self, folder: Path) -> Path:
        """`NAME` in the folder, for its owner alone; equal routers are equal files."""
        from safetensors.numpy import save

        parts = {"shards": self.shards, "idf": self.idf}
        parts |= {name: getattr(self.people, name) for name in ("data", "indices", "indptr")}
        return files.write(folder / NAME, save(parts), private=True)

    @classmethod
    def load(cls, folder: Path) -> Router:
        """
        Raises:
            UnlearnError: There is none, or it is no router.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            parts = load_file(folder / NAME)
            sides = parts["data"], parts["indices"], parts["indptr"]
            people = sparse.csr_array(sides, shape=(len(parts["shards"]), BUCKETS))
            people.check_format(full_check=True)
            return cls(parts["shards"], parts["idf"].reshape(BUCKETS), people)
        except (OSError, ValueError, KeyError, SafetensorError):
            says = f"{folder / NAME} cannot be read as a router; make it again from the rows."
            raise UnlearnError(says, code="shards.no-router") from None


def grams(texts: Sequence[str]) -> Any:
    """``[text, B]`` how often each hashed n-gram occurs."""
    from sklearn.feature_extraction.text import HashingVectorizer

    how = {"analyzer": "char_wb", "ngram_range": NGRAMS, "n_features": BUCKETS}
    how |= {"alternate_sign": False, "norm": None, "dtype": np.float32}
    return sparse.csr_array(HashingVectorizer(**how).transform(texts))


def _weighed(counts: Any, idf: np.ndarray) -> Any:
    """``[text, B]`` of length one; a text without n-grams stays zero."""
    from sklearn.preprocessing import normalize

    values = ((1 + np.log(counts.data)) * idf[counts.indices]).astype(np.float32)
    return normalize(sparse.csr_array((values, counts.indices, counts.indptr), counts.shape))
