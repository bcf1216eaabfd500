"""Train again without the rows: the base, the config's own settings, the remaining rows.

What comes out is the model of a plain `axolotl train` of the config without the rows, to the last
bit where the machine repeats itself: ``retrain.yml`` is that config. ``repeat`` trains it a second
time and compares the SHA-256 of the weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.request import Request, digest, weights, write_yaml
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import PROOF

EXACT = True
SHOWS = "exact: plain training without the rows"
CONFIG = "retrain.yml"


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows and ``retrain.yml``.

    Raises:
        UnlearnError: The data are not those of `request new`, or nothing is left to train on.
    """
    path, work = request.path("finetune.yml"), request.path("work")
    config = rows_of.read_config(path)
    unchanged(request)
    every, test = rows_of.remaining(path, config)
    gone = rows_of.deleted(request, [row for part in [*every, *test] for row in part])
    if missing := rows_of.forgotten(request) - rows_of.ids(every):
        raise UnlearnError(
            f"{path}: {len(missing)} rows of the request are not in the training data any more; "
            "make the request again."
        )
    rows, test = rows_of.without(every, gone), rows_of.without(test, gone)
    if not any(rows):
        raise UnlearnError(f"{path}: no row is left to train on; choose fewer.")
    shutil.rmtree(work / "rows", ignore_errors=True)
    files, tests = (
        rows_of.write_parts(work / "rows", name, parts)
        for name, parts in (("train", rows), ("test", test))
    )
    made = rows_of.training(config, files, tests, work / "model", work / "prepared")
    write_yaml(request.path(CONFIG), "Written by `axolotl-unlearn request run`.", made)
    trained = sum(map(len, rows))
    return {
        "way": "retrain",
        "base": str(config["base_model"]) if config.get("adapter") else None,
        "rows": {"trained": trained, "removed": sum(map(len, every)) - trained},
    }


def reads(request: Request) -> list[float]:
    """Rows of the one training, each pass counted."""
    from axolotl_unlearn.requests.ways.plan import whole

    unchanged(request)
    counts = request.facts["counts"]
    return [whole(request) * (1 - counts["forget"] / counts["trained"])]


def unchanged(request: Request) -> None:
    """Raises `UnlearnError`: a data file is not the one that `request new` read."""
    for name, known in request.facts["digests"].get("datasets", {}).items():
        path = Path(name)
        if not path.is_file() or digest(path) != known:
            raise UnlearnError(
                f"{path} was changed or removed since `request new`; make the request again."
            )


def make(request: Request, run: Steps, repeat: bool) -> None:
    """Train, train again to compare if asked for, and write down what was shown."""
    work, config = request.path("work"), request.path(CONFIG)
    files = sorted(work.joinpath("rows").glob("*.jsonl"))
    again = work / "again.yml"
    trainings = [("retrain", "train without the rows", config, work / "model")]
    if repeat:
        changed = rows_of.read_config(config) | {"output_dir": str(work / "again")}
        write_yaml(again, "The same run, to compare.", changed)
        title = "train without the rows, once more"
        trainings.append(("again", title, again, work / "again"))
    for name, title, path, out in trainings:
        with run.step(name, title, inputs=[config, *files], settings=run.processes) as due:
            if due:
                run.train(name, path, out)
    proof, told = request.path(PROOF), [run.threads, repeat]
    with run.step("exact", "what was shown", output=proof, settings=told) as due:
        if not due:
            return
        if repeat and weights(work / "again") != weights(work / "model"):
            raise UnlearnError(
                f"{request.folder}: a second run of {CONFIG} ended with other weights, so this "
                "machine does not repeat a training bit by bit; run without --repeat: the record "
                "then says that the weights were not compared."
            )
        shutil.rmtree(work / "again", ignore_errors=True)
        compared = "equal by SHA-256 to those of a second run" if repeat else "not compared"
        rows_of.prove(
            request,
            run,
            files,
            "no step of the training that made this model read a deleted row: it is a plain "
            f"`axolotl train` of {CONFIG}, the config without the rows; its weights were "
            f"{compared}",
            config={"sha256": digest(config)},
            compared=repeat,
        )


def hand_over(request: Request) -> None:
    """Nothing more."""
