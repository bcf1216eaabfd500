"""What the dataset types `forget`, `retain`, `alternative` and `memorise` have in common.

Axolotl resolves ``type: axolotl_unlearn.data.forget`` to that module's ``load(tokenizer, cfg,
ds_cfg)`` and lets the strategy wrap the dataset it has read. A local file is read again here: by
Hugging Face ``datasets`` bytes that are not UTF-8 would be replaced without a word.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from axolotl.prompt_tokenizers import DatasetWrappingStrategy
from datasets import Dataset, DatasetInfo, Features, Value
from datasets import Sequence as SequenceOf
from datasets.table import InMemoryTable

from axolotl_unlearn.columns import (
    DOCUMENT,
    FACTS,
    KINDS,
    PAIR,
    ROLES,
    pair_number,
    task_number,
)
from axolotl_unlearn.config import DataArgs, unlearn_config
from axolotl_unlearn.data.checks import part_of_a_file, role_rows
from axolotl_unlearn.data.encode import AnswerTooLong, Encoder
from axolotl_unlearn.data.overlap import FILE, READS, reads
from axolotl_unlearn.data.records import Record, Rows, read_rows
from axolotl_unlearn.errors import UnlearnError, show_as_sentences

if TYPE_CHECKING:
    from axolotl_unlearn.data.typed import Source

LOG = logging.getLogger(__name__)

Role = Literal["forget", "retain", "alternative", "memorise"]
#: Ids, labels, and the row that they are of with its number.
TokenRow = tuple[list[int], list[int], "Record | Source", int]

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
    """Token rows as they grow: columns of Arrow, a batch at a time, and never a list of them all. A
    token is four bytes there and about forty in lists of Python's numbers.

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


class RoleStrategy(DatasetWrappingStrategy):
    """Rows of one entry of ``datasets`` under a role, read from its file where that is here.

    Args:
        max_length: Of a record in tokens; rows of Axolotl's own types have that of their type.
    """

    def __init__(
        self,
        role: Role,
        tokenizer: Any,
        cfg: Any,
        data: DataArgs,
        entry: Mapping[str, Any],
        max_length: int = 0,
    ) -> None:
        self.role, self.tokenizer, self.cfg = role, tokenizer, cfg
        self.data, self.max_length = data, max_length
        name = entry.get("path")
        self.path = Path(name) if name and Path(name).is_file() else None
        self.source = str(name or f"{role} rows")
        self.special = {*(getattr(tokenizer, "all_special_ids", None) or ())}
        for fault in part_of_a_file(entry):
            raise UnlearnError(fault, code="data.part-of-a-file")
        self.encoder = None if data.rows else Encoder(tokenizer, data, max_length, cfg)

    def wrap_dataset(self, dataset: Any, *_: Any, **__: Any) -> Dataset:
        rows: Rows = ((f"row {number}", row) for number, row in enumerate(dataset or (), start=1))
        if self.path:
            rows = read_rows(self.path)
        given = role_rows(rows, self.source, self.role, self.data)
        table = RowTable(MEMORISE_FEATURES if self.role == "memorise" else FEATURES)
        encode = self._encode_typed if self.encoder is None else self._encode_records
        for ids, labels, row, number in encode(given):
            if self.role == "memorise":
                table.add(ids, labels)
                continue
            facts = {
                "role": ROLES.get(self.role),
                "kind": KINDS[row.kind],
                "task": task_number(row.task),
                "row": number,
                "pair": pair_number(row.id),
                "document": pair_number(row.document or row.id),
                READS: reads(ids, labels, self.special),
                FILE: pair_number(self.source),
            }
            table.add(ids, labels, **facts)
        LOG.info(
            "%s: %d %s rows, %d tokens, longest %d",
            self.source, table.rows, self.role, table.tokens, table.longest,
        )  # fmt: skip
        return table.dataset()

    def _labelled(self, record: Record) -> Literal["document", "answer"]:
        """What of a row has labels; memorisation learns all of it unless `labels` is given, of an
        alternative it is the answer."""
        if self.role == "alternative":
            return "answer"
        said = self.data.chat_template or record.kind in self.data.labels.model_fields_set
        return self.encoder.labelled(record.kind) if said or self.role != "memorise" else "document"

    def _encode_records(self, records: list[Record]) -> Iterator[TokenRow]:
        """Token rows, one for one. Prompts may lose their beginning, which is counted; what has
        labels fits, or is an error."""
        limit, cuts, too_long = self.max_length, [], []
        tokens = zip(records, self.encoder.tokens(records), strict=True)
        for number, (record, whole) in enumerate(tokens):
            labelled = self._labelled(record)
            try:
                encoded = self.encoder.fitted(record, whole)
            except AnswerTooLong as error:
                too_long.append((error.needed, record.id))
                continue
            if len(encoded.input_ids) < 2:
                raise UnlearnError(
                    f"{self.source}: row {record.id!r} is a single token, so nothing can be "
                    "predicted; set `unlearn.data.eos: true` or remove the row.",
                    code="data.single-token",
                )
            if encoded.truncated and labelled == "document":
                too_long.append((limit + encoded.truncated, record.id))
            cuts += [encoded.truncated] * (encoded.truncated > 0)
            yield encoded.input_ids, self.encoder.labels(encoded, labelled), record, number
        if too_long:
            needed, name = max(too_long)
            what = "as whole chats" if self.data.chat_template else "with all that has labels"
            raise UnlearnError(
                f"{self.source}: {len(too_long)} rows do not fit into {limit} tokens {what}, the "
                f"longest (row {name!r}) needs {needed}; set `sequence_len: {needed}` or more (and "
                "`unlearn.data.max_length`, if set).",
                code="data.rows-too-long",
            )
        if cuts:
            LOG.warning(
                "%s: %d of %d rows lost %d tokens on their left to fit into %d; raise sequence_len "
                "to keep them whole.",
                self.source, len(cuts), len(records), sum(cuts), limit,
            )  # fmt: skip

    def _encode_typed(self, given: list[Source]) -> Iterator[TokenRow]:
        """Token rows of any Axolotl type."""
        from axolotl_unlearn.data.typed import encode

        given_as = (given, self.data, self.tokenizer, self.cfg, self.source)
        rows = encode(*given_as, every=self.role != "retain")
        if not rows:
            raise UnlearnError(
                f"{self.source}: none of {len(given)} rows has tokens that were learned; check "
                "`sequence_len` and `unlearn.data.rows`.",
                code="data.nothing-learned",
            )
        yield from ((row.input_ids, row.labels, row.source, row.number) for row in rows)


