"""The learned attack: it finds a pattern that no mean shows, and nothing where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from axolotl_unlearn.metrics.learned import learned_scores, text_features
from axolotl_unlearn.metrics.membership import priv_leak, rank_test
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.metrics.statistics import auc


def text(rng, known: bool) -> TokenFacts:
    """Tokens of mean log-probability -2; of a known text very likely or very unlikely ones."""
    n = int(rng.integers(30, 60))
    spread = 1.5 if known else 0.5
    logp = np.minimum(-2 + spread * rng.normal(0, 1, n), -0.01)
    logp += -2 - logp.mean()
    return TokenFacts(logp, rng.random(n) < 0.3, np.full(n, -3.0), np.full(n, 1.0))


@pytest.fixture(scope="module")
def features():
    rng = np.random.default_rng(0)
    return [
        np.array([text_features(text(rng, k)) for _ in range(60)]) for k in (True, False, False)
    ]


def test_a_pattern_that_the_loss_does_not_show(features):
    known, unseen, _ = features
    loss = 2  # first figure of the log-probabilities: their mean
    assert auc(known[:, loss], unseen[:, loss]) == pytest.approx(0.5, abs=0.12)
    scores = learned_scores(known, unseen)
    assert auc(*scores) > 0.95


def test_nothing_is_learnt_from_two_sets_of_one_kind(features):
    _, first, second = features
    members, others = learned_scores(first, second)
    assert auc(members, others) < 0.62
    assert rank_test(members, others, "greater") > 0.05


def test_rows_of_one_document_stay_in_one_fold():
    """Noise, three copies of each member: with copies in the training folds it would be learnt."""
    rng = np.random.default_rng(1)
    few = rng.normal(0, 1, (20, 40))
    members, others = np.repeat(few, 3, 0), rng.normal(0, 1, (60, 40))
    together = learned_scores(members, others, np.repeat(np.arange(20), 3).tolist(), repeats=1)
    apart = learned_scores(members, others, repeats=1)
    assert auc(*apart) > max(0.6, auc(*together) + 0.1)


def test_features_by_hand():
    """Two of four tokens greedy, the longest run 2 of 4; mean -2.5 of -1 .. -4."""
    facts = TokenFacts(
        np.array([-1.0, -2, -3, -4]), np.array([False, True, True, False]),
        np.full(4, -3.0), np.full(4, 2.0),
    )  # fmt: skip
    found = text_features(facts)
    assert found[:3] == [0.5, 0.5, -2.5]
    assert found[4] == -4 and found[11] == -1  # lowest and highest
    assert np.isfinite(found).all()
    short = TokenFacts(np.array([-1.0]), np.array([True]), np.array([-2.0]), np.array([0.0]))
    assert np.isfinite(text_features(short)).all()


def test_too_few_texts_train_nothing():
    assert learned_scores(np.zeros((19, 3)), np.zeros((40, 3))) is None


def test_priv_leak_is_that_of_muse():
    """MUSE News: retrained .4772 in its own sense (ours .5228). All recognised, ours 1: -100."""
    assert priv_leak(1.0, 1 - 0.4772) == -100
    assert priv_leak(0.5228, 0.5228) == 0
    assert priv_leak(0.0, 1 - 0.4772) == pytest.approx(100 * (1 / 0.4772 - 1))
