"""Stopping by itself on made-up scores, and a real run that watches its level."""

from __future__ import annotations

import numpy as np
import pytest

from axolotl_unlearn.training.stopping import Stopping, attack_aucs


def scores(*groups: tuple[float, int], attacks=("loss", "min_k_20"), seed=0):
    """Group g has n scores around a mean."""
    rng = np.random.default_rng(seed)
    return {
        g: {name: mean + 0.1 * rng.standard_normal(n) for name in attacks}
        for g, (mean, n) in enumerate(groups)
    }


def test_documents_are_compared_within_their_kind():
    """Kinds at -1 and -3 nats, forget documents .2 above held-out ones in both: an AUC of about
    .92 in each kind. Pooled over kinds of unequal numbers it would be something else."""
    forget = scores((-0.8, 40), (-2.8, 10))
    unseen = scores((-1.0, 10), (-3.0, 40), seed=1)
    for value in attack_aucs(forget, unseen).values():
        assert 0.85 < value <= 1
    same = attack_aucs(scores((-1, 200), (-3, 200)), scores((-1, 200), (-3, 200), seed=1))
    assert all(abs(value - 0.5) < 0.1 for value in same.values())
    # Weights are the forget documents: group 0 is told apart fully, group 1 not at all.
    told = attack_aucs(
        {0: {"loss": np.ones(30)}, 1: {"loss": np.zeros(10)}, 2: {"loss": np.ones(5)}},
        {0: {"loss": np.zeros(3)}, 1: {"loss": np.zeros(4)}},
    )
    assert told == {"loss": pytest.approx((30 * 1.0 + 10 * 0.5) / 40)}


def test_it_stops_when_the_strongest_attack_cannot_tell_twice_in_a_row():
    rule = Stopping(margin=0.1, tolerance=0.1, patience=2)
    seen = [
        (0, {"loss": 1.0, "min_k": 1.0}, 0.2),
        (10, {"loss": 0.55, "min_k": 0.75}, 0.25),  # one attack still tells
        (20, {"loss": 0.52, "min_k": 0.58}, 0.25),
        (30, {"loss": 0.25, "min_k": 0.40}, 0.25),  # over-forgotten: told as well
        (40, {"loss": 0.47, "min_k": 0.56}, 0.25),
        (50, {"loss": 0.45, "min_k": 0.55}, 0.25),
    ]
    verdicts = [rule.see(*one) for one in seen]
    assert [stop for _, stop in verdicts] == [False] * 5 + [True]
    assert [better for better, _ in verdicts] == [True, True, True, False, True, True]
    assert rule.best_step == 50 and rule.history[1]["min_k"] == 0.75


def test_a_state_that_lost_retained_rows_neither_stops_the_run_nor_is_kept():
    rule = Stopping(margin=0.1, tolerance=0.1, patience=1)
    rule.see(0, {"loss": 1.0}, 0.2)
    assert rule.see(10, {"loss": 0.8}, 0.25) == (True, False)
    assert rule.see(20, {"loss": 0.5}, 0.45) == (False, False)  # .15 nats too many
    assert rule.see(30, {"loss": 0.6}, 0.30) == (True, True)
    assert rule.best_step == 30
