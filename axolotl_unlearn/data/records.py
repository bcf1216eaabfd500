"""Forget and retain records as users keep them: JSON lines, JSON or parquet.

Every fault is an `UnlearnError`: one sentence with file, row, field and the cure. Messages never
hold the text of a row, because forget texts are sensitive.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.columns import KINDS, Kind, task_number
from axolotl_unlearn.config import FieldArgs as Fields
from axolotl_unlearn.config import nearest as meant
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.normal_form import normal_form

#: File name endings that can be read.
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")

#: A longer field ``document`` of a row is a text and no name: names appear in reports.
MAX_NAME = 100

#: Fields that hold (a part of) the prompt in other formats, and the type that reads them.
_PROMPTS = {
    "instruction": "alpaca",
    "question": "alpaca_chat.load_qa",
    "messages": "chat_template",
    "conversations": "chat_template",
    **dict.fromkeys(("prompt", "query", "context", "system", "system_prompt", "history")),
}

# LUME: `"<uuid>"sc1`, `<uuid>qa0`, `67148749sc1`. After a letter it is the end of a word, as in
# `misc3`, unless that is the last one of a UUID.
_SUFFIX = re.compile(r"(?:(?<![^\W\d_])|(?<=-[0-9a-f]{12}))(sc|qa)\d+$")
_LIKE_SUFFIX = re.compile(r"(sc|qa)\d+$")


#: Raw rows, each with its place in its file, e.g. "line 3".
Rows = Iterable[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Record:
    """One row: a prompt and what the model answered it with when it memorised it."""

    id: str
    input: str
    output: str
    task: str = ""
    kind: Kind = "completion"
    source: str = ""
    author: str = ""

    @property
    def document(self) -> str:
        """The document the row was made from, for cluster bootstraps and the audit list.

        The row's field ``document``, else its id without ``sc1`` or ``qa0``.
        """
        return self.source or document_id(self.id)

    @property
    def cluster(self) -> str:
        """Its author, of whose rows none is independent, else its document."""
        return f"author: {self.author}" if self.author else self.document

    @property
    def said(self) -> tuple[str, str]:
        """What it says, equal for rows that differ in characters alone."""
        return normal_form(self.input).strip(), normal_form(self.output).strip()

    @property
    def content(self) -> dict[str, str]:
        return {"input": self.input, "output": self.output}

    @property
    def task_number(self) -> int:
        """3 for "Task3"; see `axolotl_unlearn.columns.task_number`."""
        return task_number(self.task)


def document_id(record_id: str) -> str:
    """The id without its ``sc1`` or ``qa0`` ending: rows of one document share it."""
    return _SUFFIX.sub("", record_id) or record_id


def is_made_up(record_id: str) -> bool:
    """True for the id of a row without one in its file, which says nothing about other files."""
    return re.fullmatch(r"row\d+", record_id) is not None


def kind_of(record_id: str) -> Kind | None:
    """Kind by the id's ending (sc: sentence completion, qa: question), or None without one."""
    match = _SUFFIX.search(record_id)
    return None if match is None else ("completion" if match[1] == "sc" else "question")


def is_ambiguous(record_id: str) -> bool:
    """True for an id such as ``misc3``, whose ending is taken for a part of its name."""
    return kind_of(record_id) is None and _LIKE_SUFFIX.search(record_id) is not None


def read_records(
    path: str | os.PathLike[str],
    fields: Fields | None = None,
    *,
    unique: bool = True,
    kind: Kind = "completion",
) -> list[Record]:
    """All records of a file, in its order.

    The kind is that of a field ``kind`` ("completion" or "question"); without one the id's ending
    tells it (``sc1``, ``qa0``), else it is ``kind``. A file in which no row has an id or a
    task is accepted if the field names are the default ones: ids become ``row0``, ``row1`` ...

    Args:
        path: ``.jsonl``, ``.json`` (a list of records, or JSON lines) or ``.parquet``.
        unique: Refuse an id that occurs twice. A memorisation stream repeats its rows.
        kind: That of rows which do not tell.

    Raises:
        UnlearnError: The first fault of the file.
    """
    return list(records_from_rows(read_rows(path), str(path), fields, unique=unique, kind=kind))


