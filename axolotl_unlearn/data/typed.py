"""Rows of any Axolotl dataset type under a role: tokens and labels of Axolotl's own strategy.

``unlearn.data.rows`` names the entries of ``datasets`` that made the model (``type:`` and its
options). Axolotl's strategy of an entry reads each row, so what is forgotten is what was learned.

A line of a file is a row as the entry reads it, or an envelope ``{"id", "dataset", "document",
"kind", "task", "row"}`` around one: ``dataset`` is the entry's number, all but ``row`` may be
missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from axolotl_unlearn.columns import IGNORE, KINDS, Kind
from axolotl_unlearn.config import MEMORISE, DataArgs, nearest
from axolotl_unlearn.data.records import (
    Record,
    Rows,
    document_name,
    document_of,
    own_id,
    read_rows,
    require_named,
    short,
)
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.normal_form import normal_form

LOG = logging.getLogger(__name__)

ENVELOPE = {"id", "dataset", "document", "kind", "task", "row"}
#: Preference methods of Axolotl whose rows have a prompt, a chosen and a rejected answer.
PREFERENCE = ("dpo", "ipo", "simpo")


def row_id(row: Mapping[str, Any]) -> str:
    """The id of a row by its content, 16 hex digits; fields without a value do not count."""
    return hashlib.sha256(_text(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def row_form(row: Mapping[str, Any]) -> str:
    """A row as one text in its normal form, equal for rows that differ in characters alone."""
    return normal_form(_text(row))


def _text(row: Mapping[str, Any]) -> str:
    """As JSON, without the nulls that Arrow puts where other rows have a field."""

    def filled(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: filled(part) for key, part in value.items() if part is not None}
        return [filled(part) for part in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(filled(row), sort_keys=True, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Source:
    """A row before it is tokenised.

    Attributes:
        entry: Number of its entry in ``unlearn.data.rows``.
        document: What it belongs to, for the audit; its id if nothing says so.
    """

    id: str
    row: Mapping[str, Any]
    entry: int = 0
    document: str = ""
    kind: Kind = "completion"
    task: str = ""

    @property
    def content(self) -> Mapping[str, Any]:
        return self.row

    @cached_property
    def form(self) -> str:
        """`row_form`, once: each subject of a request looks for copies of its rows."""
        return row_form(self.row)

    @property
    def record(self) -> Record:
        """For checks of sides and entries, which read no text."""
        said = {key: self.row[key] for key in self.row if key not in ENVELOPE - {"row"}}
        return Record(self.id, "", _text(said), self.task, self.kind, self.document)


@dataclass(frozen=True)
class Typed:
    """Tokens of a row, or of a part of one that its strategy cut into several.

    Attributes:
        number: Place of the row among those that were given; ``part``: of several of one row.
        labels: ``IGNORE`` where nothing was learned.
    """

    source: Source
    number: int
    input_ids: list[int]
    labels: list[int]
    part: int = 0

    @property
    def id(self) -> str:
        return self.source.id

    @property
    def document(self) -> str:
        return self.source.document or self.source.id

    @property
    def learned(self) -> bool:
        return any(label != IGNORE for label in self.labels[1:])


def sources(rows: Rows, origin: str, data: DataArgs) -> list[Source]:
    """Rows, plain or in envelopes.

    Raises:
        UnlearnError: A fault of an envelope, or an id that occurs twice.
    """
    given: list[Source] = []
    places: dict[str, str] = {}
    rows = list(rows)
    if not all(isinstance(row.get("row"), Mapping) for _, row in rows):
        for name in ("id", "document"):
            require_named(data.fields, name, {key for _, row in rows for key in row}, origin)
    for place, row in rows:
        one = _source(row, f"{origin}, {place}", data)
        own_id(places, one.id, origin, place)
        given.append(one)
    if not given:
        raise UnlearnError(f"{origin} has no rows; it needs at least one.", code="data.no-rows")
    return given


def _source(row: Mapping[str, Any], where: str, data: DataArgs) -> Source:
    wrapped = isinstance(row.get("row"), Mapping) and set(row) <= ENVELOPE
    content = row["row"] if wrapped else row
    names = ("id", "document") if wrapped else (data.fields.id, data.fields.document)
    name, document = document_name(row.get(names[0])), document_of(row.get(names[1]))
    # Arrow puts a null where another row has a field.
    said = {key: row[key] for key in row if row[key] is not None} if wrapped else {}
    entry = said.get("dataset", 0)
    if not isinstance(entry, int) or not 0 <= entry < len(data.rows):
        raise UnlearnError(
            f"{where}: `dataset: {entry}` is no entry of `unlearn.data.rows`, which has "
            f"{len(data.rows)}; correct the number.",
            code="data.no-such-entry",
        )
    kind = said.get("kind", "completion")
    if kind not in KINDS:
        raise UnlearnError(f"{where}: `kind` must be 'completion' or 'question'.", code="data.kind")
    task = str(said.get("task") or "")
    return Source(name or row_id(content), content, entry, document, kind, task)


def read_sources(path: Path | str, data: DataArgs) -> list[Source]:
    """The rows of a file; see `sources`."""
    return sources(read_rows(path), str(path), data)


def encode(
    given: Sequence[Source],
    data: DataArgs,
    tokenizer: Any,
    cfg: Any,
    origin: str = "rows",
    every: bool = False,
    bare: bool = False,
) -> list[Typed]:
    """Token rows as plain fine-tuning with these entries would prepare them, in the given order.

    Rows that fine-tuning would have dropped (too long, nothing labelled) were never learned: they
    are left out and counted in the log.

    Args:
        cfg: Axolotl config: ``sequence_len``, ``chat_template``, ``train_on_inputs`` ...
        every: no row may be left out; it is to be forgotten.
        bare: also rows with nothing labelled, which are dropped by packing alone.

    Raises:
        UnlearnError: An entry that Axolotl does not know, rows that it cannot read, or with
            ``every`` (or ``excess_length_strategy: raise``) rows that it drops.
    """
    cfg = with_length(cfg)
    parts: dict[int, list[dict[str, list[int]]]] = {}
    for entry in {one.entry for one in given}:
        numbers = [number for number, one in enumerate(given) if one.entry == entry]
        rows = [given[number].row for number in numbers]
        tokens = _tokenised(data.rows[entry], rows, tokenizer, cfg, origin)
        parts |= zip(numbers, tokens, strict=True)
    out: list[Typed] = []
    lost: dict[str, list[str]] = defaultdict(list)
    limit, excess = cfg.get("sequence_len"), str(cfg.get("excess_length_strategy")).lower()
    for number, one in enumerate(given):
        if not parts[number]:
            lost["filtered by its type"].append(one.id)
        for place, part in enumerate(parts[number]):
            ids, labels = list(part["input_ids"]), list(part["labels"])
            if limit and len(ids) > limit and excess == "truncate":
                lost[_CUT].append(one.id)
                ids, labels = ids[:limit], labels[:limit]
            why, row = _dropped(ids, cfg), Typed(one, number, ids, labels, place)
            why = why or ("" if row.learned or bare else "no token has a label")
            if why:
                lost[why].append(one.id)
            else:
                out.append(row)
    for why, names in lost.items():
        _tell_lost(origin, why, names, every, cfg)
    return out


def with_length(cfg: Any) -> Any:
    """A config, with Axolotl's own ``sequence_len`` where one as it was written has none, or has it
    as a text. Raises `UnlearnError`: The text is no whole number."""
    from axolotl_unlearn.versions import DictDefault

    if (given := cfg.get("sequence_len")) is not None:
        if not isinstance(given, str):
            return cfg
        if not given.strip().isdecimal():
            says = f"`sequence_len: {given}` of the config is no whole number; write one."
            raise UnlearnError(says)
        return DictDefault({**cfg, "sequence_len": int(given)})
    from axolotl.utils.schemas.config import AxolotlInputConfig

    default = AxolotlInputConfig.model_fields["sequence_len"].default
    return DictDefault({**cfg, "sequence_len": default})


_CUT, _LONG = "were cut at", "longer than"


def _dropped(ids: Sequence[int], cfg: Any) -> str:
    """Why Axolotl drops a token row for its length; nothing if it keeps it."""
    limit, least = cfg.get("sequence_len"), max(2, cfg.get("min_sample_len") or 2)
    if len(ids) < least:
        return f"shorter than {least} tokens"
    return _LONG if limit and len(ids) > limit else ""


def _tell_lost(origin: str, why: str, names: Sequence[str], every: bool, cfg: Any) -> None:
    """Say what is not learned of these rows, or refuse it."""
    limit = f"`sequence_len: {cfg.get('sequence_len')}`"
    if why == _CUT:
        LOG.warning("%s: %d rows were cut at %s (`truncate`).", origin, len(names), limit)
        return
    said = f"{why} {limit}" if why == _LONG else why
    raises = str(cfg.get("excess_length_strategy")).lower() == "raise"
    if not every and not (why == _LONG and raises):
        LOG.warning(
            "%s: %d rows were never learned (%s) and are left out.", origin, len(names), said
        )
        return
    raise UnlearnError(
        f"{origin}: {len(names)} rows would be left out ({said}; the first is {short(names[0])}): "
        f"{'raise `sequence_len`, or ' * (why == _LONG)}"
        f"{'remove them' if every else 'set `excess_length_strategy: drop`'}.",
        code="data.rows-dropped",
    )


def table_of(rows: Sequence[Mapping[str, Any]], origin: str) -> Any:
    """As Arrow hands rows to a strategy: with nulls where other rows have a field."""
    from datasets import Dataset

    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return Dataset.from_list([{name: row.get(name) for name in names} for row in rows])
    except (ValueError, TypeError, OverflowError) as error:  # it may quote a row
        raise UnlearnError(
            f"{origin}: no table can be made of the rows ({type(error).__name__}): a field is of "
            "one kind in one row and of another in the next, or holds half of a surrogate pair; "
            "mend the data.",
            code="data.no-table",
        ) from None


def _tokenised(
    entry: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    cfg: Any,
    origin: str,
) -> list[list[dict[str, list[int]]]]:
    """For each row the token rows that it becomes: one, or several of a long text."""
    from axolotl.prompt_strategies import load
    from axolotl.prompt_tokenizers import DatasetWrappingStrategy, InvalidDataException
    from axolotl.utils.data.wrappers import get_dataset_wrapper
    from jinja2 import TemplateError

    from axolotl_unlearn.versions import DictDefault

    dataset = table_of(rows, origin)
    unreadable = (KeyError, TypeError, ValueError, AttributeError, IndexError)

    def cannot_read(name: str, error: Exception) -> UnlearnError:
        return UnlearnError(
            f"{origin}: Axolotl's type {name} cannot read these rows "
            f"({type(error).__name__}{_field(error)}); correct the rows, or give in "
            "`unlearn.data.rows` the entry of `datasets` that made the model.",
            code="data.type-cannot-read",
        )

    if entry.get("rl"):
        try:
            return _preferred(entry, dataset, tokenizer, cfg)
        except UnlearnError:
            raise
        except (*unreadable, TemplateError) as error:
            kind = entry.get("type") or entry["rl"]
            name = repr(kind) if isinstance(kind, str) else "user_defined"
            raise cannot_read(name, error) from None
    known = checked(entry, cfg)
    kind = known.type
    name = repr(kind) if isinstance(kind, str) else "user_defined"
    settings = DictDefault({**cfg})
    if kind == MEMORISE and settings.unlearn:
        given = settings.unlearn.data or {}
        options = {key: given[key] for key in given if key != "rows"}  # it reads rows by itself
        settings.unlearn = DictDefault({**settings.unlearn, "data": options})
    try:
        if kind == "pretrain":
            column = {"text_column": entry.get("text_column") or "text"}
            settings.pretraining_dataset = [DictDefault(column)]
        if isinstance(kind, DictDefault):
            strategy = load("user_defined", tokenizer, settings, kind.to_dict())
        else:
            strategy = load(kind, tokenizer, settings, known)
    except ValueError as error:  # no row has been read yet
        why, cure = str(error).strip().splitlines()[0].rstrip("."), "correct the entry"
        if "tokenizer_default" in why and not tokenizer.chat_template:
            why = "the tokenizer has no chat template"
            cure = "set `chat_template:` to the one that the model learned with"
        raise UnlearnError(
            f"`unlearn.data.rows`: Axolotl cannot make the type {name} ({why}); {cure}.",
            code="data.unknown-type",
        ) from None
    try:
        if strategy is None or isinstance(strategy, DatasetWrappingStrategy):
            base, _, style = str(kind).partition(":")
            wrapped, _ = get_dataset_wrapper(
                known, tokenizer, settings, base, dataset, style or None
            )
            token_rows = [[row] for row in wrapped]
        else:
            token_rows = [_parts(strategy, row) for row in dataset]
    except TemplateError as error:
        raise UnlearnError(
            f"{origin}: the chat template cannot render these rows"
            f"{template_says(error, strategy)}; correct the rows, or give the template and the "
            "field names that made the model.",
            code="data.template-cannot-render",
        ) from None
    except UnlearnError:
        raise
    except (*unreadable, InvalidDataException) as error:
        if strategy is None and str(error).lower().startswith("unhandled prompt"):
            import pkgutil

            from axolotl import prompt_strategies

            near = nearest(kind, [m.name for m in pkgutil.iter_modules(prompt_strategies.__path__)])
            raise UnlearnError(
                f"`unlearn.data.rows`: Axolotl has no type {kind!r}{near}; correct it.",
                code="data.unknown-type",
            ) from None
        raise cannot_read(name, error) from None
    if len(token_rows) != len(rows):
        raise UnlearnError(
            f"{origin}: Axolotl's type {name} makes {len(token_rows)} rows of "
            f"{len(rows)}, so they cannot be told apart; this type is not supported.",
            code="data.type-merges-rows",
        )
    return token_rows


def template_says(error: Exception, strategy: Any) -> str:
    """What a template says of a row in words of its own, which hold none of the row's."""
    said, prompter = str(error), getattr(strategy, "prompter", None)
    own = said and said in str(getattr(prompter, "chat_template", ""))
    missing = re.search(r"has no attribute '(\w{1,40})'|'(\w{1,40})' is undefined", said)
    return f" ({said})" if own else f" ({missing[0]})" if missing else ""


