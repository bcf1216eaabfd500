"""Which rows broke a run, when a loss or a gradient is no longer finite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.columns import NOBODYS, ROLES
from axolotl_unlearn.data.checks import block_of, records_of, role_of
from axolotl_unlearn.data.records import short
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.resume import checkpoints

MOST_ROWS = 8
_SIDES = {number: side for side, number in ROLES.items()}


def blown_up(
    what: str,
    step: int,
    batches: Iterable[Mapping[str, Tensor]],
    loss_of: Mapping[str, tuple[str, Callable[[Mapping[str, Tensor]], Tensor]]],
    model: nn.Module,
    cfg: Mapping[str, Any],
    out: Path,
) -> UnlearnError:
    """The sentence with which a run ends: step, ids of the rows, objective, and what is kept.

    Each row is tried by itself under each objective: which has a loss or gradient that is not
    finite? If none does it alone, or no objective is given, since processes would wait for each
    other, all rows of the step are named. All gradients of the model are lost.

    Args:
        batches: Of the step.
        loss_of: Name of an objective -> its side, and the loss of some rows.
    """
    everyone, broken, parts, places = [], [], [], []
    for batch in batches:
        for number in range(len(batch["role"])):
            one = {key: value[number : number + 1] for key, value in batch.items()}
            if int(one["role"]) == NOBODYS:
                continue
            row = _SIDES[int(one["role"])], int(one["row"]) if "row" in one else -1
            everyone.append(row)
            for name, (side, loss) in loss_of.items():
                if side == row[0] and (place := _broken_at(model, loss(one))) is not None:
                    broken.append(row)
                    parts.append(name)
                    places.append(place)
    model.zero_grad(set_to_none=True)
    rows, names = dict.fromkeys(broken or everyone), []
    for side in ROLES:
        numbers = [number for where, number in rows if where == side]
        names += [f"{side} {name}" for name in names_of_rows(cfg, side, numbers)]
    more = f" and {len(names) - MOST_ROWS} more" if len(names) > MOST_ROWS else ""
    by = f", by {', '.join(dict.fromkeys(parts))}" if parts else ""
    at = next((f", first at {place}" for place in places if place), "")
    kept = checkpoints(out)
    last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
    return UnlearnError(
        f"{what} at step {step}{by}{at} (rows: {', '.join(names[:MOST_ROWS])}{more}). This step "
        f"changed nothing; {last}. Lower learning_rate or weight, look at these rows, or check the "
        "weights of base_model for NaN.",
        code="training.not-finite",
    )


def _broken_at(model: nn.Module, loss: Tensor) -> str | None:
    """The parameter whose gradient is not finite, or "" for the loss itself; None: all is."""
    if not torch.isfinite(loss):
        return ""
    model.zero_grad(set_to_none=True)
    loss.backward()
    graded = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return next((name for name, grad in graded if not torch.isfinite(grad).all()), None)


def names_of_rows(cfg: Mapping[str, Any], side: str, numbers: Iterable[int]) -> list[str]:
    """What to call the rows with these places in their file: ids where one file has the side."""
    entries = [e for e in cfg.get("datasets") or [] if role_of(e) == side]
    args = block_of(cfg)
    names: list[str] = []
    if args is not None and len(entries) == 1 and os.path.isfile(entries[0]["path"]):
        with suppress(UnlearnError):  # the file has changed since
            names = [row.id for row in records_of(entries[0], args.data)]
    return [short(names[n]) if 0 <= n < len(names) else f"row {n}" for n in numbers]
