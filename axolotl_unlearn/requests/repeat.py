"""`request verify --repeat`: train again what a record says was trained, and compare the hash."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.device import hardware
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Request, digest, held, weights, write_yaml
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways.retrain import CONFIG


def repeat(
    folder: Path, base: Path | None = None, rows: Path | None = None, console: Console | None = None
) -> str:
    """Repeat the training of an exact request; a sentence.

    Args:
        base: The base model, if not where the config says.
        rows: Folder of the rows that were read (``train-0.jsonl``, ``test-0.jsonl``, ...); default
            the data of the config without the rows of this request and of those before it.

    Raises:
        UnlearnError: Base, rows, config, packages or device are not those of the record; or the
            training ends with other weights.
    """
    request, way = Request.load(folder), read(folder)["predicate"]["way"]
    known: Mapping[str, Any] = way.get("bound") or {}
    if way.get("way") != "retrain" or not known:
        raise UnlearnError(
            f"{folder} is no request of --way retrain whose record holds what was read, so there "
            "is nothing to repeat.",
            code="requests.repeat-not-exact",
        )
    source = request.path(CONFIG)
    if not source.is_file() or digest(source) != way["config"]["sha256"]:
        raise UnlearnError(
            f"{source} is not the config of the record; restore it.", code="requests.changed-config"
        )
    config = rows_of.read_config(source)
    if base is not None:
        config["base_model"] = str(base)
    parts = _rows(request, rows, way["without"])
    now = {
        "base": bound.base(str(config["base_model"]), config.get("revision_of_model")),
        "rows": bound.of_rows(*parts),
        "versions": bound.installed(),
    }
    named = {part: {**known[part], "name": now["base"]["name"]} if part == "base" else known[part]
             for part in now}  # fmt: skip
    bound.require(named, now, str(folder), " ".join(now))
    if hardware() != way["device"]:
        raise UnlearnError(
            f"{folder} was trained on {way['device']!r} and here is {hardware()!r}, whose "
            "last bits may differ; repeat it on such a device.",
            code="requests.repeat-device",
        )
    with tempfile.TemporaryDirectory() as made, held(Path(made)) as lock:
        place = Path(made)
        files, tests = (
            rows_of.write_parts(place / "rows", name, side)
            for name, side in zip(("train", "test"), parts, strict=True)
        )
        again = rows_of.training(config, files, tests, place / "model", place / "prepared")
        write_yaml(place / CONFIG, "Written by `axolotl-unlearn request verify --repeat`.", again)
        cache = {"HF_DATASETS_CACHE": str(place / "cache"), **way["environment"]}
        run = Steps(place, lock, cache, way["threads"], console or Console(), way["processes"])
        with run.step("again", "train as the record says"):
            run.train("again", place / CONFIG, place / "model")
        same = weights(place / "model") == way["weights"]
        shutil.rmtree(place / "model")
    if not same:
        raise UnlearnError(
            f"{folder}: the repeated training ended with other weights than those of the record.",
            code="requests.repeat-differs",
        )
    return "repeated: the training ends with the weights of the record, by SHA-256"


def _rows(
    request: Request, given: Path | None, without: list[str]
) -> tuple[rows_of.Parts, rows_of.Parts]:
    if given is not None:
        train, test = (rows_of.read_parts(given, name) for name in ("train", "test"))
        return train, test
    path = request.path("finetune.yml")
    every, test = rows_of.remaining(path, rows_of.read_config(path))
    sources = [rows_of.Source(rows_of.row_id(row), row) for part in every + test for row in part]
    gone = rows_of.deleted_rows(request.folder.parent, sources, only=[*without, request.id])
    return rows_of.without(every, gone), rows_of.without(test, gone)
