"""Calibration of a teacher on held-out rows: what it recovers, how targets are corrected."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from axolotl_unlearn.objectives.matching import log_odds
from axolotl_unlearn.reference.level import Calibration, Level


def drawn(seed: int, n: int = 4000) -> torch.Tensor:
    """Log-probs of a teacher: log-odds around 1 with a spread of 3 nats."""
    return F.logsigmoid(1 + 3 * torch.randn(n, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("slope, c", [(1.0, -0.7), (1.0, 0.4), (1.8, -0.5)])
def test_a_known_gap_is_recovered_on_other_rows(slope, c):
    """The policy's log-odds are ``slope * teacher + c``, in another order than the teacher's rows:
    only the distributions are compared. On fresh tokens the map gives that line."""
    teacher = drawn(0)
    policy = F.logsigmoid(slope * log_odds(teacher) + c)
    found = Calibration.fit(teacher, policy[torch.randperm(len(policy))])
    fresh = drawn(1, 500)
    fresh = fresh[(log_odds(fresh) - 1).abs() < 5]  # 1 in 1000 lies in the last, sparse intervals
    assert_close(log_odds(found(fresh)), slope * log_odds(fresh) + c, atol=0.12, rtol=0.02)


def test_the_map_is_monotone_and_goes_on_with_slope_one_beyond_its_knots():
    found = Calibration.fit(drawn(0, 100), drawn(1, 100))
    odds = torch.linspace(-14, 11, 400)
    mapped = log_odds(found(F.logsigmoid(odds)))
    assert (mapped.diff() > -1e-4).all()
    assert_close(mapped[1] - mapped[0], odds[1] - odds[0], atol=1e-4, rtol=1e-4)


def test_targets_move_until_forget_rows_have_the_level_of_held_out_rows():
    """A policy that always settles .3 nats of log-odds above its target, as under a retain loss:
    without correction it stays there, with it the error shrinks by the same share each round."""
    heldout = [drawn(seed, 60) for seed in range(40)]
    level = Level(gain=0.5)
    level.fit({"d": heldout}, {"d": heldout})
    left = []
    for _ in range(24):
        settled = [F.logsigmoid(log_odds(level.aim(row, "d")) + 0.3) for row in heldout]
        left.append(level.correct({"d": settled}, {"d": heldout})["d"])
    assert left[0] > 0.05 and abs(left[-1]) < 0.005
    level.fit({"d": heldout}, {"d": heldout})
    assert level.maps["d"].shift == pytest.approx(-0.3, abs=0.05)  # kept by a refit
    unknown = drawn(3, 5)
    assert_close(level.aim(unknown, "q"), unknown)
