"""Unlearn from the model at hand, at the level of a teacher that never saw the rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import Ledger, Request, fault
from axolotl_unlearn.requests.rows import read_config, trained_rows
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import PROOF
from axolotl_unlearn.shards import is_routed

EXACT = False
SHOWS = "tested, not exact: attacks that find the rows before find them no more"
#: It reads two retained rows beside each row to forget, and each of the three runs through a
#: reference too: a forward above the three of a training. A look scores so many retained rows.
ROWS, FORWARDS, LOOKED = 3, 4 / 3, 100


def prepare(request: Request) -> dict[str, Any]:
    """`request new` has written ``teacher.yml`` and ``forget.yml``, which may have been changed.

    Raises:
        UnlearnError: A fault of ``forget.yml``; or another request was carried out since, so that
            it would begin with a model that still knows the other's rows.
    """
    from axolotl_unlearn.checks.config import faults

    request.path(PROOF).unlink(missing_ok=True)
    require(request)
    config, teacher = request.path("forget.yml"), str(request.path("work", "teacher"))
    if wrong := [fault for fault in faults(read_config(config)) if teacher not in fault]:
        raise UnlearnError(f"{config}: {' '.join(wrong)}", code="requests.forget-config")
    return {"way": "match", "base": request.base}


def require(request: Request) -> None:
    """Raises `UnlearnError`: the model is one of shards; or another request was carried out since
    it was made."""
    if is_routed(request.facts["before"]["adapter"] or ""):
        says = "match trains one adapter, and the model has one for each of its shards"
        raise fault("requests.match-shards", f"{request.folder}: {says}; use --way shards.")
    newest = next(reversed(Ledger(request.folder.parent).accepted()), None)
    if newest != request.facts.get("after_request", newest):
        says = f"request {newest!r} was carried out since {request.folder} was made, so it would"
        cure = "remove it and make it again with `axolotl-unlearn request new`"
        raise fault("requests.overtaken", f"{says} begin with the model before it; {cure}.")


def reads(request: Request) -> tuple[float, str]:
    """Rows of the teacher's training and of the forgetting, each pass counted."""
    require(request)
    counts, teacher = request.facts["counts"], read_config(request.path("teacher.yml"))
    paths = [Path(entry["path"]) for entry in teacher["datasets"]]
    taught = sum(path.read_text("utf-8").count("\n") for path in paths)
    config = read_config(request.path("forget.yml"))
    rows, looked = config["max_steps"] * config["micro_batch_size"], 0.0
    if level := config["unlearn"].get("level"):  # a forward of all rows that a look scores
        each = counts["forget"] + counts["heldout"] + min(counts["retain"], LOOKED)
        looked = each * (1 + config["max_steps"] / level["every"]) / 3
    return taught * float(teacher.get("num_epochs") or 1) + rows * ROWS * FORWARDS + looked, SHOWS


def make(request: Request, run: Steps) -> None:
    """The teacher from the base, then the model from the one before."""
    data = sorted(request.path("data").glob("*.jsonl"))
    for name, title, made in (
        ("teacher", "teacher: the base on retained rows", "teacher"),
        ("forget", "forget", "model"),
    ):
        config = request.path(f"{name}.yml")
        with run.step(name, title, inputs=[config, *data]) as due:
            if due:
                if name == "teacher":  # Axolotl reads its rows as it read those of the user's files
                    shutil.rmtree(request.path("work", "prepared"), ignore_errors=True)
                    trained_rows(config)
                run.train(name, config, request.path("work", made))
