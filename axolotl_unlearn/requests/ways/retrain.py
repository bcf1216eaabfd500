"""Train again without the rows: the base, the config's own settings, the remaining rows.

What comes out is the model of a plain `axolotl train` of the config without the rows, to the last
bit where the machine repeats itself: ``retrain.yml`` is that config. With `val_set_size` the split
is drawn as before and the rows are left out of both sides, so the plain run is one on the files of
the two sides. ``repeat`` trains a second time and compares the SHA-256 of the weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.requests.request import (
    Request,
    counted,
    digest,
    weights,
    write_json,
    write_yaml,
)
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import PROOF

EXACT = True
SHOWS = "exact: plain training without the rows"
CONFIG = "retrain.yml"


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows and ``retrain.yml``.

    Raises:
        UnlearnError: The training did not begin with a base that never saw the rows; base, data,
            config or packages are not those of `request new`; or nothing is left to train on.
    """
    path, work = request.path("finetune.yml"), request.path("work")
    config = rows_of.read_config(path)
    _begins_clean(request, config)
    every, test = rows_of.remaining(path, config)
    now = bound.facts(config, (every, test))
    bound.require(bound.known(request), now, str(path))
    gone = rows_of.deleted(request, [row for part in [*every, *test] for row in part])
    there = rows_of.ids(every) | rows_of.ids(test)
    if missing := rows_of.forgotten(request) - there:
        raise UnlearnError(
            f"{path}: {len(missing)} rows of the request are not in the training data any more; "
            "make the request again.",
            code="requests.rows-missing",
        )
    rows, left = rows_of.without(every, gone), rows_of.without(test, gone)
    if not any(rows):
        raise UnlearnError(
            f"{path}: no row is left to train on; choose fewer.", code="requests.no-row-left"
        )
    shutil.rmtree(work / "rows", ignore_errors=True)
    files, tests = (
        rows_of.write_parts(work / "rows", name, parts)
        for name, parts in (("train", rows), ("test", left))
    )
    made = rows_of.training(config, files, tests, work / "model", work / "prepared")
    write_yaml(request.path(CONFIG), "Written by `axolotl-unlearn request run`.", made)
    trained = sum(map(len, rows))
    removed = sum(map(len, every)) - trained
    return {
        "way": "retrain",
        "base": str(config["base_model"]) if config.get("adapter") else None,
        "rows": {"trained": trained, "removed": removed,
                 "removed_tested": sum(map(len, test)) - sum(map(len, left))},
        "bound": now | {"rows": _read(request)},
        "without": accepted(request),
    }  # fmt: skip


def accepted(request: Request) -> list[str]:
    """Names of the requests that were carried out before this one, whose rows are left out too."""
    return [one["request"] for one in Ledger(request.folder.parent).accepted()]


def _read(request: Request) -> dict[str, Any]:
    """Digests of the rows that the training reads, from the files that it reads."""
    folder = request.path("work", "rows")
    return bound.of_rows(*(rows_of.read_parts(folder, name) for name in ("train", "test")))


def _begins_clean(request: Request, config: Mapping[str, Any]) -> None:
    """
    Raises:
        UnlearnError: What the training begins with has read the rows, or may have.
    """
    path, base = request.path("finetune.yml"), Path(str(config["base_model"]))
    cure = "an exact way needs the base from before the rows; use --way match"
    if config.get("lora_model_dir"):
        raise UnlearnError(
            f"{path}: the training began with the adapter `lora_model_dir: "
            f"{config['lora_model_dir']}`, which may have read the rows; {cure}.",
            code="requests.begins-with-an-adapter",
        )
    if (base / ADAPTER_CONFIG).is_file():
        raise UnlearnError(
            f"{path}: `base_model: {base}` is an adapter, which may have read the rows; {cure}.",
            code="requests.base-is-an-adapter",
        )
    if not base.is_dir():
        return
    before = request.facts["before"]
    folders = [Path(before["model"])] if before["adapter"] is None else []
    folders += [folder / "model" for folder in Ledger(request.folder.parent).folders()]
    own = _digests(base)
    if own and any(own <= _digests(folder) for folder in folders):
        raise UnlearnError(
            f"{path}: `base_model: {base}` is a model that has read rows of requests; {cure}.",
            code="requests.base-has-read",
        )


