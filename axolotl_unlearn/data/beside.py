"""Rows that stand beside forget rows: alternatives of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from axolotl_unlearn.columns import PAIR, ROLES
from axolotl_unlearn.errors import UnlearnError

#: Columns that say which forget row an alternative answers.
COLUMNS = ("role", PAIR, "kind", "task", "row")


def matched(columns: Mapping[str, Sequence[int]]) -> dict[int, list[int]]:
    """Place of each forget row -> places of its alternatives, in the order of their file.

    Args:
        columns: `COLUMNS`, an integer a row each.

    Raises:
        UnlearnError: They do not match.
    """
    roles, pair, kind, task, number = (np.asarray(columns[name]) for name in COLUMNS)
    rows = np.flatnonzero(roles == ROLES["forget"]).tolist()
    forget = {int(pair[row]): row for row in rows}
    if len(forget) < len(rows):
        raise UnlearnError(
            "two forget rows have the same id (or files without ids, or a text that was cut into "
            "several rows), so alternatives cannot find theirs; give ids that occur once.",
            code="data.alternatives-ambiguous",
        )
    answers: dict[int, list[int]] = {row: [] for row in rows}
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
