"""Ways to carry out a deletion request: each a module of this package.

``retrain`` trains the base on the remaining rows and is exact: no step that made the model read a
deleted row. ``shards`` does so with one part of a model that was made for it.
``match`` unlearns, for models whose training cannot be repeated. Another way is a name more in
`WAYS` and in the choice of `request run --way`, and a module with these:

    EXACT  SHOWS                 whether it ends with ``exact.json``; what it shows, in a few words
    prepare(request)             writes what it trains with; returns ``way.json``
    reads(request)               rows that its trainings read, and what it shows; for `plan`
    make(request, run)           trains into ``work/model``
    require(request)             raises if what it stands on was changed since `prepare`; called
                                 before the model is handed over
    fits(request, threads, processes)
                                 if there: raises where it cannot train with these
    hand_over(request)           if there: after ``work/model`` has become ``model``; again after a
                                 kill
    outputs(request)             if there: more folders that hold the old model or rows, for `erase`

`prepare` and `reads` raise `UnlearnError` where the way is not open to the request.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import PROOF, WAY, Request, fault  # noqa: F401

#: In the order of preference where two cost the same.
WAYS = ("shards", "retrain", "match")


def way_of(name: str) -> ModuleType:
    """The module of a way."""
    return importlib.import_module(f"{__name__}.{name}")


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
    """What each way would read and show; writes nothing."""
    costs = []
    for name in WAYS:
        way = way_of(name)
        try:
            reads, says = way.reads(request)
            costs.append(Cost(name, says, reads))
        except UnlearnError as error:
            costs.append(Cost(name, way.SHOWS, closed=str(error)))
    return costs


def choose(costs: Sequence[Cost]) -> str:
    """The cheapest way that is exact, or match where none is open.

    Raises:
        UnlearnError: No way is open.
    """
    open_ = [cost for cost in costs if not cost.closed]
    if open_:
        return min(open_, key=lambda cost: (not way_of(cost.way).EXACT, cost.reads)).way
    why = " ".join(f"{cost.way}: {cost.closed}" for cost in costs)
    raise fault("requests.no-way", f"no way is open to this request. {why}")
