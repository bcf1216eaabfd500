"""Train again without the rows: the base, the config's own settings, the remaining rows.

What comes out is the model of a plain `axolotl train` of the config without the rows, to the last
bit where the machine repeats itself: ``retrain.yml`` is that config. `repeat` trains it a second
time and compares the SHA-256 of the weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import Request, digest, write_json, write_lines, write_yaml
from axolotl_unlearn.requests.rows import entries, read_config
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import (
    PROOF,
    dataset,
    digests,
    forgotten,
    gone_rows,
    remaining,
    settings,
    weights,
    without_checkpoints,
)

CONFIG = "retrain.yml"


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows and ``retrain.yml``; returns what ``way.json`` holds.

    Raises:
        UnlearnError: The data are not those of `request new`, or nothing is left to train on.
    """
    path = request.path("finetune.yml")
    config = read_config(path)
    unchanged(request)
    every, test = remaining(path, config, set())
    ids = {one for part in every for one in _ids(part)}
    gone = gone_rows(request, [row for part in [*every, *test] for row in part])
    if missing := forgotten(request) - ids:
        raise UnlearnError(
            f"{path}: {len(missing)} rows of the request are not in the training data any more; "
            "make the request again."
        )
    rows, test = _without(every, gone), _without(test, gone)
    if not any(rows):
        raise UnlearnError(f"{path}: no row is left to train on; choose fewer.")
    made = settings(config) | write_rows(request.path("work", "rows"), config, rows, test)
    made |= {
        "output_dir": str(request.path("work", "model")),
        "dataset_prepared_path": str(request.path("work", "prepared")),
    }
    write_yaml(request.path(CONFIG), "Written by `axolotl unlearn request run`.", made)
    counts = {"trained": sum(map(len, rows)), "removed": sum(map(len, every)) - sum(map(len, rows))}
    adapter = bool(config.get("adapter"))
    base = str(config["base_model"]) if adapter else None
    return {"way": "retrain", "base": base, "rows": counts}


def write_rows(folder: Path, config: Any, rows: Any, test: Any) -> dict[str, Any]:
    """Write rows by entry; returns the data keys of a config that reads them.

    ``test`` has one part for each entry of `datasets` (a validation split) or of `test_datasets`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    streamed = bool(config.get("pretraining_dataset"))
    made: dict[str, Any] = {}
    key = "pretraining_dataset" if streamed else "datasets"
    sides = [(key, entries(config), rows)]
    tested = entries(config, "test_datasets") or entries(config)
    sides.append(("test_datasets", tested, test))
    for name, given, parts in sides:
        found = []
        for number, part in enumerate(parts):
            if part:
                file = folder / f"{name}-{number}.jsonl"
                write_lines(file, part)
                found.append(dataset(given[number], file, test=name == "test_datasets"))
        if found:
            made[name] = found
    return made


def _ids(rows: Any) -> list[str]:
    from axolotl_unlearn.data.typed import row_id

    return [row_id(row) for row in rows]


def _without(parts: Any, gone: set[str]) -> list[list[dict[str, Any]]]:
    from axolotl_unlearn.data.typed import row_id

    return [[row for row in part if row_id(row) not in gone] for part in parts]


def unchanged(request: Request) -> None:
    """
    Raises:
        UnlearnError: A data file is not the one that `request new` read.
    """
    for name, known in request.facts["digests"].get("datasets", {}).items():
        path = Path(name)
        if not path.is_file() or digest(path) != known:
            raise UnlearnError(
                f"{path} was changed or removed since `request new`; make the request again."
            )


def make(request: Request, run: Steps, repeat: bool) -> None:
    """Train, train again to compare if asked for, and write down what was shown."""
    work, config = request.path("work"), request.path(CONFIG)
    inputs = [config, *sorted(work.joinpath("rows").glob("*.jsonl"))]

    def train(name: str, title: str, config: Path, out: Path) -> None:
        if run.due(name, title, inputs=inputs):
            run.train(name, config, out)
            without_checkpoints(out)
            run.done()

    train("retrain", "train without the rows", config, work / "model")
    if repeat:
        again = work / "again.yml"
        changed = read_config(config) | {"output_dir": str(work / "again")}
        write_yaml(again, "The same run, to compare.", changed)
        train("again", "train without the rows, once more", again, work / "again")
    proof, told = request.path(PROOF), [run.threads, repeat]
    if run.due("exact", "what was shown", output=proof, settings=told):
        prove(request, *told)
        run.done()


def prove(request: Request, threads: int, repeat: bool) -> None:
    """Write ``exact.json``.

    Raises:
        UnlearnError: A deleted row is among those that were trained on, or the second run has
            other weights.
    """
    from axolotl_unlearn.data.records import read_rows

    gone = forgotten(request)
    files = sorted(request.path("work", "rows").glob("*.jsonl"))
    rows = 0
    for path in files:
        ids = _ids([row for _, row in read_rows(path)])
        rows += len(ids)
        if gone & set(ids):
            raise UnlearnError(f"{path} has rows of the request; remove {request.path('work')}.")
    found = weights(request.path("work", "model"))
    if repeat and weights(request.path("work", "again")) != found:
        raise UnlearnError(
            f"{request.folder}: a second run of {CONFIG} ended with other weights, so this machine "
            "does not repeat a training bit by bit; run without --repeat: the record then says "
            "that the weights were not compared."
        )
    shutil.rmtree(request.path("work", "again"), ignore_errors=True)
    write_json(request.path(PROOF), facts(found, request.path(CONFIG), threads, repeat))


def facts(found: dict[str, str], config: Path, threads: int, repeat: bool) -> dict[str, Any]:
    """What a record says of an exact way."""
    said = "no step of the training that made this model read a deleted row"
    compared = "equal by SHA-256 to those of a second run" if repeat else "not compared"
    return {
        "because": f"{said}: it is a plain `axolotl train` of {config.name}, the config without "
        f"the rows; its weights were {compared}",
        "weights": digests(found),
        "config": {"sha256": digest(config)},
        "compared": repeat,
        "threads": threads,
        "device": device(),
    }


def device() -> str:
    """What trains here."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
