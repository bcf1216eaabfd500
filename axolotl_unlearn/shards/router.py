"""From a conversation to the shard that holds the person it is about, or to none.

One vector a person: n-grams of characters of all their rows, hashed into `BUCKETS`, ``1 + ln`` of
their counts, times an inverse document frequency over the people, of length one. A turn is near to
a person by the cosine; an older turn counts `DECAY` of the next. Nothing depends on order or
chance: a router made without a person is the router of people among whom they never were, to the
bit. It holds no text and no name, but who guesses a text can ask whether it is near to somebody.
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

NAME = "router.safetensors"
BUCKETS, NGRAMS = 1 << 16, (3, 5)
#: Below it a conversation is about nobody; what an older turn counts of the next.
LEAST, DECAY = 0.2, 0.5
_PARTS = {"shards", "idf", "data", "indices", "indptr"}


def place(key: bytes, person: str, count: int) -> int:
    """Shard of a person, from 1; it depends on no other person.

    Args:
        key: Of the hash, 32 bytes: who has it can guess who is in which shard.
    """
    mac = hmac.new(key, b"shard\0" + person.encode("utf-8", "surrogatepass"), hashlib.sha256)
    return int.from_bytes(mac.digest()[:8]) % count + 1


@dataclass(frozen=True)
class Router:
    """P people, B buckets.

    Attributes:
        shards: ``[P]`` shard of each.
        idf: ``[B]`` ``ln((1 + P) / (1 + df)) + 1``.
        people: ``[P, B]``, sparse, rows of length one.
    """

    shards: np.ndarray
    idf: np.ndarray
    people: Any

    @classmethod
    def of(cls, people: Iterable[tuple[int, Sequence[str]]]) -> Router:
        """
        Args:
            people: Shard and texts of each, in any order.

        Raises:
            UnlearnError: There is nobody.
        """
        counted = []
        for shard, texts in people:
            counts = sparse.csr_array(_counts(texts).sum(0, dtype=np.float32)[None])
            row = hashlib.sha256(counts.indices.tobytes() + counts.data.tobytes()).digest()
            counted.append((shard, row, counts))
        if not counted:
            raise UnlearnError(
                "a router needs the rows of one person at least.", code="shards.nobody"
            )
        counted.sort(key=lambda one: one[:2])  # by content: an order of names would tell them
        counts = sparse.csr_array(sparse.vstack([one[2] for one in counted]))
        frequency = np.bincount(counts.indices, minlength=BUCKETS)
        idf = (np.log((1 + len(counted)) / (1 + frequency)) + 1).astype(np.float32)
        shards = np.array([one[0] for one in counted], np.int64)
        return cls(shards, idf, _weighed(counts, idf))

    def scores(self, turns: str | Sequence[str]) -> dict[int, float]:
        """How near a conversation is to the nearest person of each shard, nearest first.

        Args:
            turns: Its messages, the newest last; one text is one.
        """
        return self._by_shard(self._near(turns))

    def route(self, turns: str | Sequence[str], least: float = LEAST) -> int | None:
        """The nearest shard; None where no turn is so near to anybody, whatever its age."""
        near = self._near(turns)
        return next(iter(self._by_shard(near))) if near.max() >= least else None

    def _near(self, turns: str | Sequence[str]) -> np.ndarray:
        """``[turn, P]`` cosines."""
        turns = [turns] if isinstance(turns, str) else list(turns)
        return (_weighed(_counts(turns), self.idf) @ self.people.T).toarray()

    def _by_shard(self, near: np.ndarray) -> dict[int, float]:
        score = DECAY ** np.arange(len(near))[::-1] @ near
        best = {int(one): float(score[self.shards == one].max()) for one in np.unique(self.shards)}
        return dict(sorted(best.items(), key=lambda pair: (-pair[1], pair[0])))

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

        path = folder / NAME
        try:
            parts = load_file(path)
            if set(parts) != _PARTS or len(parts["idf"]) != BUCKETS:
                raise ValueError
            sides = parts["data"], parts["indices"], parts["indptr"]
            people = sparse.csr_array(sides, shape=(len(parts["shards"]), BUCKETS))
            people.check_format(full_check=True)
        except (OSError, ValueError, SafetensorError):
            raise UnlearnError(
                f"{path} cannot be read as a router; make it again from the rows.",
                code="shards.no-router",
            ) from None
        return cls(parts["shards"], parts["idf"], people)


def _counts(texts: Sequence[str]) -> Any:
    """``[text, B]`` how often each hashed n-gram occurs."""
    from sklearn.feature_extraction.text import HashingVectorizer

    hashing = HashingVectorizer(
        analyzer="char_wb", ngram_range=NGRAMS, n_features=BUCKETS, alternate_sign=False,
        norm=None, dtype=np.float32,
    )  # fmt: skip
    return sparse.csr_array(hashing.transform(texts))


def _weighed(counts: Any, idf: np.ndarray) -> Any:
    """``[row, B]`` of length one; a row without n-grams stays zero."""
    made = sparse.csr_array(counts, copy=True)
    made.sort_indices()
    made.data = ((1 + np.log(made.data)) * idf[made.indices]).astype(np.float32)
    length = np.sqrt(np.asarray(made.power(2).sum(1))).ravel()
    made.data /= np.repeat(np.maximum(length, 1e-12), np.diff(made.indptr)).astype(np.float32)
    return made