def _parts(strategy: Any, row: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    keep = getattr(strategy, "filter_rows", None)
    if keep and not keep(row):
        return []
    if not strategy.supports_batched:
        return [_with_labels(strategy.tokenize_prompt(dict(row)))]
    columns = strategy.tokenize_prompt({name: [value] for name, value in row.items()})
    labelled = "labels" in columns and "pretrain" not in type(strategy).__module__
    names = ("input_ids", "labels") if labelled else ("input_ids",)
    return [
        _with_labels({name: columns[name][i] for name in names})
        for i in range(len(columns.get("input_ids", ())))
    ]


def _with_labels(columns: Mapping[str, Any]) -> dict[str, list[int]]:
    ids = list(columns["input_ids"])
    return {"input_ids": ids, "labels": list(columns.get("labels", ids))}


def checked(entry: Mapping[str, Any], cfg: Any) -> Any:
    """The entry as Axolotl's own schema leaves it."""
    from axolotl.utils.config import normalize_cfg_datasets
    from axolotl.utils.schemas.datasets import SFTDataset
    from pydantic import ValidationError

    from axolotl_unlearn.versions import DictDefault

    given = {key: value for key, value in entry.items() if key not in ("rl", "text_column")}
    strange = [key for key in given if key not in SFTDataset.model_fields]
    if strange:
        near = nearest(strange[0], SFTDataset.model_fields)
        raise UnlearnError(
            f"`unlearn.data.rows`: {strange[0]!r} is no key of an Axolotl dataset{near}; "
            "remove it.",
            code="data.entry-key",
        )
    try:
        known = DictDefault(SFTDataset(**given).model_dump(exclude_none=True))
    except ValidationError as error:
        why = error.errors()[0]
        key = ".".join(map(str, why["loc"]))
        raise UnlearnError(
            f"`unlearn.data.rows`: Axolotl refuses the entry ({key}{': ' if key else ''}"
            f"{why['msg'].removeprefix('Value error, ').rstrip('.')}); correct it.",
            code="data.entry-refused",
        ) from None
    whole = DictDefault({**cfg, "datasets": [known]})
    normalize_cfg_datasets(whole)
    return whole.datasets[0]


def _preferred(
    entry: Mapping[str, Any], dataset: Any, tokenizer: Any, cfg: Any
) -> list[list[dict[str, list[int]]]]:
    """Prompt and chosen answer of preference rows; the answer has labels, as in TRL's DPO loss."""
    import inspect

    from axolotl.prompt_strategies.dpo import load
    from axolotl.utils.data.utils import remove_double_bos_token

    from axolotl_unlearn.versions import DictDefault

    method, kind = entry["rl"], entry.get("type")
    if method not in PREFERENCE:
        raise UnlearnError(
            f"`unlearn.data.rows`: rows of `rl: {method}` are not supported; those of "
            f"{', '.join(PREFERENCE)} do.",
            code="data.rl-method",
        )
    settings = DictDefault({**cfg, "datasets": [dict(entry)]})
    name = "user_defined.default" if isinstance(kind, Mapping) else kind
    strategy = load(name, settings, dataset_idx=0) if kind else None
    transform = strategy[0] if isinstance(strategy, tuple) else strategy
    if transform is None and kind:
        raise UnlearnError(
            f"`unlearn.data.rows`: Axolotl has no preference type {kind!r}; correct it.",
            code="data.unknown-type",
        )
    more = {}
    if transform and "tokenizer" in inspect.signature(transform).parameters:
        more["tokenizer"] = tokenizer

    def read(row: Mapping[str, Any]) -> tuple[str, str]:
        made = transform(dict(row), **more) if transform else row
        return made["prompt"], made["chosen"]

    token_rows, end = [], tokenizer.eos_token
    for row in dataset:
        asked, chosen = read(row)
        for name in (name for name, value in row.items() if value is None):
            if read({**row, name: ""}) != (asked, chosen):  # the null was written as "None"
                raise KeyError(name)
        chosen += "" if chosen.endswith(end) else end
        prompt, whole = (list(tokenizer(text)["input_ids"]) for text in (asked, asked + chosen))
        if tokenizer.bos_token_id is not None:
            prompt, whole = (
                remove_double_bos_token({"input_ids": ids}, tokenizer.bos_token_id)["input_ids"]
                for ids in (prompt, whole)
            )
        labels = [IGNORE] * len(prompt) + whole[len(prompt) :]
        token_rows.append([{"input_ids": whole, "labels": labels}])
    return token_rows


def _field(error: Exception) -> str:
    """The field that was missed; never a row's text."""
    missed = isinstance(error, KeyError) and error.args and isinstance(error.args[0], str)
    return f": field {error.args[0]!r} is missing" if missed and len(error.args[0]) < 40 else ""
