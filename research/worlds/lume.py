"""A subset of LUME, the public data of SemEval-2025 Task 4, document by document.

A document is on one side only, with all its rows; the non-members are documents of the same split
and kind that no run ever sees, so membership is measured against texts of one distribution. No
text of the data is part of this repository, and none is written to a log.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from axolotl_unlearn.data.records import Record, document_id, read_records, read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from research.worlds.generate import _stream, _write

TASKS = ("Task1", "Task2", "Task3")
BATCH = 12  # micro_batch_size of examples/smollm2/memorise.yml; the stream is cut for it
LUME_HINT = (
    "the public data set of SemEval-2025 Task 4 (LUME, arXiv 2502.15097): a folder with "
    "train/forget.jsonl and train/retain.jsonl"
)


@dataclass(frozen=True)
class RealSizes:
    """Documents a side, and the stream of memorisation.

    Attributes:
        words: A document keeps the last whole sentences of its `input` up to so many words (and
            all of its `output`), which halves the work; questions are untouched.
        background_stories, background_pii, background_facts: Further documents, of which each is
            read once in memorisation and which are retain rows of the forgetting runs: texts like
            the forget set's that nobody wants forgotten. Without them the common style goes first.
        passes: How often memorisation sees every row.
        pii_repeats: How often a pass sees the rows of Task 2 (names, numbers, addresses).
    """

    stories: int = 12
    pii: int = 10
    facts_forget: int = 40
    facts_retain: int = 25
    nonmembers: int = 120
    background_stories: int = 30
    background_pii: int = 20
    background_facts: int = 80
    words: int = 50
    passes: int = 8
    pii_repeats: int = 2

    def counts(self, side: str) -> dict[str, int]:
        facts = self.facts_forget if side == "forget" else self.facts_retain
        return dict(zip(TASKS, (self.stories, self.pii, facts), strict=True))

    @property
    def background(self) -> dict[str, int]:
        counts = (self.background_stories, self.background_pii, self.background_facts)
        return dict(zip(TASKS, counts, strict=True))


def last_sentences(text: str, words: int) -> str:
    """The last whole sentences of a text, at most ``words`` words, at least one sentence."""
    kept: list[str] = []
    for sentence in reversed(re.split(r"(?<=[.!?])\s+", text.strip())):
        if kept and len(" ".join([sentence, *kept]).split()) > words:
            break
        kept.insert(0, sentence)
    return " ".join(kept)


def _documents(path: Path, words: int) -> dict[str, dict[str, list[Record]]]:
    """Task -> document id -> rows, the completions cut to their last sentences."""
    by_task: dict[str, dict[str, list[Record]]] = {task: {} for task in TASKS}
    for record in read_records(path):
        if record.task not in by_task:
            raise UnlearnError(
                f"{path}: the row {record.id} is of task {record.task!r}, not one of "
                f"{', '.join(TASKS)}; give the folder of the SemEval/LUME release."
            )
        if record.kind == "completion":
            record = replace(record, input=last_sentences(record.input, words))
        by_task[record.task].setdefault(document_id(record.id), []).append(record)
    return by_task


def _completion(rows: Sequence[Record]) -> Record:
    return next(r for r in rows if r.kind == "completion")


def _document(row: Record) -> dict[str, str]:
    """The document itself: its completion row, joined."""
    return {"id": document_id(row.id), "document": f"{row.input} {row.output}"}


def _row(record: Record) -> dict[str, str]:
    return {"id": record.id, "input": record.input, "output": record.output, "task": record.task}


def rows_of(folder: Path, words: int) -> list[dict[str, str]]:
    """All rows of ``forget.jsonl`` and ``retain.jsonl``, cut as those of a subset."""
    sides = (_documents(folder / f"{side}.jsonl", words) for side in ("forget", "retain"))
    found = [rows for side in sides for of_task in side.values() for rows in of_task.values()]
    return [_row(record) for rows in found for record in rows]


def build_subset(
    lume: Path | str,
    out: Path | str,
    tofu: Path | str | None = None,
    sizes: RealSizes = RealSizes(),  # noqa: B008 (frozen)
    seed: int = 0,
) -> dict:
    """Write the subset in the layout that evaluation reads, and the memorisation stream.

    Files: forget, retain (rows), background (completions alone, fewer than asked for if there are
    no more), member, nonmember (documents of Task 3: those of the forget rows, and unseen ones),
    memorise (every pass in training order), retrain (the same without the forget set), general
    (four-option questions, if ``tofu`` is given), manifest.json.

    Args:
        lume: Folder with train/forget.jsonl and train/retain.jsonl.
        tofu: Folder with real_authors_perturbed.jsonl and world_facts_perturbed.jsonl.

    Raises:
        UnlearnError: If a folder lacks a file, or the data set has too few documents.
    """
    lume, out = Path(lume), Path(out)
    sides: dict[str, list[Record]] = {}
    members: list[dict] = []
    unused: dict[str, list[Record]] = {task: [] for task in TASKS}
    for side in ("forget", "retain"):
        path = lume / "train" / f"{side}.jsonl"
        if not path.is_file():
            raise UnlearnError(
                f"{path} does not exist; set LUME_DIR (or --lume) to the folder of {LUME_HINT}."
            )
        by_task = _documents(path, sizes.words)
        sides[side] = []
        for task, count in sizes.counts(side).items():
            names = sorted(by_task[task])
            random.Random(f"{seed}/{side}/{task}").shuffle(names)
            if len(names) < count:
                raise UnlearnError(
                    f"{path} has {len(names)} documents of {task} but {count} are asked for; "
                    "give the whole data set or smaller sizes."
                )
            for name in names[:count]:
                sides[side] += by_task[task][name]
            unused[task] += [_completion(by_task[task][name]) for name in names[count:]]
            if task == "Task3" and side == "forget":
                members = [_document(_completion(by_task[task][name])) for name in names[:count]]
    for task in TASKS:
        random.Random(f"{seed}/unused/{task}").shuffle(unused[task])
    nonmembers, unused["Task3"] = (
        unused["Task3"][: sizes.nonmembers],
        unused["Task3"][sizes.nonmembers :],
    )
    background = [row for task, n in sizes.background.items() for row in unused[task][:n]]
    learned = sides["forget"] + sides["retain"]
    contents: dict[str, list[dict]] = {
        "forget": [_row(r) for r in sides["forget"]],
        "retain": [_row(r) for r in sides["retain"]],
        "background": [_row(r) for r in background],
        "member": members,
        "nonmember": [_document(r) for r in nonmembers],
        "memorise": stream(learned, sizes, seed, background),
        "retrain": stream(sides["retain"], sizes, seed, background),
    }
    if tofu is not None:
        contents["general"] = list(general_questions(Path(tofu), seed))
    files = {name: _write(out / f"{name}.jsonl", rows) for name, rows in contents.items()}
    manifest = {"seed": seed, "sizes": asdict(sizes), "files": files}
    write_json(out / "manifest.json", manifest)
    return manifest


def stream(
    rows: Sequence[Record], sizes: RealSizes, seed: int, background: Sequence[Record] = ()
) -> list[dict[str, str]]:
    """Every pass in training order; each has its own share of the ``background``."""
    rng = random.Random(f"{seed}/memorise")
    fresh = [_row(row) for row in rng.sample(list(background), len(background))]
    shares = [fresh[number :: sizes.passes] for number in range(sizes.passes)]
    return _stream(rng, sizes, [_row(row) for row in rows], shares, BATCH)


def general_questions(tofu: Path, seed: int = 0) -> Iterator[dict]:
    """TOFU's real authors and world facts as questions with four options, the order shuffled.

    Raises:
        UnlearnError: If the folder lacks a file.
    """
    for name in ("real_authors", "world_facts"):
        path = tofu / f"{name}_perturbed.jsonl"
        if not path.is_file():
            raise UnlearnError(
                f"{path} does not exist; set TOFU_DIR (or --tofu) to a folder with TOFU's "
                "real_authors_perturbed.jsonl and world_facts_perturbed.jsonl, or leave it out."
            )
        for number, (place, row) in enumerate(read_rows(path)):
            options = [row.get("answer"), *row.get("perturbed_answer", [])]
            if len(options) != 4 or not all(isinstance(o, str) and o for o in options):
                raise UnlearnError(
                    f"{path}, {place}: a question needs 'answer' and three 'perturbed_answer'."
                )
            order = random.Random(f"{seed}/{name}/{number}").sample(range(4), 4)
            yield {
                "id": f"{name}{number}",
                "question": row["question"],
                "choices": [options[i] for i in order],
                "answer": order.index(0),
            }


def add_halves(out: Path | str, seed: int = 0) -> dict:
    """Beside a subset: what evaluation reads of it as ``validation/`` and ``test/``, halves by
    document within each task; a member goes with its forget rows.

    Args:
        out: Folder that `build_subset` has written.
    """
    out = Path(out)

    def documents(name: str) -> dict[str, dict[str, list[dict]]]:
        """Task -> document -> its rows."""
        found: dict[str, dict[str, list[dict]]] = {}
        for _, row in read_rows(out / f"{name}.jsonl") if (out / f"{name}.jsonl").exists() else ():
            of_task = found.setdefault(row.get("task", ""), {})
            of_task.setdefault(document_id(str(row["id"])), []).append(row)
        return found

    files = {}
    chosen: set[str] = set()
    for name in ("forget", "retain", "nonmember", "general", "member"):
        halves: tuple[list[dict], list[dict]] = ([], [])
        for task, found in documents(name).items():
            if name != "member":
                draw = random.Random(f"{seed}/half/{name}/{task}")
                chosen |= set(draw.sample(sorted(found), len(found) // 2))
            for document, rows in found.items():
                halves[document not in chosen].extend(rows)
        for half, rows in zip(("validation", "test"), halves, strict=True):
            if rows:
                files[f"{half}/{name}"] = _write(out / half / f"{name}.jsonl", rows)
    return files
