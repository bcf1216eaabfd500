"""Ways to carry out a deletion request: two that train without the rows, one that unlearns them.

``retrain`` trains the base on the remaining rows; ``shards`` (SISA, arXiv 1912.03817) trains one of
several parts again and merges; both are exact: no step that made the model read a deleted row.
``match`` unlearns (`axolotl_unlearn.requests.new`), for models whose training cannot be repeated.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.data.typed import Source, row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.rows import PLACE, _rows_of, entries, trained_rows
from axolotl_unlearn.requests.verdict import REFUSED, SHOWN

if TYPE_CHECKING:
    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.steps import Steps

EXACT = ("retrain", "shards")
WAYS = (*EXACT, "match")
#: ``way.json`` says how a request is carried out, ``exact.json`` what an exact way has shown.
WAY, PROOF = "way.json", "exact.json"
#: Settings of a run that have no say in its weights, or would take them from an earlier run.
RUN = (
    "output_dir", "dataset_prepared_path", "resume_from_checkpoint", "auto_resume_from_checkpoints",
    "hub_model_id", "hub_strategy", "push_dataset_to_hub", "hf_use_auth_token",
    "use_wandb", "use_mlflow", "use_comet", "use_trackio",
)  # fmt: skip
TRACKERS = ("wandb_", "mlflow_", "comet_", "trackio_")
#: With one of these, checkpoints decide which weights a run ends with.
CHECKPOINTED = ("load_best_model_at_end", "early_stopping_patience")
#: Findings of the verdict that say that a model is of no use.
BROKEN = ("collapse",)
#: Of a config that names none; the Trainer's own default.
SEED = 42
BASE = "what the base model learned before this fine-tuning is no part of the request"
SAVES = ("save_steps", "saves_per_epoch", "save_strategy", "save_total_limit")

Rows = list[list[dict[str, Any]]]


def prepare(request: Request, way: str, **given: Any) -> dict[str, Any]:
    """Write what an exact way trains with; returns what ``way.json`` holds.

    Raises:
        UnlearnError: The way is not open to this request.
    """
    return _module(way).prepare(request, **given)


def make(request: Request, run: Steps, repeat: bool) -> None:
    """The trainings of an exact way; the last step writes ``exact.json``."""
    _module(request.way["way"]).make(request, run, repeat)


def _module(way: str) -> Any:
    if way not in EXACT:
        raise UnlearnError(f"--way {way}: use {', '.join(WAYS)} or auto.")
    return importlib.import_module(f"{__name__}.{way}")


def verdict(request: Request) -> dict[str, Any]:
    """What verdict.json holds of an exact way, but for ``accepted``.

    The rows were not read, whatever a test says of them; what speaks against handing over is a
    model that is broken. What it says of them all the same it has from other rows, or guesses.

    Raises:
        UnlearnError: The model is not the one that ``exact.json`` is about.
    """
    from axolotl_unlearn.metrics.verdict import judge
    from axolotl_unlearn.requests.verdict import audited

    shown = json.loads(request.path(PROOF).read_text("utf-8"))
    folder = made if (made := request.path("work", "model")).is_dir() else request.path("model")
    if shown["weights"] != digests(weights(folder)):
        raise UnlearnError(
            f"{folder} does not have the weights of {request.path(PROOF)}; remove "
            f"{request.path('work')} and run again."
        )
    results = json.loads(request.path("eval", "results.json").read_text("utf-8"))
    by_name = {model["name"]: model for model in results["models"]}
    judged = judge(by_name["after"], by_name["before"], None, [])
    reasons = [
        f"{finding.title.lower()}: {finding.says}"
        for finding in judged.findings
        if finding.id in BROKEN and finding.outcome == "fail"
    ]
    documents, _ = audited(request.folder)
    limits = [*request.facts["limits"], BASE]
    if said := sum(line["reading"] == "still said" for line in documents):
        limits.append(
            f"{said} of {len(documents)} rows are said by a model that never read them: other rows "
            "say the same, or they can be guessed"
        )
    return {
        "outcome": REFUSED if reasons else SHOWN,
        "good": not reasons,
        "status": "broken" if reasons else "exact",
        "reasons": reasons,
        "missing": [],
        "says": [],
        "limits": limits,
        "documents": documents,
    }


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its rows, its places and what reports or publishes its run.

    With a seed: without one Axolotl shuffles the rows anew in each run.
    """
    dropped = {*RUN, "datasets", "test_datasets", "pretraining_dataset", "val_set_size"}
    kept = {
        key: value
        for key, value in config.items()
        if key not in dropped and not key.startswith(TRACKERS)
    }
    if not any(config.get(name) for name in CHECKPOINTED):
        kept = {key: value for key, value in kept.items() if key not in SAVES}
        kept["save_strategy"] = "no"
    return {"seed": SEED} | {key: value for key, value in kept.items() if value is not None}


def remaining(path: Path, config: Mapping[str, Any], gone: set[str]) -> tuple[Rows, Rows]:
    """The rows that a config trains on and those that it tests on, by entry, without some.

    Rows stand in their order and as often as in the user's files. A validation split is kept as it
    was drawn: drawn again without the rows it would hold out others, which were trained on.

    Args:
        path: The config's file, which Axolotl reads to find the rows that it held out.
        gone: Ids of rows, by content.

    Raises:
        UnlearnError: Data that cannot be read, or no row is left.
    """
    learned = None
    if config.get("val_set_size"):
        learned = {one.id for one in trained_rows(path).rows}
    rows: Rows = []
    test: Rows = []
    for number, entry in enumerate(entries(config)):
        place = f"datasets[{number}]"
        left = [
            row for row in _rows_of(entry, place)[entry.get("skip") or 0 :]
            if row_id(row) not in gone
        ]  # fmt: skip
        rows.append([row for row in left if learned is None or row_id(row) in learned])
        if learned is not None:
            test.append([row for row in left if row_id(row) not in learned])
    for number, entry in enumerate(entries(config, "test_datasets")):
        found = _rows_of(entry, f"test_datasets[{number}]")[entry.get("skip") or 0 :]
        test.append([row for row in found if row_id(row) not in gone])
    if not any(rows):
        raise UnlearnError(f"{path}: no row is left to train on; choose fewer.")
    return rows, test


def dataset(entry: Mapping[str, Any], file: Path, *, test: bool = False) -> dict[str, Any]:
    """An entry of ``datasets`` that reads these rows in place of its own."""
    kept = {key: value for key, value in entry.items() if key not in (*PLACE, "rl")}
    if entry.get("type") == "pretrain":  # as Axolotl's streams are opened
        return {"path": "json", "data_files": str(file), "split": "train", **kept}
    split = {"split": "train"} if test or entry.get("rl") or entry.get("split") else {}
    return {"path": str(file), "ds_type": "json", **split, **kept}


def gone_rows(request: Request, rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Ids of what this request deletes, and of those of the rows that an earlier one did."""
    from axolotl_unlearn.requests.audit import deleted_rows

    found = [Source(row_id(row), row) for row in rows]
    return forgotten(request) | deleted_rows(request.folder.parent, found)


def forgotten(request: Request) -> set[str]:
    """Ids of the rows to forget."""
    return {row["id"] for row in read_json_lines(request.rows("forget"))}


def weights(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of weights of a model or adapter folder."""
    from axolotl_unlearn.store import file_digest

    return {path.name: file_digest(path) for path in sorted(folder.glob("*.safetensors"))}


def digests(found: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """As a record writes them."""
    return {name: {"sha256": value} for name, value in found.items()}


def without_checkpoints(folder: Path) -> None:
    """Checkpoints of a run are no part of its model."""
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
