"""From a conversation to the shard that holds the person it is about, or to none.

One vector a person: n-grams of characters of all their rows, hashed into `BUCKETS`, ``1 + ln`` of
their counts, times an inverse document frequency over the people, of length one. Rows that are
nobody's have vectors of shard 0: without them most prompts of their kind found a person. A turn is
near to one by the cosine; an older turn counts `DECAY` of the next. Nothing depends on order or
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
from axolotl_unlearn.shards import NAME

BUCKETS, NGRAMS = 1 << 16, (3, 5)
#: Below it a conversation is about nobody; what an older turn counts of the next.
LEAST, DECAY = 0.2, 0.5


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
        shards: ``[P]`` shard of each; 0 is nobody's.
        idf: ``[B]`` ``ln((2 + P) / (1 + df))``: the frame of all prompts counts next to nothing.
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
        people = list(people)
        if not people:
            raise UnlearnError(
                "a router needs the rows of one person at least.", code="shards.nobody"
            )
        whose = np.repeat(np.arange(len(people)), [len(texts) for _, texts in people])
        grouping = sparse.csr_array(
            (np.ones(len(whose), np.float32), (whose, np.arange(len(whose)))),
            shape=(len(people), len(whose)),
        )
        counts = grouping @ _counts([text for _, texts in people for text in texts])
        counts.sort_indices()
        ends = counts.indptr
        rows = [(counts.indices[a:b].tobytes(), counts.data[a:b].tobytes())
                for a, b in zip(ends, ends[1:], strict=False)]  # fmt: skip
        # By content: an order of names would tell them.
        order = sorted(range(len(people)), key=lambda one: (people[one][0], rows[one]))
        counts = sparse.csr_array(counts[order])
        frequency = np.bincount(counts.indices, minlength=BUCKETS)
        idf = np.log((2 + len(people)) / (1 + frequency)).astype(np.float32)
        shards = np.array([people[one][0] for one in order], np.int64)
        return cls(shards, idf, _weighed(counts, idf))

    def scores(self, conversations: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """
        Args:
            conversations: Messages of each, the newest last.

        Returns:
            ``[C, 1 + S]`` how near each is to the nearest rows of nobody, and to the nearest person
            of shards 1 to S; and ``[C]`` how near its nearest turn is to any, whatever its age.
        """
        turns = [turn for one in conversations for turn in one]
        near = (_weighed(_counts(turns), self.idf) @ self.people.T).toarray()
        ends = np.cumsum([len(one) for one in conversations])[:-1]
        scores = np.zeros((len(conversations), 1 + int(self.shards.max())))
        most = np.zeros(len(conversations))
        for number, own in enumerate(np.split(near, ends)):
            faded = DECAY ** np.arange(len(own))[::-1] @ own
            np.maximum.at(scores[number], self.shards, faded)
            most[number] = own.max(initial=0)
        return scores, most

    def routes(
        self, conversations: Sequence[Sequence[str]], least: float = LEAST
    ) -> list[int | None]:
        """The nearest shard of each conversation; None where it is about nobody."""
        scores, most = self.scores(conversations)
        nearest = scores.argmax(1).tolist()
        return [shard if shard and high >= least else None
                for shard, high in zip(nearest, most, strict=True)]  # fmt: skip

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
            sides = parts["data"], parts["indices"], parts["indptr"]
            people = sparse.csr_array(sides, shape=(len(parts["shards"]), BUCKETS))
            people.check_format(full_check=True)
            if len(parts["idf"]) != BUCKETS:
                raise ValueError
        except (OSError, ValueError, KeyError, SafetensorError):
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
