"""`axolotl-unlearn request plan`: what each way would cost, and what it would show.

Seconds are those of trainings: a line through what the last runs took (steps of the shards,
trainings of earlier requests, the run that made the model) for the rows that they read; without
any, from the model's size and the speed of this machine, which is rough. Memory is that of weights,
gradients and optimizer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.new import passes
from axolotl_unlearn.requests.request import Request, read_json
from axolotl_unlearn.requests.rows import read_config
from axolotl_unlearn.requests.ways import EXACT, WAYS, retrain, shards

#: Forward and backward of a row take three forwards; `match` reads two retained rows beside each
#: row to forget, and each of the three runs through a reference too.
MATCH_ROWS, MATCH_FORWARDS = 3, 4 / 3
#: Retained rows that a look scores (`training.level`).
LOOKED = 100
#: Seconds of the start of a training where none was measured; share of the speed of a large
#: product that a training reaches; tokens of a row.
START, EFFICIENCY, TOKENS = 15.0, 0.3, 256
#: What the Trainer says at its end; a run of Axolotl leaves it in its output folder.
_RUNTIME = re.compile(r"'train_runtime': '?([\d.]+)")
SHOWS = {
    "retrain": "exact: plain training without the rows",
    "shards": "exact: no part of the model read the rows",
    "match": "tested, not exact: attacks that find the rows before find them no more",
}


@dataclass(frozen=True)
class Cost:
    """Of one way.

    Attributes:
        seconds: Of its trainings; ``by``: measured or estimated. ``measuring``: of the tests after
            it, if an earlier request took this way.
        bytes: Of memory, at least; None where the model's files are not here.
        reads: Rows read, each pass counted.
        pays_from: Of match: rows read, each pass counted, from which retraining takes longer.
        closed: Why it is not open to the request; then nothing else is known.
    """

    way: str
    shows: str
    seconds: float | None = None
    by: str = ""
    measuring: float | None = None
    bytes: int | None = None
    reads: float | None = None
    pays_from: int | None = None
    closed: str = ""


def plan(request: Request) -> list[Cost]:
    """What each way would cost; writes nothing."""
    try:
        folder = shards.find(request)
    except UnlearnError:
        folder = None
    records = list(_records(request))
    line = Line.through(list(_points(request, folder, records)), request)
    return [_cost(way, request, folder, line, records) for way in WAYS]


def choose(costs: Iterable[Cost], limit: float | None = None) -> str:
    """The cheapest way that is exact, or match where each takes more than ``limit`` seconds.

    Raises:
        UnlearnError: No way is open.
    """
    by_way = {cost.way: cost for cost in costs if not cost.closed}
    exact = [by_way[way] for way in EXACT if way in by_way]
    fit = [cost for cost in exact if limit is None or cost.seconds <= limit]
    if fit:
        return min(fit, key=lambda cost: cost.seconds).way
    if "match" in by_way:
        return "match"
    raise UnlearnError("no way is open to this request: `axolotl-unlearn request plan` says why.")


@dataclass(frozen=True)
class Line:
    """Seconds of a training: ``start + each * rows read``."""

    start: float
    each: float
    by: str

    @classmethod
    def through(cls, points: list[tuple[float, float]], request: Request) -> Line:
        """Least squares; neither part below zero."""
        if not points:
            return cls(START, _each(request), "estimated")
        reads, seconds = np.array(points, float).T
        by = f"{len(points)} earlier training{'s' * (len(points) > 1)}"
        if len(set(reads)) > 1:
            each, start = np.polyfit(reads, seconds, 1)
            if each > 0 and start >= 0:
                return cls(float(start), float(each), by)
        return cls(0.0, float(seconds.sum() / reads.sum()), by)

    def seconds(self, reads: Iterable[float]) -> float:
        """Of several trainings, one after the other."""
        return sum(self.start + self.each * one for one in reads)


def _points(
    request: Request, folder: Path | None, records: list[dict[str, Any]]
) -> Iterable[tuple[float, float]]:
    """(rows read, seconds) of trainings of this model that were measured."""
    config, trained = read_config(request.path("finetune.yml")), request.facts["counts"]["trained"]
    if folder is not None:
        facts = shards.load(folder)
        for name, seconds in facts["seconds"].items():
            step = name.removeprefix("shard-")
            if step != name and seconds and (reads := shards.reads(facts, step)):
                yield reads * shards.passes(config, facts["slices"]), seconds
    for record in records:
        way, seconds = record["way"], record["seconds"]
        if way["way"] == "retrain" and seconds.get("retrain"):
            yield way["rows"]["trained"] * passes(config, trained), seconds["retrain"]
        elif way["way"] == "match" and seconds.get("teacher"):
            yield _taught(request), seconds["teacher"]
    log = request.root / str(config.get("output_dir")) / "debug.log"
    if said := _RUNTIME.findall(log.read_text("utf-8", "replace")) if log.is_file() else ():
        yield _whole(request), START + float(said[-1])


def _records(request: Request) -> Iterable[dict[str, Any]]:
    """Predicates of the requests beside it that began with the same base."""
    for path in sorted(request.folder.parent.glob("*/record.json")):
        if Request.load(path.parent).facts.get("base") == request.facts.get("base"):
            yield read_json(path)["predicate"]


def _each(request: Request) -> float:
    """Seconds of a row, from the number of weights and the speed of a product on this machine; of
    the processor, which others may share."""
    import torch

    from axolotl_unlearn.checks.estimate import shapes_of

    device, clock = "cpu", time.process_time
    if torch.cuda.is_available():
        device, clock = "cuda", time.monotonic
    base = Path(str(request.facts["base"]))
    numbers = sum(int(np.prod(shape)) for _, shape in shapes_of(base)) or 10**9
    size = 1024
    a = torch.ones(size, size, device=device)
    a @ a
    began, count = clock(), 0
    while clock() - began < 0.3:
        (a @ a)[0, 0].item()
        count += 1
    speed = 2 * size**3 * count / (clock() - began)
    config = read_config(request.path("finetune.yml"))
    tokens = min(TOKENS, int(config.get("sequence_len") or TOKENS))
    return 6 * numbers * tokens / (EFFICIENCY * speed)


def _cost(
    way: str, request: Request, folder: Path | None, line: Line, records: list[dict[str, Any]]
) -> Cost:
    try:
        reads = _reads(way, request, folder)
    except UnlearnError as error:
        return Cost(way, SHOWS[way], closed=str(error))
    from axolotl_unlearn.checks.estimate import memory
    from axolotl_unlearn.config import parse_unlearn

    measured = [r["seconds"].get("measure") for r in records if r["way"]["way"] == way]
    seconds = line.seconds(reads)
    config = read_config(request.path("forget.yml" if way == "match" else "finetune.yml"))
    block = parse_unlearn(config.get("unlearn") or {} if way == "match" else {})
    return Cost(
        way,
        SHOWS[way],
        round(seconds, 1),
        line.by,
        next((one for one in reversed(measured) if one), None),
        memory(config, block, int(config.get("sequence_len") or 2048)).get("at_least"),
        sum(reads),
        round((seconds - line.start) / line.each) if way == "match" else None,
    )


def _reads(way: str, request: Request, folder: Path | None) -> list[float]:
    """Rows that each training of the way reads."""
    counts = request.facts["counts"]
    if way == "retrain":
        retrain.unchanged(request)
        return [_whole(request) * (1 - counts["forget"] / counts["trained"])]
    if way == "shards":
        _, again, facts = shards.affected(request, folder or shards.find(request))
        each = shards.passes(read_config(request.path("finetune.yml")), facts["slices"])
        return [shards.reads(facts, step) * each for step in again] or [0.0]
    config = read_config(request.path("forget.yml"))
    rows = config["max_steps"] * config["micro_batch_size"]
    looked = 0.0
    if level := config["unlearn"].get("level"):  # a forward of all rows that a look scores
        each = counts["forget"] + counts["heldout"] + min(counts["retain"], LOOKED)
        looked = each * (1 + config["max_steps"] / level["every"]) / 3
    return [_taught(request), rows * MATCH_ROWS * MATCH_FORWARDS + looked]


def _taught(request: Request) -> float:
    """Rows that the teacher reads."""
    config = read_config(request.path("teacher.yml"))
    paths = [Path(entry["path"]) for entry in config["datasets"]]
    rows = sum(path.read_text("utf-8").count("\n") for path in paths)
    return rows * float(config.get("num_epochs") or 1)


def _whole(request: Request) -> float:
    """Rows that the run that made the model read."""
    trained = request.facts["counts"]["trained"]
    return float(trained * passes(read_config(request.path("finetune.yml")), trained))
