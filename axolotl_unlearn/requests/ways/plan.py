"""`axolotl-unlearn request plan`: the rows that each way would read, and what it would show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.new import passes
from axolotl_unlearn.requests.request import Request
from axolotl_unlearn.requests.rows import read_config
from axolotl_unlearn.requests.ways import WAYS, way_of


@dataclass(frozen=True)
class Cost:
    """Of one way.

    Attributes:
        reads: Rows read, each pass counted.
        closed: Why it is not open to the request; then nothing else is known.
    """

    way: str
    shows: str
    reads: float = 0.0
    closed: str = ""


def plan(request: Request) -> list[Cost]:
    """What each way would cost; writes nothing."""
    return [_cost(way, request) for way in WAYS]


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


def _cost(name: str, request: Request) -> Cost:
    way = way_of(name)
    try:
        reads = way.reads(request)
    except UnlearnError as error:
        return Cost(name, way.SHOWS, closed=str(error))
    says = way.says(request) if hasattr(way, "says") else way.SHOWS
    return Cost(name, says, sum(reads))


def whole(request: Request) -> float:
    """Rows that the run that made the model read, each pass counted."""
    trained = request.facts["counts"]["trained"]
    return float(trained * passes(read_config(request.path("finetune.yml")), trained))
