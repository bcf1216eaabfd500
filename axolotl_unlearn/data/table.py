"""Token rows as they grow: columns of Arrow, a batch at a time, and never a list of them all.

A token is four bytes in an Arrow column and about forty in lists of Python's numbers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, Value
from datasets import Sequence as SequenceOf
from datasets.table import InMemoryTable

from axolotl_unlearn.columns import DOCUMENT, FACTS, PAIR

_TOKENS = {
    "input_ids": SequenceOf(Value("int32")),
    "attention_mask": SequenceOf(Value("int8")),
    "labels": SequenceOf(Value("int32")),
}
#: Columns of forget and retain rows; ``length`` (tokens) is what Axolotl and `PairSampler` sort by.
FEATURES = Features(
    _TOKENS
    | {name: Value("int32") for name in (*FACTS, "length")}
    | {name: Value("int64") for name in (PAIR, DOCUMENT)}
)
MEMORISE_FEATURES = Features(_TOKENS)

#: Rows that wait as numbers for their batch.
_BATCH = 10_000


class RowTable:
    """Rows for training, added one by one.

    Args:
        features: `FEATURES` or `MEMORISE_FEATURES`.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.rows = self.tokens = self.longest = 0
        self._batches: list[pa.RecordBatch] = []
        self._begin()

    def add(self, input_ids: Sequence[int], labels: Sequence[int], **facts: int) -> None:
        """A row; ``facts`` are the integer columns that `FEATURES` has, but for ``length``."""
        length = len(input_ids)
        self._ids.extend(input_ids)
        self._labels.extend(labels)
        self._lengths.append(length)
        for name, column in self._facts.items():
            column.append(facts[name])
        self.rows, self.tokens = self.rows + 1, self.tokens + length
        self.longest = max(self.longest, length)
        if len(self._lengths) == _BATCH:
            self._end()

    def dataset(self) -> Dataset:
        """All rows in the order in which they came; takes none after that."""
        if self._lengths or not self._batches:
            self._end()
        digest = hashlib.blake2b(str(self.features).encode(), digest_size=8)
        for batch in self._batches:
            for column in batch.columns:
                for buffer in column.buffers():
                    digest.update(buffer or b"")
        table = InMemoryTable.from_batches(self._batches, self.features.arrow_schema)
        # `datasets` would pickle the table to find this out.
        return Dataset(table, DatasetInfo(features=self.features), fingerprint=digest.hexdigest())

    def _begin(self) -> None:
        self._ids, self._labels, self._lengths = array("i"), array("i"), array("i")
        names = set(self.features) & {*FACTS, PAIR, DOCUMENT}
        self._facts = {name: array("q") for name in self.features if name in names}

    def _end(self) -> None:
        ends = pa.array(np.concatenate([[0], np.cumsum(self._lengths)]), pa.int32())
        flat = {
            "input_ids": pa.array(np.asarray(self._ids)),
            "attention_mask": pa.array(np.ones(len(self._ids), np.int8)),
            "labels": pa.array(np.asarray(self._labels)),
        }
        columns: dict[str, Any] = {
            name: pa.ListArray.from_arrays(ends, values) for name, values in flat.items()
        }
        columns |= {name: np.asarray(values) for name, values in self._facts.items()}
        columns["length"] = np.asarray(self._lengths)
        schema = self.features.arrow_schema
        self._batches.append(
            pa.record_batch([pa.array(columns[f.name], f.type) for f in schema], schema)
        )
        self._begin()
