"""What the dataset types `forget`, `retain` and `memorise` have in common.

Axolotl (0.19) resolves ``type: axolotl_unlearn.data.forget`` to that module's
``load(tokenizer, cfg, ds_cfg)`` and lets the strategy wrap the dataset it has read. A local file is
read again here with `read_records`: Hugging Face ``datasets`` takes column-oriented JSON for one
row of structs and replaces bytes that are not UTF-8, both without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from axolotl.prompt_tokenizers import DatasetWrappingStrategy
from datasets import Dataset

from axolotl_unlearn.columns import KINDS, ROLES, Kind, pair_number, task_number
from axolotl_unlearn.data.encode import AnswerTooLong, Encoder
from axolotl_unlearn.data.records import Record, as_prompts, read_records, records_from_rows
from axolotl_unlearn.data.table import FEATURES, MEMORISE_FEATURES, RowTable
from axolotl_unlearn.errors import UnlearnError, show_as_sentences

if TYPE_CHECKING:
    from axolotl_unlearn.config import DataArgs

LOG = logging.getLogger(__name__)

Role = Literal["forget", "retain", "alternative", "memorise"]


class RecordStrategy(DatasetWrappingStrategy):
    """Turns a file of records into tokenised rows, one for one.

    Args:
        role: Side of the rows.
        encoder: Tokenizer, options, maximum length.
        fields: Names of the fields.
        path: The file, if it is a local one.
        entry: The entry of ``datasets``, which may take a part of it.
        source: Its name in messages.
        kind: That of rows which do not tell.
    """

    def __init__(
        self,
        role: Role,
        encoder: Encoder,
        fields: Any,
        path: Path | None,
        source: str,
        kind: Kind = "completion",
        entry: Mapping[str, Any] | None = None,
    ) -> None:
        self.role = role
        self.entry = entry
        self.encoder = encoder
        self.fields = fields
        self.kind = kind
        self.path = path
        self.source = source
        #: Texts of a corpus to keep: what does not fit may go, as in pretraining.
        self._texts = role == "retain" and bool((entry or {}).get("field"))

    def wrap_dataset(
        self,
        dataset: Any,
        process_count: int | None = None,
        keep_in_memory: bool | None = False,
        **_: Any,
    ) -> Dataset:
        """Rows in file order.

        Raises:
            UnlearnError: A fault of the records, or answers that do not fit.
        """
        # A memorisation stream repeats its rows; a forget row may have several alternatives.
        unique = self.role in ("forget", "retain")
        if self.path is not None:
            records = read_records(
                self.path, self.fields, unique=unique, kind=self.kind, entry=self.entry
            )
        else:
            rows = ((f"row {number}", row) for number, row in enumerate(dataset, start=1))
            rows = as_prompts(rows, self.fields, self.entry)
            records = list(
                records_from_rows(rows, self.source, self.fields, unique=unique, kind=self.kind)
            )
        if listed := self.encoder.options.suppression:
            from axolotl_unlearn.data.suppression import LEARNED, allowed, content_of

            if self.role in LEARNED:
                records = allowed(records, listed, self.source, content_of)
        table, cuts = self._encode(records)
        LOG.info(
            "%s: %d %s rows, %d tokens, longest %d",
            self.source,
            table.rows,
            self.role,
            table.tokens,
            table.longest,
        )
        self._tell_cuts(cuts, len(records))
        return table.dataset()

    def _labelled(self, record: Record) -> Literal["document", "answer"]:
        """What of a row has labels; memorisation learns all of it unless `labels` is given, of an
        alternative it is the answer."""
        if self.role == "alternative":
            return "answer"
        options = self.encoder.options
        said = options.chat_template or record.kind in options.labels.model_fields_set
        return self.encoder.labelled(record.kind) if said or self.role != "memorise" else "document"

    def _tell_cuts(self, cut: list[tuple[int, Record]], rows: int) -> None:
        """Count tokens lost on the left; those with labels are an error unless they are asked for.

        Raises:
            UnlearnError: Rows that are labelled whole do not fit.
        """
        limit = self.encoder.max_length
        whole = [(lost, r.id) for lost, r in cut if self._labelled(r) == "document"]
        whole = [] if self._texts else whole
        does = "memorised" if self.role == "memorise" else f"used to {self.role}"
        if whole and not self.encoder.options.cut_documents:
            lost, name = max(whole)
            raise UnlearnError(
                f"{self.source}: {len(whole)} rows that are labelled whole do not fit into {limit} "
                f"tokens, the longest (row {name!r}) needs {limit + lost}; their beginnings would "
                f"not be {does}: set `sequence_len: {limit + lost}` or more (and "
                "`unlearn.data.max_length`, if set), or accept it with `unlearn.data."
                "cut_documents: true`."
            )
        if cut:
            LOG.warning(
                "%s: %d of %d rows lost %d tokens on their %s to fit into %d, %d of them with "
                "labels (not %s); raise sequence_len to keep them whole.",
                self.source,
                len(cut),
                rows,
                sum(lost for lost, _ in cut),
                "right" if self._texts else "left",
                limit,
                sum(lost for lost, _ in whole),
                does,
            )

    def _encode(self, records: list[Record]) -> tuple[RowTable, list[tuple[int, Record]]]:
        """Token rows, and the records that were cut with the number of tokens that they lost."""
        table = RowTable(MEMORISE_FEATURES if self.role == "memorise" else FEATURES)
        cuts, too_long = [], []
        tokens = zip(records, self.encoder.tokens(records), strict=True)
        for number, (record, whole) in enumerate(tokens):
            try:
                encoded = self.encoder.fitted(record, whole, cut=self._texts)
            except AnswerTooLong as error:
                too_long.append((error.needed, record.id))
                continue
            input_ids = encoded.input_ids
            if len(input_ids) < 2:
                raise UnlearnError(
                    f"{self.source}: row {record.id!r} is a single token, so nothing can be "
                    "predicted; set `unlearn.data.eos: true` or remove the row."
                )
            if encoded.truncated:
                cuts.append((encoded.truncated, record))
            table.add(
                input_ids,
                self.encoder.labels(encoded, self._labelled(record)),
                role=ROLES.get(self.role),
                kind=record.kind_number,
                task=record.task_number,
                row=number,
                pair=pair_number(record.id),
                document=pair_number(record.document),
            )
        if too_long:
            needed, name = max(too_long)
            raise UnlearnError(
                f"{self.source}: {len(too_long)} answers do not fit into {self.encoder.max_length} "
                f"tokens, the longest (row {name!r}) needs {needed}; set `sequence_len: {needed}` "
                "or more (and `unlearn.data.max_length`, if set)."
            )
        return table, cuts


class TypedStrategy(DatasetWrappingStrategy):
    """Gives rows of any Axolotl type a role (`axolotl_unlearn.data.typed`).

    Args:
        role: Side of the rows.
        tokenizer, cfg: As Axolotl's own strategies get them.
        data: ``unlearn.data``, with ``rows``.
        path: The file, if it is a local one.
        entry: The entry of ``datasets``, which may take a part of it.
        source: Its name in messages.
    """

    def __init__(
        self,
        role: Role,
        tokenizer: Any,
        cfg: Any,
        data: DataArgs,
        path: Path | None,
        source: str,
        entry: Mapping[str, Any] | None = None,
    ) -> None:
        self.entry = entry
        self.role, self.tokenizer, self.cfg, self.data = role, tokenizer, cfg, data
        self.path, self.source = path, source

    def wrap_dataset(self, dataset: Any, *_: Any, **__: Any) -> Dataset:
        """Rows in file order; several for a text that its strategy cuts.

        Raises:
            UnlearnError: A fault of the rows, or rows to forget that were never learned.
        """
        from axolotl_unlearn.data import typed

        if self.path is not None:
            given = typed.read_sources(self.path, self.data, self.entry)
        else:
            rows = ((f"row {number}", row) for number, row in enumerate(dataset, start=1))
            given = typed.sources(rows, self.source, self.data)
        if listed := self.data.suppression:
            from axolotl_unlearn.data.suppression import LEARNED, allowed

            if self.role in LEARNED:
                given = allowed(given, listed, self.source, lambda one: one.row)
        every = self.role != "retain" and not self.data.leave_out_dropped
        rows = typed.encode(given, self.data, self.tokenizer, self.cfg, self.source, every)
        if not rows:
            raise UnlearnError(
                f"{self.source}: none of {len(given)} rows has tokens that were learned; check "
                "`sequence_len` and `unlearn.data.rows`."
            )
        LOG.info("%s: %d rows to %s, %d token rows", self.source, len(given), self.role, len(rows))
        table = RowTable(FEATURES)
        for row in rows:
            table.add(
                row.input_ids,
                row.labels,
                role=ROLES[self.role],
                kind=KINDS[row.source.kind],
                task=task_number(row.source.task),
                row=row.number,
                pair=pair_number(row.id),
                document=pair_number(row.document),
            )
        return table.dataset()


def load_strategy(
    role: Role, tokenizer: Any, cfg: Any, ds_cfg: Any = None
) -> RecordStrategy | TypedStrategy:
    """The strategy for a ``datasets`` entry.

    Raises:
        UnlearnError: No ``unlearn:`` block reached us, or a setting of Axolotl would drop rows.
    """
    from axolotl_unlearn.config import DataArgs, unlearn_config

    show_as_sentences()
    args = unlearn_config(cfg)
    if args is None and role != "memorise":
        # Axolotl drops keys it does not know, and would fine-tune on the forget rows.
        raise UnlearnError(
            f"`type: axolotl_unlearn.data.{role}` needs an `unlearn:` block and "
            "`plugins: [axolotl_unlearn.UnlearnPlugin]`; one of them is missing from the config."
        )
    data = DataArgs() if args is None else args.data
    if data.eos == "retain":
        data = data.model_copy(update={"eos": role != "forget"})
    entry = ds_cfg or {}
    name = entry.get("path")
    path = Path(name) if name and Path(name).is_file() else None
    source = str(name or f"{role} rows")
    if data.rows:
        if role == "memorise":
            raise UnlearnError(
                "`unlearn.data.rows` does not go with axolotl_unlearn.data.memorise: fine-tune "
                "with the rows' own type."
            )
        return TypedStrategy(role, tokenizer, cfg, data, path, source, entry)
    max_length = data.max_length or cfg.get("sequence_len")
    if max_length is None:
        raise UnlearnError("`sequence_len` is not set; set it to the longest row in tokens.")
    _refuse_dropping(cfg, max_length)
    encoder = Encoder(tokenizer, data, max_length, cfg)
    return RecordStrategy(role, encoder, data.fields, path, source, data.default_kind, entry)


def _refuse_dropping(cfg: Any, max_length: int) -> None:
    for key in ("sequence_len", "eval_sequence_len"):
        limit = cfg.get(key) if key == "sequence_len" or cfg.get("test_datasets") else None
        if limit and max_length > limit:
            raise UnlearnError(
                f"rows may have {max_length} tokens but `{key}` is {limit}, so Axolotl would drop "
                f"the longer ones; set `unlearn.data.max_length: {limit}` or raise `{key}`."
            )
    if (cfg.get("min_sample_len") or 0) > 2:
        raise UnlearnError(
            f"`min_sample_len: {cfg.get('min_sample_len')}` would drop short rows; remove it."
        )
    if cfg.get("dataset_exact_deduplication"):
        raise UnlearnError(
            "`dataset_exact_deduplication` would drop rows (a memorisation stream repeats them on "
            "purpose); remove it."
        )
