"""Which rows each entry of ``forget:`` and ``retain:`` is for, counted before weights are loaded.

An entry limited to kinds or tasks that no row has, and a forget row that no entry is for, would
train on less than the config says without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from axolotl_unlearn.columns import KINDS, ROLES, SIDES, Kind, Role, task_number
from axolotl_unlearn.objectives import OBJECTIVES

if TYPE_CHECKING:
    from axolotl_unlearn.config import ObjectiveArgs, UnlearnArgs
    from axolotl_unlearn.data.records import Record

_KIND_NAMES = {number: name for name, number in KINDS.items()}


def named(groups: Iterable[tuple[int, int]]) -> str:
    """Numbers of kinds and tasks in words."""
    return " and ".join(sorted({f"{_KIND_NAMES[kind]}s of task {task}" for kind, task in groups}))


def level_faults(
    forget: Iterable[tuple[int, int]], heldout: Iterable[tuple[int, int]]
) -> list[str]:
    """Kinds and tasks of forget rows that no held-out row is of."""
    lacking = set(forget) - set(heldout)
    return [
        f"`unlearn.level.heldout` has no {named(lacking)}, but forget rows are: add held-out rows "
        "of the same kind, or their level is unknown."
    ] * bool(lacking)


class RowCounts:
    """Rows of each (side, kind, task number), and what the tasks are called."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[Role, Kind, int]] = Counter()
        self.names: dict[int, str] = {}

    @classmethod
    def of_records(cls, sides: dict[str, Iterable[Record]]) -> RowCounts:
        """Counts of records by role; other keys are left out."""
        counts = cls()
        for side in ROLES:
            for record in sides.get(side, ()):
                counts.rows[side, record.kind, record.task_number] += 1
                counts.names.setdefault(record.task_number, record.task.strip())
        return counts

    @classmethod
    def of_columns(cls, rows: Any) -> RowCounts:
        """Counts of a tokenised dataset, whose tasks have numbers only."""
        counts = cls()
        sides = {number: side for side, number in ROLES.items()}
        columns = (rows[name][:] for name in ("role", "kind", "task"))
        for (role, kind, task), number in Counter(zip(*columns, strict=True)).items():
            counts.rows[sides[role], _KIND_NAMES[kind], task] = number
        return counts

    def of_entry(self, side: str, entry: ObjectiveArgs) -> int:
        """Rows that an entry is for."""
        return sum(
            n for group, n in self.rows.items() if group[0] == side and entry.is_for(*group[1:])
        )

    def faults(self, args: UnlearnArgs) -> list[str]:
        """Entries and tasks without rows, and forget rows without an entry.

        A preset that takes a teacher has entries for either kind, and rows may have one alone.
        """
        phases = [(f"unlearn.phases[{number}]", phase) for number, phase in enumerate(args.phases)]
        placed = [
            (f"{where}.{side}[{number}]", side, entry)
            for where, block in phases or [("unlearn", args)]
            for side in SIDES
            for number, entry in enumerate(getattr(block, side))
        ]
        faults = []
        for where, side, entry in placed:
            if not self._of_side(side) or (args.teacher and not entry.tasks):
                continue  # no such data at all: reported elsewhere, or not read yet
            tasks = {task for of, _, task in self.rows if of == side}
            strangers = [t for t in entry.tasks or [] if task_number(t) not in tasks]
            if strangers:
                faults.append(
                    f"`{where}.tasks`: no {side} row has the task {strangers[0]!r}; there are "
                    f"{self._listed(self._of_side(side))}."
                )
            elif not self.of_entry(side, entry):
                faults.append(
                    f"`{where}` ({entry.objective}) is for no row: there are "
                    f"{self._listed(self._of_side(side))}; correct its `kinds` or `tasks`."
                )
        left = self._uncovered("forget", args)
        if left:
            faults.append(
                f"no entry of `unlearn.forget` is for {self._listed(left)}, so these forget rows "
                "would not be forgotten; add an entry for them or remove them from the data."
            )
        return faults

    def notes(self, args: UnlearnArgs) -> list[str]:
        """Retain rows without an entry: nothing is lost, but they take places in batches; entries
        that draw towards held-out documents and are for none of those to forget."""
        left = self._uncovered("retain", args)
        says = "these retain rows take places in batches and do nothing."
        notes = (
            [f"no entry of `unlearn.retain` is for {self._listed(left)}: {says}"] if left else []
        )
        documents = [group for group in self._of_side("forget") if group[1] == "completion"]
        return notes + [
            f"`{entry.objective}` does nothing: it looks at documents alone where there are any to "
            "forget, and its entry is for none of them."
            for entry in args.forget
            if documents and OBJECTIVES[entry.objective].against_heldout
            if not any(entry.is_for(*group[1:]) for group in documents)
        ]

    def _of_side(self, side: str) -> Counter:
        return Counter({group: n for group, n in self.rows.items() if group[0] == side})

    def _uncovered(self, side: str, args: UnlearnArgs) -> Counter:
        entries, rows = [entry for of, entry in args.entries() if of == side], self._of_side(side)
        left = {g: n for g, n in rows.items() if not any(e.is_for(*g[1:]) for e in entries)}
        return Counter(left if entries else {})

    def _listed(self, groups: Counter) -> str:
        """ "8 questions of task pii and 2 completions without a task" """
        parts = []
        for (_, kind, task), number in sorted(groups.items()):
            name = self.names.get(task) or (f"Task{task}" if task > 0 else "")
            of = f"of task {name!r}" if name else "without a numbered task"
            parts.append(f"{number} {kind}{'s' * (number > 1)} {of}")
        return " and ".join([", ".join(parts[:-1]), parts[-1]]) if parts[1:] else parts[0]
