"""What a run says that ends because a loss or a gradient is no longer finite."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from axolotl_unlearn.columns import NOBODYS, ROLES
from axolotl_unlearn.data.checks import block_of, records_of, role_of
from axolotl_unlearn.data.records import short
from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.resume import checkpoints

MOST_ROWS = 8
_SIDES = {number: side for side, number in ROLES.items()}


def blown_up(
    what: str, step: int, batches: Iterable[Batch], cfg: Mapping[str, Any], out: Path
) -> UnlearnError:
    """The sentence with which a run ends: step, ids of its rows, and what is kept.

    Args:
        batches: Of the step, of this process.
    """
    rows = [
        (_SIDES[int(role)], int(row))
        for batch in batches
        for role, row in zip(batch.on_host("role"), batch.on_host("row"), strict=True)
        if role != NOBODYS
    ]
    names = []
    for side in ROLES:
        numbers = [number for where, number in dict.fromkeys(rows) if where == side]
        names += [f"{side} {name}" for name in names_of_rows(cfg, side, numbers)]
    more = f" and {len(names) - MOST_ROWS} more" if len(names) > MOST_ROWS else ""
    kept = checkpoints(out)
    last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
    return UnlearnError(
        f"{what} at step {step} (rows: {', '.join(names[:MOST_ROWS])}{more}). This step changed "
        f"nothing; {last}. Lower learning_rate or weight, look at these rows, or check the weights "
        "of base_model for NaN.",
        code="training.not-finite",
    )


def names_of_rows(cfg: Mapping[str, Any], side: str, numbers: Iterable[int]) -> list[str]:
    """What to call the rows with these places in their file: ids where one file has the side."""
    entries = [e for e in cfg.get("datasets") or [] if role_of(e) == side]
    args = block_of(cfg)
    names: list[str] = []
    if args is not None and len(entries) == 1 and os.path.isfile(entries[0]["path"]):
        with suppress(UnlearnError):  # the file has changed since
            names = [row.id for row in records_of(entries[0], args.data)]
    return [short(names[n]) if 0 <= n < len(names) else f"row {n}" for n in numbers]
