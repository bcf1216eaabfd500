"""What a data folder for evaluation holds, read and checked before any model is loaded.

    forget, retain      records (id, input, output, task)
    member, nonmember   documents (id, document): members were memorised, non-members never seen;
                        with a field prompt what follows it, as a chat model learned it
    general             questions with options (question, choices, answer): utility
    canaries            documents with a coin (included: true or false), see `evaluation.canaries`

Files may end in .jsonl, .json or .parquet. Only forget, retain, member and nonmember are needed.
TOFU's are read as they are published: rows of question and answer, forget10 and retain90 for forget
and retain (with `_perturbed` where that is there alone).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from axolotl_unlearn.config import FieldArgs
from axolotl_unlearn.data import records as reading
from axolotl_unlearn.data.documents import author_of, read_documents, with_prompt
from axolotl_unlearn.data.records import SUFFIXES, Record, document_id, kind_of
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.canaries import NAME, read_coins
from axolotl_unlearn.metrics.intervals import Cluster
from axolotl_unlearn.metrics.results import MADE_UP
from axolotl_unlearn.metrics.semeval import CELLS, TASKS, cell
from axolotl_unlearn.store import file_digest

DEFAULT_DATA_DIR = "examples/demo"
#: What can be asked for: rows, membership, utility, rows by coin.
PARTS = ("tasks", "mia", "mmlu", "coins")
#: With fewer texts a side an AUC is noise: its standard error is about 0.1 at 20 against 20.
MIN_MEMBERS = 20

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One generated row: its cell and its record."""

    cell: str
    side: str
    record: Record

    @property
    def key(self) -> str:
        return f"{self.side}/{self.record.id}"


@dataclass(frozen=True)
class Option:
    """A question with options; the option with the highest log-probability is the answer given.

    Attributes:
        continuations: the texts whose log-probability after `context` is compared.
        subject: the group that the question names.
    """

    id: str
    context: str
    continuations: tuple[str, ...]
    answer: int
    subject: str = ""


