"""Rows that stand beside forget rows: alternatives of their answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from axolotl_unlearn.columns import PAIR, ROLES
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError

#: Files of rows, each by its path.
Files = list[tuple[str, list[Record]]]


def matched(rows: Any, roles: np.ndarray) -> dict[int, list[int]]:
    """Place of each forget row -> places of its alternatives, in the order of their file."""
    if PAIR not in rows.column_names:
        raise UnlearnError(
            f"the dataset has no column {PAIR!r}, by which alternatives find their forget rows; "
            "use the types of axolotl_unlearn.data and an empty dataset_prepared_path.",
            code="data.foreign-columns",
        )
    pair, kind, task, number = (np.asarray(rows[name][:]) for name in (PAIR, "kind", "task", "row"))
    forget = {int(pair[row]): int(row) for row in np.flatnonzero(roles == ROLES["forget"])}
    if len(forget) < (roles == ROLES["forget"]).sum():
        raise UnlearnError(
            "two forget rows have the same id (or files without ids, or a text that was cut into "
            "several rows), so alternatives cannot find theirs; give ids that occur once.",
            code="data.alternatives-ambiguous",
        )
    answers: dict[int, list[int]] = {row: [] for row in forget.values()}
    given = np.flatnonzero(roles == ROLES["alternative"])
    for row in given[np.argsort(number[given], kind="stable")].tolist():
        own = forget.get(int(pair[row]))
        if own is None or (kind[row], task[row]) != (kind[own], task[own]):
            raise UnlearnError(
                f"alternative {number[row] + 1} of its file answers no forget row of its kind and "
                "task; give it the `id` of one (or leave out all ids and keep their order).",
                code="data.alternative-without-forget",
            )
        answers[own].append(row)
    without = [number[row] for row, several in answers.items() if not several]
    if without:
        raise UnlearnError(
            f"{len(without)} of {len(forget)} forget rows have no alternative, the first is row "
            f"{min(without) + 1}; add one for each (`axolotl-unlearn augment`).",
            code="data.forget-without-alternative",
        )
    return answers


def unmatched(given: Files, others: Files) -> list[str]:
    """Alternatives without a forget row, and forget rows without an alternative."""
    forget = {record.id: record for _, records in given for record in records}
    answered = set()
    for path, records in others:
        for number, record in enumerate(records, start=1):
            own = forget.get(record.id)
            says = f"alternative {number} of {path} ({record.id!r})"
            if own is None:
                return [
                    f"{says} answers no forget row; give it the `id` of one (or leave out all ids "
                    "and keep their order)."
                ]
            if own.output == record.output:
                return [f"{says} gives the very answer that is to be forgotten; write another."]
            answered.add(record.id)
    without = [record_id for record_id in forget if record_id not in answered]
    return [
        f"{len(without)} of {len(forget)} forget rows have no alternative, the first is {one!r}; "
        "add one for each (`axolotl-unlearn augment`)."
        for one in without[:1]
    ]
