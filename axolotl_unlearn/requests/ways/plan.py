"""`axolotl-unlearn request plan`: what each way would cost, and what it would show.

Seconds are those of trainings: `START` for each, and for each row that it reads what rows took in
earlier trainings of this base (those of earlier requests, the run that made the model); without
any, what the model's size and the speed of this machine say, which is rough. Memory is that of
weights, gradients and optimizer.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import device_name
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.new import passes
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Request
from axolotl_unlearn.requests.rows import read_config
from axolotl_unlearn.requests.ways import WAYS, way_of

#: Seconds of the start of a training; share of the speed of a large product that it reaches; tokens
#: of a row.
START, EFFICIENCY, TOKENS = 15.0, 0.3, 256
#: What the Trainer says at its end; a run of Axolotl leaves it in its output folder.
_RUNTIME = re.compile(r"'train_runtime': '?([\d.]+)")


@dataclass(frozen=True)
class Cost:
    """Of one way.

    Attributes:
        seconds: Of its trainings; ``by``: measured or estimated.
        bytes: Of memory, at least; None where the model's files are not here.
        reads: Rows read, each pass counted.
        closed: Why it is not open to the request; then nothing else is known.
    """

    way: str
    shows: str
    seconds: float | None = None
    by: str = ""
    bytes: int | None = None
    reads: float | None = None
    closed: str = ""


def plan(request: Request) -> list[Cost]:
    """What each way would cost; writes nothing."""
    known = list(_trainings(request))
    if rows := sum(reads for reads, _ in known):
        each = max(0.0, sum(seconds for _, seconds in known) - START * len(known)) / rows
        by = f"{len(known)} earlier training{'s' * (len(known) > 1)}"
    else:
        each, by = _each(request), "estimated"
    return [_cost(way, request, each, by) for way in WAYS]


def choose(costs: Iterable[Cost], limit: float | None = None) -> str:
    """The cheapest way that is exact, or match where each takes more than ``limit`` seconds.

    Raises:
        UnlearnError: No way is open.
    """
    open_ = [cost for cost in costs if not cost.closed]
    exact = [cost for cost in open_ if way_of(cost.way).EXACT]
    if fit := [cost for cost in exact if limit is None or cost.seconds <= limit]:
        return min(fit, key=lambda cost: cost.seconds).way
    if any(cost.way == "match" for cost in open_):
        return "match"
    raise UnlearnError(
        "no way is open to this request: `axolotl-unlearn request plan` says why.",
        code="requests.no-way",
    )


def _cost(name: str, request: Request, each: float, by: str) -> Cost:
    from axolotl_unlearn.checks.estimate import memory
    from axolotl_unlearn.config import parse_unlearn

    way = way_of(name)
    try:
        reads = way.reads(request)
    except UnlearnError as error:
        return Cost(name, way.SHOWS, closed=str(error))
    config = read_config(request.path("finetune.yml" if way.EXACT else "forget.yml"))
    block = parse_unlearn({} if way.EXACT else config.get("unlearn") or {})
    return Cost(
        name,
        way.says(request) if hasattr(way, "says") else way.SHOWS,
        round(sum(START + each * one for one in reads), 1),
        by,
        memory(config, block, int(config.get("sequence_len") or 2048)).get("at_least"),
        sum(reads),
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


def _each(request: Request) -> float:
    """Seconds of a row, from the number of weights and the speed of a product on this machine; of
    the processor, which others may share."""
    import torch

    from axolotl_unlearn.checks.estimate import shapes_of

    device, size, count = device_name(), 1024, 0
    clock = time.process_time if device == "cpu" else time.monotonic
    shapes = (shape for _, shape in shapes_of(Path(str(request.facts["base"]))))
    numbers = sum(map(math.prod, shapes)) or 10**9
    a = torch.ones(size, size, device=device)
    a @ a
    began = clock()
    while clock() - began < 0.3:
        (a @ a)[0, 0].item()
        count += 1
    speed = 2 * size**3 * count / (clock() - began)
    length = int(read_config(request.path("finetune.yml")).get("sequence_len") or TOKENS)
    return 6 * numbers * min(TOKENS, length) / (EFFICIENCY * speed)
