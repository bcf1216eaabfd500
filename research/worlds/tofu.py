"""TOFU (arXiv 2401.06121): the rows that a job learns, forgets, holds out and scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_lines
from eval_tasks.tofu.utils import PARTS, TEMPLATE, read_set

QUESTION = ("question", "answer")
FULL = (*QUESTION, "paraphrased_answer", "perturbed_answer")
#: Of one author, one after the other.
ROWS = 20


def write_data(out: Path, tofu: Path, sizes: Any) -> None:
    """Training rows as TOFU has them, and the sets that the task reads.

    Args:
        out: Folder of the rows.
        sizes: `research.studies.tofu.TofuSizes`.

    Raises:
        UnlearnError: TOFU has too few retain rows to hold some out.
    """
    forget, retain90 = _forget(tofu, sizes), read_set("retain90", tofu, QUESTION)
    unseen = retain90[sizes.retain :]
    if len(unseen) < sizes.heldout + sizes.rows:
        raise UnlearnError(
            f"{tofu}/retain90.jsonl has {len(retain90)} rows, {sizes.retain} to learn and "
            f"{sizes.heldout + sizes.rows} to hold out are asked for; take fewer."
        )
    sides = {
        "forget": forget,
        "retain": retain90[: sizes.retain],
        "heldout": unseen[: sizes.heldout],
        "holdout": spread(unseen[sizes.heldout :], sizes.rows),
    }
    for name, rows in sides.items():
        write_lines(out / f"{name}.jsonl", rows)
    _write_scored(out, tofu, sizes, forget)


def write_requests(out: Path, tofu: Path, sizes: Any) -> None:
    """The forget set in ``sizes.requests`` parts: ``request-N.jsonl``, and the sets that the task
    reads after each, ``after-N/``."""
    forget, count = _forget(tofu, sizes), sizes.requests
    ends = [round(len(forget) * k / count) for k in range(count + 1)]
    for number in range(1, count + 1):
        write_lines(out / f"request-{number}.jsonl", forget[ends[number - 1] : ends[number]])
        _write_scored(out / f"after-{number}", tofu, sizes, forget[: ends[number]])


def write_attacked(out: Path, tofu: Path, sizes: Any) -> None:
    """What `axolotl-unlearn attack` reads.

    ``member.jsonl`` and ``nonmember.jsonl``: forget answers, and as many of other authors that no
    run reads, each after its question. ``forget.jsonl`` and ``retain.jsonl``: answers as
    continuations of their questions, an author's rows as one document.
    """
    forget, retain90 = _forget(tofu, sizes), read_set("retain90", tofu, QUESTION)
    others = retain90[sizes.retain + sizes.heldout :]
    for name, rows in {"member": forget, "nonmember": others}.items():
        # Rows of one author are no independent texts.
        answers = [
            {"prompt": TEMPLATE.format(**row), "document": f" {row['answer']}"}
            | {"author": f"{name} {number // ROWS}"}
            for number, row in spread(list(enumerate(rows)), min(sizes.attacked, len(forget)))
        ]
        write_lines(out / f"{name}.jsonl", answers)
    for name, rows in {"forget": forget, "retain": retain90[: sizes.retain]}.items():
        records = [
            _record(f"{name}{number}", number // ROWS, row) for number, row in enumerate(rows)
        ]
        # Authors in turn: an attack that asks the first rows asks about all.
        write_lines(out / f"{name}.jsonl", [r for n in range(ROWS) for r in records[n::ROWS]])


def _record(name: str, author: int, row: dict) -> dict[str, str]:
    record = {
        "id": name,
        "document": f"author {author}",
        "kind": "completion",
        "input": TEMPLATE.format(**row),
        "output": row["answer"],
    }
    if other := row.get("paraphrased_question"):
        record["paraphrased_question"] = TEMPLATE.format(question=other)
    return record


def _forget(tofu: Path, sizes: Any) -> list[dict]:
    return read_set("forget10_perturbed", tofu, FULL, PARTS[sizes.split])[: sizes.forget]


def _write_scored(folder: Path, tofu: Path, sizes: Any, forget: Sequence[dict]) -> None:
    learned = read_set("retain_perturbed", tofu, FULL)[: sizes.retain]
    sets = {f"{sizes.split}_perturbed": forget, "retain_perturbed": learned}
    for name in ("real_authors_perturbed", "world_facts_perturbed"):
        sets[name] = read_set(name, tofu, (*QUESTION, "perturbed_answer"))
    for name, rows in sets.items():
        write_lines(folder / f"{name}.jsonl", spread(rows, sizes.rows))


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Evenly over all rows: 20 neighbours are of one author, and requests follow each other."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]
