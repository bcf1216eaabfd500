"""`axolotl unlearn request plan`: what each way would cost, and what it would show.

Seconds are those of trainings: a line through what the last runs took (steps of the shards,
trainings of earlier requests) for the rows that they read; without any, from the model's size and
the speed of this machine, which is rough. Memory is that of weights, gradients and optimizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import Request
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
    folder = _shards(request)
    line = Line.through(list(_points(request, folder)), request)
    return [_cost(way, request, folder, line) for way in WAYS]


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
    raise UnlearnError("no way is open to this request: `axolotl unlearn request plan` says why.")


def to_json(costs: Iterable[Cost]) -> list[dict[str, Any]]:
    return [asdict(cost) for cost in costs]


# --- seconds -------------------------------------------------------------------------------------


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
        by = f"{len(points)} earlier trainings"
        if len(set(reads)) > 1:
            each, start = np.polyfit(reads, seconds, 1)
            if each > 0 and start >= 0:
                return cls(float(start), float(each), by)
        return cls(0.0, float(seconds.sum() / reads.sum()), by)

    def seconds(self, reads: Iterable[float]) -> float:
        """Of several trainings, one after the other."""
        return sum(self.start + self.each * one for one in reads)


def _points(request: Request, folder: Path | None) -> Iterable[tuple[float, float]]:
    """(rows read, seconds) of trainings of this model that were measured."""
    if folder is not None:
        facts = shards.load(folder)
        for name, seconds in facts["seconds"].items():
            if name.startswith("shard-") and seconds:
                step = shards.step_of(name.removeprefix("shard-"))
                if reads := shards.reads(facts, step):
                    yield reads * shards.passes(_config(request), facts["slices"]), seconds
    for record in _records(request):
        way, seconds = record.get("way", {}), record.get("seconds", {})
        if way.get("way") == "retrain" and seconds.get("retrain"):
            yield way["rows"]["trained"] * _passes(request), seconds["retrain"]
        elif way.get("way") == "match" and seconds.get("teacher"):
            yield _taught(request), seconds["teacher"]


def _records(request: Request) -> Iterable[dict[str, Any]]:
    """Predicates of the requests beside it that began with the same base."""
    for path in sorted(request.folder.parent.glob("*/record.json")):
        other = Request.load(path.parent)
        if other.facts.get("base") == request.facts.get("base"):
            yield json.loads(path.read_text("utf-8"))["predicate"]


def _each(request: Request) -> float:
    """Seconds of a row, from the number of weights and the speed of a product on this machine."""
    import torch

    from axolotl_unlearn.checks.estimate import _tensors

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = Path(str(request.facts["base"]))
    numbers = sum(int(np.prod(shape)) for _, (shape, _) in _tensors(base)) or 10**9
    size = 1024
    a = torch.ones(size, size, device=device)
    a @ a
    began, count = time.monotonic(), 0
    while time.monotonic() - began < 0.5:
        (a @ a)[0, 0].item()
        count += 1
    speed = 2 * size**3 * count / (time.monotonic() - began)
    tokens = min(TOKENS, int(_config(request).get("sequence_len") or TOKENS))
    return 6 * numbers * tokens / (EFFICIENCY * speed)


# --- ways ----------------------------------------------------------------------------------------


def _cost(way: str, request: Request, folder: Path | None, line: Line) -> Cost:
    try:
        reads = _reads(way, request, folder)
    except UnlearnError as error:
        return Cost(way, SHOWS[way], closed=str(error))
    measured = [
        record["seconds"]["measure"]
        for record in _records(request)
        if record.get("way", {"way": "match"})["way"] == way and record["seconds"].get("measure")
    ]
    seconds = line.seconds(reads)
    return Cost(
        way,
        SHOWS[way],
        round(seconds, 1),
        line.by,
        measured[-1] if measured else None,
        _memory(way, request),
        sum(reads),
        round((seconds - line.start) / line.each) if way == "match" else None,
    )


def _reads(way: str, request: Request, folder: Path | None) -> list[float]:
    """Rows that each training of the way reads."""
    counts = request.facts["counts"]
    if way == "retrain":
        retrain.unchanged(request)
        return [(counts["trained"] - counts["forget"]) * _passes(request)]
    if way == "shards":
        found = shards.affected(request, folder or shards.find(request))
        each = shards.passes(_config(request), found.facts["slices"])
        return [shards.reads(found.facts, step) * each for step in found.again] or [0.0]
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


def _memory(way: str, request: Request) -> int | None:
    from axolotl_unlearn.checks.estimate import memory
    from axolotl_unlearn.config import parse_unlearn

    config = read_config(request.path("forget.yml")) if way == "match" else _config(request)
    block = config.get("unlearn") if way == "match" else {}
    longest = int(config.get("sequence_len") or 2048)
    return memory(config, parse_unlearn(block or {}), longest).get("at_least")


def _passes(request: Request) -> float:
    from axolotl_unlearn.requests.new import _passes as passes

    return float(passes(_config(request), request.facts["counts"]["trained"]))


def _config(request: Request) -> dict[str, Any]:
    return read_config(request.path("finetune.yml"))


def _shards(request: Request) -> Path | None:
    try:
        return shards.find(request)
    except UnlearnError:
        return None
