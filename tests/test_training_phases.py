"""Phases; real runs are in test_train_axolotl."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.training.phases import make_phases, phase_at, phase_steps, restarting

BLOCK = {
    "phases": [
        {"steps": 5, "forget": {"objective": "ga", "weight": 0.8}},
        {
            "epochs": 1.5,
            "learning_rate": 2e-4,
            "retain": {"objective": "nll"},
        },
    ]
}


def phases():
    """5 steps, then 1.5 passes of 2 steps each: steps 0 to 4, and 5 to 7."""
    args = parse_unlearn(BLOCK)
    return make_phases(args, total=99, steps_per_epoch=2, learning_rate=1e-4)


def test_phases_follow_each_other():
    first, second = phases()
    assert phase_steps(parse_unlearn(BLOCK), 2) == [5, 3]
    assert (first.start, first.stop, second.start, second.stop) == (0, 5, 5, 8)
    assert [phase_at([first, second], step).start for step in (0, 4, 5, 7, 8)] == [0, 0, 5, 5, 5]
    assert (first.sides, second.sides) == ({"forget"}, {"retain"})
    assert second.learning_rate == pytest.approx(2)


@pytest.mark.parametrize(
    "name", ["linear", "cosine", "constant_with_warmup", "cosine_with_min_lr", "polynomial"]
)
def test_the_learning_rate_begins_anew_in_each_phase(name):
    """It equals that of two runs one after the other, the second at twice the rate."""

    def made(optimizer, steps):
        more = {"min_lr": 3e-5} if name == "cosine_with_min_lr" else {}  # a rate, not a share
        return get_scheduler(name, optimizer, 1, steps, scheduler_specific_kwargs=more)

    def rates(schedule, optimizer, steps):
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    def optimizer(rate):
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)

    one = optimizer(1e-4)
    got = rates(restarting(one, phases(), made), one, 8)
    want = []
    for rate, steps in ((1e-4, 5), (2e-4, 3)):
        alone = optimizer(rate)
        want += rates(made(alone, steps), alone, steps)
    assert got == pytest.approx(want) and max(want) == pytest.approx(2e-4)
