"""Likelihood metrics from per-token facts, against hand arithmetic and literal definitions."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axolotl_unlearn.metrics import memorisation as mem
from axolotl_unlearn.metrics.memorisation import TokenFacts


def facts(logp, greedy=None, mean=None, sd=None) -> TokenFacts:
    n = len(logp)
    return TokenFacts(
        np.array(logp, float),
        np.array([True] * n if greedy is None else greedy),
        np.array([-1.0] * n if mean is None else mean, float),
        np.array([1.0] * n if sd is None else sd, float),
    )


def test_loss_and_probability_by_hand():
    """p = 1/2, 1/8: loss (ln 2 + ln 8)/2 = 2 ln 2; p^(1/n) = sqrt(1/16) = 1/4."""
    text = facts([math.log(1 / 2), math.log(1 / 8)])
    assert mem.loss(text) == pytest.approx(2 * math.log(2))
    assert mem.probability(text) == pytest.approx(1 / 4)


def test_exact_memorisation_by_hand():
    assert mem.exact_memorisation(facts([-1] * 4, [True, False, True, True])) == 0.75


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_extraction_strength_is_the_definition(greedy):
    """1 - min{k : positions k.. are all greedy} / n, with k = n allowed (floor 0) or not."""
    n = len(greedy)
    ks = [k for k in range(n + 1) if all(greedy[k:])]
    assert mem.extraction_strength(facts([-1] * n, greedy)) == 1 - min(ks) / n
    allowed = min(min(ks), n - 1)
    assert mem.extraction_strength(facts([-1] * n, greedy), "one_over_n") == 1 - allowed / n


def test_min_k_by_hand():
    """Five tokens, k = .4: the two lowest, -5 and -3: mean -4; k = .1: at least one: -5."""
    text = facts([-1, -5, -2, -3, -1])
    assert mem.min_k(text, 0.4) == -4
    assert mem.min_k(text, 0.1) == -5
    assert mem.min_k(text, 1.0) == pytest.approx(-12 / 5)


def test_min_k_plus_by_hand():
    """z = (logp - mean) / sd = (-1+3)/2 = 1, (-5+3)/1 = -2, (-2+1)/.5 = -2: the lowest of k=.4
    (one of three) is -2; k = .7 (two): -2."""
    text = facts([-1, -5, -2], mean=[-3, -3, -1], sd=[2, 1, 0.5])
    assert mem.min_k_plus(text, 0.4) == -2
    assert mem.min_k_plus(text, 0.7) == -2
    assert mem.min_k_plus(text, 1.0) == pytest.approx(-1)


def test_min_k_plus_where_the_model_is_certain():
    """sd 0 and the token is the certain one: 0, not NaN."""
    assert mem.min_k_plus(facts([0.0], [True], mean=[0.0], sd=[0.0])) == 0.0


@pytest.mark.parametrize("k", [0.0, 1.5, -0.1])
def test_min_k_refuses_shares_outside_0_to_1(k):
    with pytest.raises(ValueError, match="share"):
        mem.min_k(facts([-1]), k)


def test_entropy_needs_no_label():
    """The mean log-probability over the vocabulary is minus the entropy: (1 + 3) / 2 nats."""
    assert mem.entropy(facts([-9.0, -0.1], mean=[-1.0, -3.0], sd=[1.0, 1.0])) == 2.0


def test_zlib_and_reference():
    text = "abcabcabcabc"
    assert mem.zlib_ratio(facts([-2.0, -4.0]), text) == 3 / len(zlib.compress(text.encode()))
    assert mem.reference_difference(facts([-2.0]), facts([-0.5])) == 1.5
