"""The objectives of a config as the engine uses them: a name, a side, a unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from axolotl_unlearn.config import ObjectiveArgs
from axolotl_unlearn.engine.host import to_device
from axolotl_unlearn.engine.views import view_of
from axolotl_unlearn.objectives import OBJECTIVES, Objective


@dataclass(frozen=True)
class Entry:
    """One line of ``forget:`` or ``retain:``: which rows, which objective, which weight.

    Attributes:
        unit: what its sum is divided by the number of: token, row or batch.
    """

    name: str
    side: str
    args: ObjectiveArgs
    objective: Objective
    unit: str


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
        objective = OBJECTIVES[args.objective]
        entries.append(Entry(name, side, args, objective, objective.unit(args.parameters)))
    return entries


def unit_counts(entries: Sequence[Entry], batch: dict[str, Tensor]) -> Tensor:
    """Units of each entry in a micro-batch, ``[E]`` float; add them up over a whole step."""
    units = [view_of(entry, batch).units for entry in entries]
    return to_device(np.array(units, dtype=np.float32), batch["role"].device)