def records_from_rows(
    rows: Rows,
    source: str,
    fields: Fields | None = None,
    *,
    unique: bool = True,
    kind: Kind = "completion",
) -> Iterator[Record]:
    """Validate raw rows."""
    fields = fields or Fields()
    rows = list(rows)
    if not rows:
        raise UnlearnError(
            f"{source} has no rows; it needs at least one record.", code="data.no-rows"
        )
    present = {key for _, row in rows for key in row}
    for name in ("document", "input", "output"):
        require_named(fields, name, present, source)
    optional = {n for n in ("id", "task") if getattr(fields, n) == n and n not in present}
    places: dict[str, str] = {}
    for number, (place, row) in enumerate(rows):
        where = f"{source}, {place}"
        _refuse_unread(row, fields, where)
        record_id = (
            f"row{number}"
            if "id" in optional
            else text_of(row, "id", fields, where, number_ok=True)
        )
        if unique:
            own_id(places, record_id, source, place)
        output = text_of(row, "output", fields, where)
        require_filled(output, fields.output, where)
        task = "" if "task" in optional else text_of(row, "task", fields, where, number_ok=True)
        prompt = text_of(row, "input", fields, where)
        if row.get("kind") not in (None, *KINDS):
            raise UnlearnError(
                f"{where}: field 'kind' must be 'completion' or 'question'.", code="data.kind"
            )
        yield Record(
            id=record_id,
            input=prompt,
            output=output,
            task=task,
            kind=row.get("kind") or kind_of(record_id) or kind,
            source=document_of(row.get(fields.document)),
            author=document_of(row.get("author")),
        )


def require_named(fields: Fields, name: str, present: Collection[str], source: str) -> None:
    """Refuse a field that a config names and that no row has; by its own name it may be absent."""
    field = getattr(fields, name)
    if field != name and field not in present:
        raise UnlearnError(
            f"{source}: no row has the field {field!r} (there are {', '.join(sorted(present))}); "
            f"correct the file or `unlearn.data.fields.{name}`.",
            code="data.no-such-field",
        )


def own_id(places: dict[str, str], name: str, source: str, place: str) -> None:
    if name in places:
        raise UnlearnError(
            f"{source}, {place}: the id {short(name)} is already that of {places[name]}; give "
            "every row its own id.",
            code="data.id-twice",
        )
    places[name] = place


def _refuse_unread(row: Mapping[str, Any], fields: Fields, where: str) -> None:
    """Refuse a row with text in a field that other formats read and these `fields` do not."""
    read = (fields.id, fields.input, fields.output, fields.task, fields.document)
    # What Alpaca's rows have beside the instruction.
    more = {"input": "alpaca"} if fields.input == "instruction" else {}
    for field, kind in (_PROMPTS | more).items():
        if field not in read and isinstance(row.get(field), (str, list)) and row[field]:
            reads = f"{{type: {kind}}}" if kind else "{type: ...}"
            raise UnlearnError(
                f"{where}: field {field!r} holds text that is not read; read such rows by "
                f"`unlearn.data.rows: {reads}`, name the field in `unlearn.data.fields`, or remove "
                "it.",
                code="data.unread-field",
            )


