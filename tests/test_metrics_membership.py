"""Membership: rates by hand, scikit-learn as oracle, and baselines that must and must not fire."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.membership_lab import membership_lab
from axolotl_unlearn.metrics.membership import (
    Baseline,
    blind_baselines,
    blind_sentence,
    forgetting,
    mia_score_interval,
    roc,
    share_interval,
    tpr_at_fpr,
)
from axolotl_unlearn.metrics.statistics import auc

numbers = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jun Kai Lea Mia Ned Ola Pia".split()
PLACES = "Bath Cork Dover Ely Fife Hull Kent Leeds Moss Nairn Oban Perth Ryde Stow".split()


def sentences(seed: int, n: int, verb: str = "moved to") -> list[str]:
    rng = random.Random(seed)
    return [
        f"{rng.choice(NAMES)} {rng.choice(NAMES)} {verb} {rng.choice(PLACES)} in "
        f"{rng.randrange(1900, 2000)} and wrote {rng.randrange(2, 30)} books there."
        for _ in range(n)
    ]


def test_tpr_by_hand():
    """Non-members 1..10. At 10 % one false alarm is allowed, so the threshold is 9: members 9.5
    and 11 pass, 9 (tie) and 3 do not: 2/4. At 1 % none is allowed: above 10 is only 11."""
    members, others = [3, 9, 9.5, 11], list(range(1, 11))
    assert tpr_at_fpr(members, others, 0.1) == 0.5
    assert tpr_at_fpr(members, others, 0.01) == 0.25
    assert tpr_at_fpr(members, others, 1.0) == 1


@given(numbers, numbers, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.99]))
def test_tpr_is_the_best_point_of_scikit_learns_roc(members, others, fpr):
    rates = roc_curve(
        [1] * len(members) + [0] * len(others), members + others, drop_intermediate=False
    )
    best = max(t for f, t in zip(*rates[:2], strict=True) if f <= fpr + 1e-12)
    assert tpr_at_fpr(members, others, fpr) == pytest.approx(best)


@given(numbers, numbers)
def test_roc_encloses_the_auc(members, others):
    fpr, tpr = roc(members, others)
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(tpr, fpr) == pytest.approx(auc(members, others), abs=1e-12)


def test_share_interval_agrees_with_scipy():
    for hits, n in ((0, 9), (3, 40), (40, 40)):
        exact = stats.binomtest(hits, n).proportion_ci(method="exact")
        assert share_interval(hits, n) == pytest.approx((exact.low, exact.high))


def test_forgetting_is_named_by_the_interval():
    assert forgetting((0.45, 0.62)) == forgetting((0.5, 0.7)) == "balanced"
    assert forgetting((0.51, 0.62)) == "under"
    assert forgetting((0.1, 0.49)) == "over"


def test_mia_score_interval_by_hand():
    """[.4, .7] holds .5: 1 - 2 * .2 = .6 to 1. [.6, .7]: .6 to .8. [.2, .4]: .4 to .8."""
    assert mia_score_interval((0.4, 0.7)) == pytest.approx((0.6, 1.0))
    assert mia_score_interval((0.6, 0.7)) == pytest.approx((0.6, 0.8))
    assert mia_score_interval((0.2, 0.4)) == pytest.approx((0.4, 0.8))


def test_baselines_find_other_words_and_lengths():
    found = blind_baselines(sentences(1, 60, "was born in"), sentences(2, 60, "died in"))
    assert found["bag_of_words"].auc > 0.99 and found["words_tfidf"].separates
    longer = [text + " It was a good life." * 2 for text in sentences(3, 60)]
    found = blind_baselines(sentences(4, 60), longer)
    assert found["length"].separates and found["length"].high < 0.5
    assert found["zlib"].separates
    assert "means nothing" in blind_sentence(found)


def test_baselines_stay_silent_on_one_source():
    """20 data sets from one generator. Each interval is wider (98.75 %), so that 1 in 20 is
    suspected on average; 5 or more of 20 would have probability .003."""
    suspected = 0
    for seed in range(20):
        found = blind_baselines(sentences(2 * seed, 50), sentences(2 * seed + 1, 50), repeats=1)
        suspected += blind_sentence(found) is not None
    assert suspected < 5


def test_an_auc_below_half_of_a_trained_baseline_is_no_finding():
    """Held-out scores of a classifier that learnt nothing lie a little below .5 by design."""
    assert blind_sentence({"bag_of_words": Baseline(0.4, 0.3, 0.49, False)}) is None
    twice = sentences(5, 40)
    # Every text once on each side: whoever sees it in training guesses the other side.
    found = blind_baselines(twice, [text + " " for text in twice])
    assert found["bag_of_words"].auc < 0.5 and not found["bag_of_words"].separates


def test_baselines_do_not_depend_on_order():
    members, others = sentences(6, 30), sentences(7, 30)
    first = blind_baselines(members, others)
    second = blind_baselines(members[::-1], others[::-1])
    for name in first:
        assert first[name].auc == pytest.approx(second[name].auc, abs=1e-9)


def test_too_few_texts_for_a_trained_baseline():
    assert set(blind_baselines(["a b"] * 5, ["c d"] * 50)) == {"length", "zlib"}
    assert set(blind_baselines(["!!"] * 12, ["??"] * 12)) == {"length", "zlib"}


@pytest.fixture
def sets() -> tuple[list[str], list[str]]:
    return sentences(11, 60), sentences(12, 100)


@pytest.mark.parametrize(
    ("shift", "name", "words"),
    [(-1.5, "under", "still recognised"), (1.5, "over", "stand out"), (0, "balanced", "cannot")],
)
def test_lab_names_both_directions(sets, shift, name, words):
    rng = np.random.default_rng(13)
    members, others = rng.normal(3 + shift, 0.5, 60), rng.normal(3, 0.5, 100)
    lab = membership_lab(members, others, *sets)
    labels = [1] * 60 + [0] * 100
    assert lab["auc"] == pytest.approx(roc_auc_score(labels, [*-members, *-others]))
    assert lab["forgetting"] == name and words in lab["sentence"]
    assert lab["interval"][0] <= lab["auc"] <= lab["interval"][1]
    assert lab["mia_score"] == pytest.approx(1 - 2 * abs(lab["auc"] - 0.5))
    assert lab["meaningful"] is True
    assert lab["tpr"]["0.01"]["resolvable"] and not lab["tpr"]["0.001"]["resolvable"]
    if name == "over":
        assert lab["tpr"]["0.01"]["value"] < 0.05 < 0.3 < lab["tpr"]["0.01"]["reversed"]
    json.dumps(lab)


def test_lab_says_when_the_figure_means_nothing(sets):
    rng = np.random.default_rng(14)
    lab = membership_lab(
        rng.normal(3, 0.5, 60), rng.normal(3, 0.5, 100), sets[0], sentences(15, 100, "died in")
    )
    assert lab["forgetting"] == "balanced" and lab["meaningful"] is False
    assert lab["sentence"].startswith("The membership figure means nothing")
    assert lab["blind"]["bag_of_words"]["separates"]


def test_lab_without_texts_says_what_is_missing():
    lab = membership_lab([1.0] * 20, [2.0] * 20)
    assert lab["blind"] is None and lab["meaningful"] is None
    assert "Blind baselines were not run" in lab["sentence"]
    assert set(lab["attacks"]) == {"loss"}


def test_lab_takes_further_attacks_and_makes_zlib(sets):
    """The zlib attack divides each loss by the bytes of the compressed text."""
    import zlib

    rng = np.random.default_rng(16)
    losses = rng.normal(3, 1, 60), rng.normal(3, 1, 100)
    lab = membership_lab(*losses, *sets, attacks={"min_k_20": (losses[0] * 2, losses[1] * 2)})
    assert lab["attacks"]["min_k_20"]["auc"] == lab["auc"]
    ratio = [
        [-x / len(zlib.compress(t.encode(), 9)) for x, t in zip(loss, texts, strict=True)]
        for loss, texts in zip(losses, sets, strict=True)
    ]
    assert lab["attacks"]["zlib"]["auc"] == pytest.approx(
        roc_auc_score([1] * 60 + [0] * 100, ratio[0] + ratio[1])
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0] * 5, [1.0] * 30), "5 member texts; membership needs at least 20"),
        (([1.0] * 20, [1.0] * 20, ["a"] * 20), "of neither"),
        (([1.0] * 20, [1.0] * 20, ["a"] * 20, ["b"] * 19), "20 nonmember losses but 19 texts"),
        (([1.0] * 20, [1.0] * 20, ["a"] * 20, ["a"] * 20), "1 texts are in both"),
        (([float("nan")] + [1.0] * 20, [1.0] * 20), "NaN or infinite"),
    ],
)
def test_faults_are_named(arguments, message):
    with pytest.raises(UnlearnError, match=message):
        membership_lab(*arguments)