def load_strategy(role: Role, tokenizer: Any, cfg: Any, ds_cfg: Any = None) -> RoleStrategy:
    """The strategy for a ``datasets`` entry.

    Raises:
        UnlearnError: No ``unlearn:`` block reached us, or a setting of Axolotl would drop rows.
    """
    show_as_sentences()
    args = unlearn_config(cfg)
    if args is None and role != "memorise":
        # Axolotl drops keys it does not know, and would fine-tune on the forget rows.
        raise UnlearnError(
            f"`type: axolotl_unlearn.data.{role}` needs an `unlearn:` block and "
            "`plugins: [axolotl_unlearn.UnlearnPlugin]`; one of them is missing from the config.",
            code="data.no-block",
        )
    data = DataArgs() if args is None else args.data
    if data.eos == "retain":
        data = data.model_copy(update={"eos": role != "forget"})
    given = (role, tokenizer, cfg, data, ds_cfg or {})
    if data.rows:
        if role == "memorise":
            raise UnlearnError(
                "`unlearn.data.rows` does not go with axolotl_unlearn.data.memorise: fine-tune "
                "with the rows' own type.",
                code="data.rows-memorise",
            )
        return RoleStrategy(*given)
    from axolotl_unlearn.data.typed import with_length

    cfg = with_length(cfg)
    max_length = data.max_length or cfg.get("sequence_len")
    for key in ("sequence_len", "eval_sequence_len"):
        limit = cfg.get(key) if key == "sequence_len" or cfg.get("test_datasets") else None
        if limit and max_length > limit:
            raise UnlearnError(
                f"rows may have {max_length} tokens but `{key}` is {limit}, so Axolotl would drop "
                f"the longer ones; set `unlearn.data.max_length: {limit}` or raise `{key}`.",
                code="data.max-length",
            )
    drops = {"min_sample_len": (cfg.get("min_sample_len") or 0) > 2,
             "dataset_exact_deduplication": cfg.get("dataset_exact_deduplication")}  # fmt: skip
    for key in (key for key, does in drops.items() if does):
        raise UnlearnError(
            f"`{key}: {cfg.get(key)}` would drop rows; remove it.", code="data.drops-rows"
        )
    return RoleStrategy(*given, max_length)
