"""What begins anew in each phase of a run: the learning rate, and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.phases import Phase, phase_at


def forget_moments(optimizer: Any) -> None:
    """As a new optimizer of the same weights: AILS-NTUA's recipes make one for every chunk and
    phase (arXiv 2503.02443, released code)."""
    getattr(optimizer, "optimizer", optimizer).state.clear()


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
        stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
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