@dataclass(frozen=True)
class EvaluationSets:
    """Everything that is evaluated, in the order of the files; texts as (id, text)."""

    folder: Path
    forget: list[Record]
    retain: list[Record]
    member: list[tuple[str, str]]
    nonmember: list[tuple[str, str]]
    utility: list[Option] = field(default_factory=list)
    canaries: list[tuple[str, str]] = field(default_factory=list)
    coins: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def rows(self) -> list[Row]:
        """All generated rows, interleaved over the cells, so that a prefix has rows of each."""
        groups: dict[str, list[Row]] = {name: [] for name in CELLS}
        for side in ("forget", "retain"):
            for record in getattr(self, side):
                name = cell(side, task_of(record), record.kind)
                groups[name].append(Row(name, side, record))
        return interleave(groups.values())

    @functools.cached_property
    def documents(self) -> list[tuple[str, str, str]]:
        """("member" or "nonmember", id, text), interleaved."""
        return interleave(
            [(side, name, text) for name, text in getattr(self, side)]
            for side in ("member", "nonmember")
        )

    @functools.cached_property
    def questions(self) -> list[Option]:
        """Of utility, interleaved over their subjects."""
        groups: dict[str, list[Option]] = {}
        for one in self.utility:
            groups.setdefault(one.subject, []).append(one)
        return interleave(groups.values())

    def limited(self, limit: int | None) -> EvaluationSets:
        """The first `limit` generated rows, documents and utility questions (for trying out);
        itself where it has no more."""
        if limit is not None and limit < 1:
            raise UnlearnError(f"--limit is {limit}; it must be 1 or more.", code="eval.limit")
        if limit is None or limit >= max(map(len, (self.rows, self.documents, self.utility))):
            return self
        rows, documents = self.rows[:limit], self.documents[:limit]
        kept = {s: [r.record for r in rows if r.side == s] for s in ("forget", "retain")}
        for side in ("member", "nonmember"):
            kept[side] = [(name, text) for its, name, text in documents if its == side]
        note = f"at most {limit} each of rows, documents and questions: scores are rough"
        return replace(self, **kept, utility=self.questions[:limit], notes=[*self.notes, note])

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content: the same rows in other files give the same digest."""
        content = [
            [(r.id, r.input, r.output, task_of(r), r.kind) for r in side]
            for side in (self.forget, self.retain)
        ]
        content += [self.member, self.nonmember]
        content += [[(o.context, o.continuations, o.answer) for o in self.utility]]
        texts = [*self.member, *self.nonmember, *self.canaries]
        prompts = [getattr(text, "prompt", "") for _, text in texts]
        content += [prompts] if any(prompts) else []
        content += [self.canaries] if self.canaries else []  # what is measured; not the coins
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def data_digests(
    folder: str | os.PathLike[str],
    sides: Sequence[str] = ("forget", "retain", "member", "nonmember"),
) -> dict[str, str]:
    """SHA-256 of the file of each side that is there."""
    found = {side: find_file(Path(folder), side) for side in sides}
    return {side: file_digest(path) for side, path in found.items() if path is not None}


def cluster_of(side: str, name: str, text: str) -> Cluster:
    """What a text is not independent of: its author, else its document."""
    author, document = author_of(text), document_id(name)
    return Cluster(f"author: {author}" if author else f"{side}: {document}", document)


def clusters_of(
    members: Sequence[tuple[str, str]], nonmembers: Sequence[tuple[str, str]], name: str = "member"
) -> tuple[list[Cluster], list[Cluster]]:
    """`cluster_of` of members, called so, and of non-members; equal texts are one observation."""
    return tuple(
        as_one((with_prompt(text), cluster_of(side, key, text)) for key, text in texts)
        for side, texts in ((name, members), ("nonmember", nonmembers))
    )


def as_one(each: Iterable[tuple[Hashable, T]]) -> list[T]:
    """The cluster of each (texts, cluster): that of the first with these texts, which are one
    observation."""
    first: dict[Hashable, T] = {}
    return [first.setdefault(*one) for one in each]


def interleave(groups: Iterable[Sequence[T]]) -> list[T]:
    """One of each group in turn: [a1, b1, c1, a2, b2, ...]; groups may have unequal length."""
    return [item for one in zip_longest(*groups) for item in one if item is not None]


def task_of(record: Record) -> int:
    """Task number of a record; rows of a file that names no tasks count as task 1."""
    return record.task_number if record.task.strip() else 1


def load_sets(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    min_members: int = MIN_MEMBERS,
    parts: Sequence[str] = PARTS,
    join: str = " ",
    canaries: str | os.PathLike[str] | None = None,
) -> EvaluationSets:
    """Read and check a data folder, by default the demo's.

    Args:
        min_members: Refuse fewer members or non-members than this.
        parts: Which of `PARTS` are needed; files of the others are not read.
        join: Between input and output of a document that is a row.
        canaries: A file of them in place of the data folder's.

    Raises:
        UnlearnError: The first fault found: file, row or key, and the cure.
    """
    folder = Path(data_dir or DEFAULT_DATA_DIR)
    check_folder(folder)
    notes: list[str] = []
    sides: dict[str, list[Any]] = {"forget": [], "retain": [], "member": [], "nonmember": []}
    if "tasks" in parts:
        sides |= {side: _records(folder, side, notes) for side in ("forget", "retain")}
        paths = [str(need_file(folder, side)) for side in ("forget", "retain")]
        rows = sides["forget"], sides["retain"]
        if says := reading.both_sides(paths[0], rows[0], paths[1], rows[1], reading.KEPT):
            raise UnlearnError(says, code="data.both-sides")
    if "mia" in parts:
        sides |= {s: _documents(folder, s, min_members, join) for s in ("member", "nonmember")}
        texts = {with_prompt(text): name for name, text in sides["member"]}
        others = [(with_prompt(text), name) for name, text in sides["nonmember"]]
        if twins := [(texts[x], name) for x, name in others if x in texts]:
            first, second = twins[0]
            raise UnlearnError(
                f"{folder}: {len(twins)} texts are both member and non-member (first: {first!r} "
                f"and {second!r}); a text that was memorised is no non-member: remove it from "
                "nonmember.",
                code="eval.both-sides",
            )
        known = {name for name, _ in sides["member"] if not MADE_UP.fullmatch(name)}
        if twice := sorted(name for name, _ in sides["nonmember"] if name in known):
            raise UnlearnError(
                f"{folder}: {len(twice)} ids stand in member.jsonl and in nonmember.jsonl (first: "
                f"{twice[0]!r}); give each file ids of its own.",
                code="eval.same-ids",
            )
    general = find_file(folder, "general") if "mmlu" in parts else None
    utility = read_options(general) if general else []
    if "mmlu" in parts and not utility:
        notes.append(no_utility(folder))
    path = canaries or find_file(folder, NAME) if "coins" in parts else None
    coins, rows = (read_coins(path), read_documents(path, join=join)) if path else ([], [])
    sets = EvaluationSets(folder, **sides, utility=utility, notes=notes, canaries=rows, coins=coins)
    if "tasks" in parts:
        for side in ("forget", "retain"):
            rows = sides[side]
            alone = len({row.document for row in rows}) == len(rows) > 1
            # Own ids make every row a document of its own, and intervals too narrow if it is not.
            if alone and not any(row.source or kind_of(row.id) for row in rows):
                notes.append(
                    f"every row of {side} counts as a document of its own; if several rows are "
                    "made from one text, name it in a field `document`, or intervals are too narrow"
                )
        present = {row.cell for row in sets.rows}
        if absent := [name for name in CELLS if name not in present]:
            notes.append(
                f"no rows for {', '.join(absent)}: n/a; the harmonic mean runs over "
                f"{len(present)} of 12 cells"
            )
    return sets


def read_options(path: str | os.PathLike[str]) -> list[Option]:
    """Four-option questions: question, choices (texts), answer (0-based index), perhaps a group.

    The options' texts are compared, ``question + " " + option``, not letters.
    """
    options = []
    for place, row in reading.read_rows(path):
        question, choices, answer = (row.get(k) for k in ("question", "choices", "answer"))
        texts = choices if isinstance(choices, list) else []
        texts = [one.strip() for one in texts if isinstance(one, str) and one.strip()]
        faults = {
            "field 'question' must be a text that is not empty":
                not isinstance(question, str) or not question.strip(),
            "field 'choices' must be a list of two or more texts, all different":
                len(set(texts)) < 2 or len(set(texts)) < len(choices),
            f"field 'answer' must be the number of a choice, from 0 to {len(texts) - 1}":
                type(answer) is not int or not 0 <= answer < len(texts),
        }  # fmt: skip
        if fault := next((says for says, is_so in faults.items() if is_so), None):
            raise UnlearnError(f"{path}, {place}: {fault}.", code="eval.bad-question")
        name, group = str(row.get("id", f"row{len(options)}")), str(row.get("group", ""))
        following = tuple(f" {choice}" for choice in texts)
        options.append(Option(name, question.strip(), following, answer, group))
    return options


def no_utility(folder: Path) -> str:
    return (
        f"no utility: {folder} has no general.jsonl (question, choices, answer); until there is "
        "one, utility and Aggregate are n/a"
    )


def find_file(folder: Path, name: str) -> Path | None:
    """``folder/name`` with any readable ending, else TOFU's file of that part.

    Raises:
        UnlearnError: Several files are that part.
    """
    for form in ("", "[0-9][0-9]", "_perturbed", "[0-9][0-9]_perturbed"):
        there = (path for end in SUFFIXES for path in folder.glob(f"{name}{form}{end}"))
        if len(found := sorted(path for path in there if path.is_file())) > 1:
            raise UnlearnError(
                f"{folder} has {found[0].name} and {found[1].name}; leave one of them there.",
                code="eval.two-files",
            )
        if found:
            return found[0]
    return None


def check_folder(folder: Path) -> None:
    """Raises UnlearnError where there is no such data folder."""
    if folder.is_dir():
        return
    what = "is a file" if folder.is_file() else "does not exist"
    raise UnlearnError(
        f"the data folder {folder} {what}; name one with forget.jsonl, retain.jsonl, member.jsonl "
        'and nonmember.jsonl: `--data DIR` (in lm_eval `--metadata \'{"data_dir": "DIR"}\'`).',
        code="eval.no-folder",
    )


def need_file(folder: Path, name: str) -> Path:
    """`find_file`; raises UnlearnError where the folder or the file is not there."""
    check_folder(folder)
    if path := find_file(folder, name):
        return path
    needed = {
        "member": "documents that the model memorised (id, document)",
        "nonmember": "documents it has never seen (id, document)",
    }.get(name, "records with id, input, output, task")
    needed += "; or measure no membership: `--min-members 0`" * ("member" in name)
    raise UnlearnError(
        f"{folder} has no {name}.jsonl (.json, .parquet): {needed}.", code="eval.no-file"
    )


def side_records(path: str | os.PathLike[str]) -> list[Record]:
    """Rows of a file, TOFU's as they are published."""
    asked = all("question" in row and "input" not in row for _, row in reading.read_rows(path))
    fields = FieldArgs(input="question", output="answer") if asked else None
    return reading.read_records(path, fields, kind="question" if asked else "completion")