def _digests(folder: Path) -> set[str]:
    return {one["sha256"] for one in weights(folder).values()}


def reads(request: Request) -> list[float]:
    """Rows of the one training, each pass counted."""
    from axolotl_unlearn.requests.ways.plan import whole

    path = request.path("finetune.yml")
    config = rows_of.read_config(path)
    _begins_clean(request, config)
    now = bound.facts(config, rows_of.remaining(path, config))
    bound.require(bound.known(request), now, str(path))
    counts = request.facts["counts"]
    return [whole(request) * (1 - counts["forget"] / counts["trained"])]


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
                require(request)
                run.train(name, path, out)
    proof, told = request.path(PROOF), [run.threads, repeat]
    with run.step("exact", "what was shown", output=proof, settings=told) as due:
        if due:
            _prove(request, run, repeat)


def require(request: Request) -> None:
    """
    Raises:
        UnlearnError: Base, rows, config or packages are not those that `prepare` has found; or
            another request was carried out since, whose rows are among those that are read.
    """
    known, where = request.way["bound"], str(request.folder)
    if request.way["without"] != accepted(request):
        newer = ", ".join(map(repr, accepted(request)[len(request.way["without"]) :]))
        raise UnlearnError(
            f"{request.folder}: {newer} was carried out since the rows of this training were "
            "written, and its rows may be among them; run again.",
            code="requests.overtaken",
        )
    if _read(request) != known["rows"]:
        raise UnlearnError(
            f"{request.path('work', 'rows')} was changed since it was written; run again.",
            code="requests.changed-rows",
        )
    config = rows_of.read_config(request.path("finetune.yml"))
    bound.require(known, bound.facts(config, ([], [])), where, "base config versions")


def _prove(request: Request, run: Steps, repeat: bool) -> None:
    """Write ``exact.json``: what was read, and that no deleted row is in it.

    Raises:
        UnlearnError: One is; or a second run ended with other weights.
    """
    work, config = request.path("work"), request.path(CONFIG)
    require(request)
    if repeat and weights(work / "again") != weights(work / "model"):
        raise UnlearnError(
            f"{request.folder}: a second run of {CONFIG} ended with other weights, so this "
            "machine does not repeat a training bit by bit; run without --repeat: the record "
            "then says that the weights were not compared.",
            code="requests.not-repeatable",
        )
    shutil.rmtree(work / "again", ignore_errors=True)
    parts = [rows_of.read_parts(work / "rows", name) for name in ("train", "test")]
    read = [row for side in parts for part in side for row in part]
    if there := rows_of.deleted(request, read) & {rows_of.row_id(row) for row in read}:
        raise UnlearnError(
            f"{work / 'rows'} has {len(there)} rows of this request or of earlier ones; remove "
            f"{work} and run again.",
            code="requests.rows-read",
        )
    compared = "equal by SHA-256 to those of a second run" if repeat else "not compared"
    count, without = len(rows_of.forgotten(request)), request.way["without"]
    others = f" nor of {counted(len(without), 'earlier request')}" if without else ""
    because = (
        f"no step of the training that made this model read a deleted row: of the {len(read)} rows "
        f"that it read or was tested on none is one of the {count} of this request{others}; it is "
        f"a plain `axolotl train` of {CONFIG}, the config without the rows; its weights were "
        f"{compared}"
    )
    made = {
        "because": because,
        "weights": weights(work / "model"),
        "config": {"sha256": digest(config)},
        "compared": repeat,
        "bound": request.way["bound"],
    }
    write_json(request.path(PROOF), made | bound.environment(run.threads, run.processes))


def hand_over(request: Request) -> None:
    """Nothing more."""
