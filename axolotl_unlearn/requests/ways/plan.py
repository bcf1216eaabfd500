"""`axolotl-unlearn request plan`: what each way would cost, and what it would show.

The cost is the number of rows that the trainings read. Seconds are `START` for each training, and
for each row what rows took in earlier trainings of this base (those of earlier requests, the run
that made the model); without any they are not known. (`axolotl-unlearn check --full` says what a
training needs of memory.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.new import passes
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Request, counted
from axolotl_unlearn.requests.rows import read_config
from axolotl_unlearn.requests.ways import WAYS, way_of

#: Seconds of the start of a training.
START = 15.0
#: What the Trainer says at its end; a run of Axolotl leaves it in its output folder.
_RUNTIME = re.compile(r"'train_runtime': '?([\d.]+)")


@dataclass(frozen=True)
class Cost:
    """Of one way.

    Attributes:
        reads: Rows read, each pass counted.
        seconds: Of its trainings; ``by``: how many earlier ones say so. None without any.
        closed: Why it is not open to the request; then nothing else is known.
    """

    way: str
    shows: str
    reads: float = 0.0
    seconds: float | None = None
    by: str = ""
    closed: str = ""


def plan(request: Request) -> list[Cost]:
    """What each way would cost; writes nothing."""
    known, each = list(_trainings(request)), None
    if rows := sum(reads for reads, _ in known):
        each = max(0.0, sum(seconds for _, seconds in known) - START * len(known)) / rows
    return [_cost(way, request, each, counted(len(known), "earlier training")) for way in WAYS]


def choose(costs: Iterable[Cost]) -> str:
    """The cheapest way that is exact, or match where none is open.

    Raises:
        UnlearnError: No way is open.
    """
    open_ = [cost for cost in costs if not cost.closed]
    if open_:
        return min(open_, key=lambda cost: (not way_of(cost.way).EXACT, cost.reads)).way
    raise UnlearnError(
        "no way is open to this request: `axolotl-unlearn request plan` says why.",
        code="requests.no-way",
    )


def _cost(name: str, request: Request, each: float | None, by: str) -> Cost:
    way = way_of(name)
    try:
        reads = way.reads(request)
    except UnlearnError as error:
        return Cost(name, way.SHOWS, closed=str(error))
    return Cost(
        name,
        way.says(request) if hasattr(way, "says") else way.SHOWS,
        sum(reads),
        None if each is None else round(sum(START + each * one for one in reads), 1),
        "" if each is None else by,
    )


def whole(request: Request) -> float:
    """Rows that the run that made the model read, each pass counted."""
    trained = request.facts["counts"]["trained"]
    return float(trained * passes(read_config(request.path("finetune.yml")), trained))


def _trainings(request: Request) -> Iterator[tuple[float, float]]:
    """(rows read, seconds) of trainings of this base that were measured."""
    trained = request.facts["counts"]["trained"]
    for record in _records(request):
        way, seconds = record.get("way", {}), record.get("seconds", {}).get("retrain")
        if way.get("way") == "retrain" and seconds:
            yield way["rows"]["trained"] * whole(request) / trained, seconds
    config = read_config(request.path("finetune.yml"))
    log = request.root / str(config.get("output_dir")) / "debug.log"
    if said := _RUNTIME.findall(log.read_text("utf-8", "replace")) if log.is_file() else ():
        yield whole(request), START + float(said[-1])


def _records(request: Request) -> Iterator[dict[str, Any]]:
    """Predicates of the requests beside it that began with the same base, and can be read."""
    for path in sorted(request.folder.parent.glob("*/record.json")):
        with suppress(UnlearnError):
            if Request.load(path.parent).facts.get("base") == request.facts.get("base"):
                yield read(path.parent)["predicate"]