def _records(folder: Path, side: str, notes: list[str]) -> list[Record]:
    path = need_file(folder, side)
    records = side_records(path)
    without_task = all(not record.task.strip() for record in records)
    if without_task:
        notes.append(f"{path} names no tasks: all its rows count as task 1")
    for record, (place, row) in zip(records, reading.read_rows(path), strict=True):
        if kind_of(record.id) is None and row.get("kind") is None and "input" in row:
            raise UnlearnError(
                f"{path}, {place}: the id {record.id!r} ends in neither sc<number> (sentence "
                "completion) nor qa<number> (question), so its score is unknown; end the id so, "
                'or add a field `kind` ("completion" or "question").',
                code="eval.no-kind",
            )
        if not without_task and record.task_number not in TASKS:
            raise UnlearnError(
                f"{path}, {place}: task {record.task!r} is none of Task1, Task2, Task3, which "
                "the official cells are made of; rename it.",
                code="eval.no-task",
            )
    return records


def _documents(folder: Path, name: str, least: int, join: str) -> list[tuple[str, str]]:
    path = need_file(folder, name)
    documents = read_documents(path, join=join)
    if len(documents) < least:
        raise UnlearnError(
            f"{path} has {len(documents)} documents; an AUC needs at least {least} a side to mean "
            "anything: add documents of the same kind.",
            code="eval.few-documents",
        )
    for identifier, text in documents:
        if text != text.lstrip():
            raise UnlearnError(
                f"{path}: document {identifier!r} starts with white space, which is not what a "
                "model memorised; strip it.",
                code="eval.white-space",
            )
    return documents