def guessed(path: str | os.PathLike[str], chat: bool) -> tuple[dict[str, Any], str]:
    """A block ``unlearn.data`` that reads a file as its first row looks, and what it says in words.

    Args:
        chat: Whether the model has a chat template, by which questions are asked.

    Raises:
        UnlearnError: A file without a readable row.
    """
    row = next((row for _, row in read_rows(path)), {})
    turns = [name for name, part in row.items() if isinstance(part, list) and part
             and isinstance(part[0], Mapping) and {"role", "from"} & {*part[0]}]  # fmt: skip
    named = [name for name in ("messages", "conversations") if row.get(name)]
    listed = next(iter(named or (turns if len(turns) == 1 else ())), None)
    if listed:
        entry: dict[str, Any] = {"type": "chat_template", "field_messages": listed}
        turn = row[listed][0] if isinstance(row[listed], list) else {}
        if isinstance(turn, Mapping) and "from" in turn:
            entry["message_property_mappings"] = {"role": "from", "content": "value"}
        return {"rows": entry}, f"conversations in {listed!r}, by the model's chat template"
    if row.get("instruction") and "output" in row:
        return {"rows": {"type": "alpaca"}}, "instructions, by the prompt of Alpaca"
    asked = {"chat_template": True} if chat else {"labels": {"completion": "answer"}}
    how = "by the chat template" if chat else "joined by a space; the answer has labels"
    for question in ("question", "prompt", "query"):
        answer = next((n for n in ("answer", "response", "completion", "output") if n in row), None)
        if isinstance(row.get(question), str) and answer:
            names = {"input": question, "output": answer}
            return {"fields": names, **asked}, f"{question!r} and {answer!r}, {how}"
    if isinstance(row.get("text"), str) and "input" not in row:
        return {"rows": {"type": "completion"}}, "plain texts in 'text', labelled whole"
    lacks = ", which its first row lacks: correct the config"
    lacks *= not {"input", "output"} <= {*row}
    return {}, f"'input' and 'output', joined by a space{lacks}"


def document_name(value: Any) -> str:
    """A field that is a name; nothing where a text stands there."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return ""
    name = str(value).strip()
    return name if len(name) <= MAX_NAME and name.isprintable() else ""


def document_of(value: Any) -> str:
    """The name of a document, or of a text that stands in its place a hash: rows of one document
    stay together. Nothing where the field is empty."""
    name = document_name(value)
    if name or value != value or value in (None, [], {}) or not str(value).strip():  # NaN, too
        return name
    return f"text {hashlib.sha256(str(value).encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def both_sides(
    forget: str, rows: Iterable[Record], other: str, others: Iterable[Record], cure: str
) -> str:
    """What is said of rows of a forget file that have input and output of rows of another; ""."""
    known = {(one.input, one.output): n for n, one in enumerate(others, 1)}
    texts = [(one.input, one.output) for one in rows]
    if not (both := [(n, known[text]) for n, text in enumerate(texts, 1) if text in known]):
        return ""
    return (
        f"{forget} and {other} have rows in common: {len(both)} (the first is row {both[0][0]} "
        f"here, row {both[0][1]} there); {cure}."
    )


#: What to do about rows of the forget side and of the retain side.
KEPT = "a row cannot be forgotten and kept: remove them from one side"


def text_of(
    row: Mapping[str, Any], name: str, fields: Fields, where: str, number_ok: bool = False
) -> str:
    """The field as text; ids and tasks may be whole numbers."""
    field = getattr(fields, name)
    value = row.get(field)
    if value is None:
        state = "is null" if field in row else "is missing"
        raise UnlearnError(
            f"{where}: field {field!r} {state}{nearest(field, set(row) - {field})}; correct the "
            f"file or set `unlearn.data.fields.{name}` to the name it uses.",
            code="data.field-missing",
        )
    if number_ok and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    require_unicode(value, field, where)
    return value


def require_unicode(value: Any, field: str, where: str) -> None:
    """Refuse what is no text that a tokenizer reads."""
    if not isinstance(value, str):
        raise UnlearnError(
            f"{where}: field {field!r} is of type {type(value).__name__} but must be a text.",
            code="data.field-type",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnlearnError(
            f"{where}: field {field!r} holds half of a surrogate pair (character {error.start}), "
            "which no tokenizer reads; write the file again as UTF-8.",
            code="data.not-unicode",
        ) from None


def require_filled(value: str, field: str, where: str) -> None:
    if not value.strip():
        raise UnlearnError(
            f"{where}: field {field!r} is empty; fill it or remove the row.",
            code="data.field-empty",
        )


def short(value: Any) -> str:
    """An id or a name in a message: its beginning, with everything that does not print escaped."""
    text = str(value)
    return ascii(text if len(text) <= MAX_NAME else text[: MAX_NAME - 3] + "...")


def nearest(name: str, known: Iterable[str]) -> str:
    # Names only: a key that is a text is none, and nobody reads a hundred of them.
    names = sorted(k for k in map(str, known) if len(k) <= 40)[:20]
    listed = f" (the row has {', '.join(short(k)[1:-1] for k in names)})" if names else ""
    return meant(name, names) or listed


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a JSON lines file that a command of ours wrote; it may have none.

    Raises:
        UnlearnError: The first line that is no JSON object, or bytes that are not UTF-8.
    """
    path = Path(path)
    return [dict(row) for _, row in _line_rows(read_text(path), path)]


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, row) of a file of any format, with no demand on the fields of a row.

    Raises:
        UnlearnError: The first fault of the file.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise UnlearnError(
            f"{path} does not exist; check the path (relative paths start from "
            f"{Path.cwd().name or 'the working folder'}/).",
            code="data.no-file",
        )
    if path.is_dir():
        raise UnlearnError(
            f"{path} is a folder; name one of its files ({', '.join(SUFFIXES)}).",
            code="data.is-a-folder",
        )
    if path.suffix not in SUFFIXES:
        raise UnlearnError(
            f"{path} has the ending {path.suffix!r}; records are read from {', '.join(SUFFIXES)}.",
            code="data.ending",
        )
    if path.stat().st_size == 0:
        raise UnlearnError(f"{path} is empty; it needs at least one record.", code="data.no-rows")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    text = read_text(path)
    if text.lstrip()[:1] == "[":
        rows = enumerate(_parse(text, path), start=1)
        yield from (_as_row(row, f"record {number}", path) for number, row in rows)
    else:
        yield from _line_rows(text, path)


