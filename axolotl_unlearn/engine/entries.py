"""The objectives of a config as the engine uses them: which rows, which weight, which view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.args import ObjectiveArgs
from axolotl_unlearn.data.columns import KINDS, ROLES, task_number
from axolotl_unlearn.engine.views import VIEWS, View
from axolotl_unlearn.objectives import OBJECTIVES, Objective


@dataclass(frozen=True)
class Entry:
    """One line of ``forget:`` or ``retain:``: which rows, which objective, which weight."""

    name: str
    side: str
    args: ObjectiveArgs
    objective: Objective

    @property
    def unit(self) -> str:
        return self.objective.unit(self.args.parameters)

    def rows(self, batch: dict[str, Tensor]) -> Tensor:
        """Rows of the batch that this entry is for, ``[R]`` bool."""
        chosen = batch["role"] == ROLES[self.side]
        if self.args.kinds is not None:
            chosen &= _isin(batch["kind"], [KINDS[kind] for kind in self.args.kinds])
        if self.args.tasks is not None:
            chosen &= _isin(batch["task"], [task_number(task) for task in self.args.tasks])
        return chosen

    def view(self, batch: dict[str, Tensor]) -> View:
        """What this entry sees of a batch."""
        return VIEWS[self.objective.sees](self, batch)


def _isin(values: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.isin(values, torch.tensor(numbers, device=values.device, dtype=values.dtype))


def make_entries(pairs: list[tuple[str, ObjectiveArgs]]) -> list[Entry]:
    """Name the objectives of a config; a repeated one gets its kinds, tasks or number added."""
    entries: list[Entry] = []
    names: set[str] = set()
    for side, args in pairs:
        name = f"{side}/{args.objective}"
        if name in names:
            suffix = "+".join([*(args.kinds or []), *map(str, args.tasks or [])])
            name = f"{name}.{suffix or len(names)}"
        while name in names:
            name += "'"
        names.add(name)
        entries.append(Entry(name, side, args, OBJECTIVES[args.objective]))
    return entries


def unit_counts(entries: Sequence[Entry], batch: dict[str, Tensor]) -> Tensor:
    """Units of each entry in a micro-batch, ``[E]`` float; add them up over a whole step."""
    return torch.stack([entry.view(batch).count for entry in entries])


def describe(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The objectives as plain data, for logs and result files."""
    return [
        {
            "name": entry.name,
            "weight": entry.args.weight,
            "unit": entry.unit,
            "source": entry.objective.source,
            **({"anneal": str(entry.args.anneal)} if entry.args.anneal else {}),
            **entry.args.parameters,
        }
        for entry in entries
    ]
