"""What happens when: phases of a run.

All is a pure function of the number of the optimizer step, so that a run that is stopped anywhere
goes on exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.engine.views import Entry, make_entries
from axolotl_unlearn.errors import UnlearnError


@dataclass(frozen=True)
class Phase:
    """Steps ``start`` to ``stop`` (excluded) of a run.

    Attributes:
        entries: the objectives of these steps.
        learning_rate: its peak, as a multiple of the config's ``learning_rate``.
        fresh_optimizer: whether it begins without the optimizer's moments.
    """

    start: int
    stop: int
    entries: tuple[Entry, ...]
    learning_rate: float = 1.0
    fresh_optimizer: bool = False

    @property
    def sides(self) -> set[str]:
        """The sides that have objectives."""
        return {entry.side for entry in self.entries}

    @property
    def roles(self) -> set[str]:
        """Roles of the rows that its objectives look at."""
        return {role for entry in self.entries for role in entry.objective.roles(entry.side)}


def phase_steps(args: UnlearnArgs, steps_per_epoch: int) -> list[int]:
    """Optimizer steps of each phase of a config that has phases."""
    return [phase.steps or math.ceil(phase.epochs * steps_per_epoch) for phase in args.phases]


def make_phases(
    args: UnlearnArgs, *, total: int, steps_per_epoch: int, learning_rate: float
) -> list[Phase]:
    """The phases of a config; without ``phases:`` one of ``total`` steps."""
    if not args.phases:
        return [Phase(0, total, tuple(make_entries(args.entries(), args.reference)))]
    ends = [0]
    for steps in phase_steps(args, steps_per_epoch):
        ends.append(ends[-1] + steps)
    return [
        Phase(
            start,
            stop,
            tuple(make_entries(phase.entries(), args.reference)),
            (phase.learning_rate or learning_rate) / learning_rate,
            phase.fresh_optimizer,
        )
        for phase, (start, stop) in zip(args.phases, pairwise(ends), strict=True)
    ]


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of the step with this global number; the last one from its end on."""
    return next((phase for phase in phases if step < phase.stop), phases[-1])


def restarting(
    optimizer: torch.optim.Optimizer,
    phases: Sequence[Phase],
    schedule_of: Callable[[torch.optim.Optimizer, int], LRScheduler],
) -> LambdaLR:
    """A schedule that begins anew in each phase.

    Args:
        schedule_of: makes the configured schedule of an optimizer for a number of steps.
    """
    factors = []
    for phase in phases:
        peak = optimizer.defaults["lr"] * phase.learning_rate  # some end at a rate of their own
        stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
        schedule = schedule_of(stand_in, phase.stop - phase.start)
        if not isinstance(schedule, LambdaLR):
            raise UnlearnError(
                f"the learning-rate schedule {type(schedule).__name__} cannot begin anew in each "
                "of `unlearn.phases`; use `lr_scheduler: linear`, `cosine` or `constant`."
            )
        factors.append(schedule.lr_lambdas[0])

    def factor(step: int) -> float:
        number = phases.index(phase_at(phases, step))
        phase = phases[number]
        return phase.learning_rate * factors[number](step - phase.start)

    return LambdaLR(optimizer, factor)
