"""Token rows as they grow: columns of Arrow, a batch at a time, and never a list of them all.

A token is four bytes in an Arrow column and about forty in lists of Python's numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, Value
from datasets import Sequence as SequenceOf
from datasets.table import InMemoryTable

from axolotl_unlearn.columns import DOCUMENT, FACTS, PAIR
from axolotl_unlearn.data.overlap import FILE, READS

_TOKENS = {
    "input_ids": SequenceOf(Value("int32")),
    "attention_mask": SequenceOf(Value("int8")),
    "labels": SequenceOf(Value("int32")),
}
#: Columns of forget and retain rows; ``length`` (tokens) is what Axolotl and `PairSampler` sort by.
FEATURES = Features(
    _TOKENS
    | {name: Value("int32") for name in (*FACTS, "length")}
    | {name: Value("int64") for name in (PAIR, DOCUMENT, READS, FILE)}
)
MEMORISE_FEATURES = Features(_TOKENS)

#: Rows that wait as numbers for their batch.
_BATCH = 1000


class RowTable:
    """Rows for training, added one by one.

    Args:
        features: `FEATURES` or `MEMORISE_FEATURES`.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.rows = self.tokens = self.longest = 0
        self._batches: list[pa.RecordBatch] = []
        self._waiting: list[dict[str, Any]] = []

    def add(self, input_ids: Sequence[int], labels: Sequence[int], **facts: int | None) -> None:
        """A row; ``facts`` are the integer columns that `FEATURES` has, but for ``length``."""
        length = len(input_ids)
        row = {"input_ids": input_ids, "attention_mask": [1] * length, "labels": labels}
        self._waiting.append(row | {"length": length} | facts)
        self.rows, self.tokens = self.rows + 1, self.tokens + length
        self.longest = max(self.longest, length)
        if len(self._waiting) == _BATCH:
            self._end()

    def dataset(self) -> Dataset:
        """All rows in the order in which they came; takes none after that."""
        self._end()
        digest = hashlib.blake2b(str(self.features).encode(), digest_size=8)
        for batch in self._batches:
            for column in batch.columns:
                for buffer in column.buffers():
                    digest.update(buffer or b"")
        table = InMemoryTable.from_batches(self._batches, self.features.arrow_schema)
        # `datasets` would pickle the table to find this out.
        return Dataset(table, DatasetInfo(features=self.features), fingerprint=digest.hexdigest())

    def _end(self) -> None:
        schema = self.features.arrow_schema
        self._batches.append(pa.RecordBatch.from_pylist(self._waiting, schema))
        self._waiting = []