def read_text(path: Path) -> str:
    """A file in UTF-8, with or without a byte order mark.

    Raises:
        UnlearnError: Names the line that is not UTF-8.
    """
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UnlearnError(
            f"{path}, line {line}: byte {error.start} is not UTF-8; save the file as UTF-8.",
            code="data.not-utf-8",
        ) from None


def _parse(text: str, path: Path, cure: str = "correct that line", line: int = 0) -> Any:
    """One JSON value; ``line`` is its place where the text is a line of the file."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice.extend(name for name in row if names.count(name) > 1)
        return row

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        number, reason = line or error.lineno, error.msg
    except RecursionError:
        number, reason = line or 1, "nested too deeply"
    except ValueError:  # Python refuses to read it, so that nobody waits for minutes
        number, reason = line or 1, "a number of thousands of digits"
    else:
        if not twice:
            return value
        raise UnlearnError(
            f"{path}, {f'line {line}' if line else 'a record'}: the key {short(twice[0])} stands "
            "twice in one object, and only the last one would be read; remove one of them.",
            code="data.key-twice",
        )
    raise UnlearnError(
        f"{path}, line {number}: not valid JSON ({reason}); {cure}.", code="data.not-json"
    )


def _line_rows(text: str, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Not splitlines: JSON text may hold other line separators (U+2028) as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = _parse(line, path, "JSON lines hold one record a line", number)
        yield _as_row(row, f"line {number}", path)


def _as_row(row: Any, place: str, path: Path) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(row, dict):
        raise UnlearnError(
            f"{path}, {place}: a record must be an object with fields, not {type(row).__name__}.",
            code="data.not-an-object",
        )
    return place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")[:200]
        raise UnlearnError(
            f"{path} is not a parquet file ({reason}); write it again.", code="data.not-parquet"
        ) from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", row
