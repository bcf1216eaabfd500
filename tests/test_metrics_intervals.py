"""Uncertainty: bootstrap, DeLong and the noise floor, against hand arithmetic and other code."""

from __future__ import annotations

import itertools
import math
import statistics as stdlib
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from axolotl_unlearn.metrics.intervals import (
    Area,
    Mean,
    Scores,
    _between,
    _placements,
    auc,
    auc_gap,
    auc_interval,
    auc_margin_p,
    cluster_bootstrap,
    draws_difference,
    harmonic_mean,
    holm,
    ideal_membership,
    interval,
    intraclass_correlation,
    mean_interval,
    mia_score,
    mia_score_interval,
    paired_difference,
    point,
    sign_flip_p,
)

numbers = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)


def test_bootstrap_of_two_documents_has_the_exact_distribution():
    """Documents a: rows 1, 1, 0; b: row 0. Two draws: aa 1/4 -> 2/3, bb 1/4 -> 0,
    ab or ba 1/2 -> 2/4. Four rows drawn one by one would give other values, e.g. 1."""
    draws = cluster_bootstrap({"s": Mean([1, 1, 0, 0], ["a", "a", "a", "b"])}, n=20_000)["s"]
    values, counts = np.unique(draws.round(12), return_counts=True)
    np.testing.assert_allclose(values, [0, 0.5, 2 / 3], atol=1e-12)
    np.testing.assert_allclose(counts / 20_000, [0.25, 0.5, 0.25], atol=0.015)


def test_bootstrap_error_of_equal_clusters_is_that_of_their_means():
    """50 documents of 4 identical rows: the standard error is sd(documents)/sqrt(50), twice what
    200 independent rows would give."""
    rng = np.random.default_rng(1)
    documents = rng.random(50)
    score = Mean(np.repeat(documents, 4), np.repeat(np.arange(50), 4))
    draws = cluster_bootstrap({"s": score})["s"]
    assert draws.std() == pytest.approx(documents.std() / math.sqrt(50), rel=0.03)


def test_bootstrap_agrees_with_scipy():
    rng = np.random.default_rng(2)
    values = rng.beta(2, 3, 60)
    ours = mean_interval(Mean(values, range(60)))
    # Ours has the percentiles of Student's t with 59 degrees, moved out by sqrt(60/59).
    level = 1 - 2 * stats.norm.cdf(math.sqrt(60 / 59) * stats.t.ppf(0.025, 59))
    theirs = stats.bootstrap(
        (values,),
        np.mean,
        method="percentile",
        n_resamples=10_000,
        confidence_level=level,
        rng=rng,
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.005)


def test_scores_on_the_same_documents_are_drawn_together():
    """y = 1 - x on the same documents, so every resample has mean(x) + mean(y) = 1. The score of
    other documents moves on its own."""
    rng = np.random.default_rng(3)
    x, ids = rng.random(30), [f"d{i}" for i in range(30)]
    draws = cluster_bootstrap(
        {"x": Mean(x, ids), "y": Mean(1 - x, ids), "z": Mean(1 - x, [f"e{i}" for i in range(30)])}
    )
    np.testing.assert_allclose(draws["x"] + draws["y"], 1, atol=1e-12)
    assert abs(np.corrcoef(draws["x"], draws["z"])[0, 1]) < 0.05


def test_other_scores_do_not_change_the_draws():
    """A model without utility stays paired with one that has it."""
    a, b = Mean([1, 0, 1.0], "abc"), Mean([1, 0, 0.0], "xyz")
    alone = cluster_bootstrap({"a": a}, n=50)["a"]
    np.testing.assert_array_equal(alone, cluster_bootstrap({"0": b, "a": a}, n=50)["a"])


def test_order_of_rows_and_scores_changes_nothing():
    rng = np.random.default_rng(4)
    x, y = rng.random(40), rng.random(25)
    ids, others = rng.integers(0, 15, 40).tolist(), [f"e{i % 9}" for i in range(25)]
    first = cluster_bootstrap({"x": Mean(x, ids), "y": Mean(y, others)}, n=200)
    shuffle = rng.permutation(40)
    second = cluster_bootstrap(
        {"y": Mean(y, others), "x": Mean(x[shuffle], [ids[i] for i in shuffle])}, n=200
    )
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=1e-12)


def test_area_draws_equal_a_loop_over_the_drawn_texts():
    """Weights of the vectorised AUC against scikit-learn on the texts themselves, ties included;
    the draws are replayed with a generator seeded, as documented, by the pool's documents."""
    rng = np.random.default_rng(5)
    members, others = rng.integers(0, 6, 9).astype(float), rng.integers(0, 6, 7).astype(float)
    draws = cluster_bootstrap({"a": Area(members, others)}, n=30, seed=7)["a"]
    picks = []
    for side, size in (("member", 9), ("nonmember", 7)):
        names = "\n".join(repr((side, i)) for i in range(size))
        rng = np.random.default_rng([7, zlib.crc32(names.encode())])
        picks.append(rng.integers(0, size, (30, size)))
    for value, i, j in zip(draws, *picks, strict=True):
        labels = [1] * 9 + [0] * 7
        assert value == pytest.approx(roc_auc_score(labels, [*members[i], *others[j]]), abs=1e-12)


def test_area_bootstrap_error_agrees_with_delong():
    rng = np.random.default_rng(6)
    members, others = rng.normal(0.5, 1, 80), rng.normal(0, 1, 160)
    draws = cluster_bootstrap({"a": Area(members, others)})["a"]
    _, covariance = delong(members, others)
    assert draws.std() == pytest.approx(math.sqrt(covariance[0, 0]), rel=0.05)


def test_certainty_is_never_claimed_from_rows_that_all_agree():
    """24 documents without one hit: upper bound 1 - .025^(1/24) = .1425 (scipy's exact test)."""
    score = Mean([0.0] * 30, [i % 24 for i in range(30)])
    low, high = mean_interval(score, n=100)
    exact = stats.binomtest(0, 24).proportion_ci(method="exact")
    assert (low, high) == pytest.approx((exact.low, exact.high))
    assert high == pytest.approx(0.1425, abs=1e-4)
    assert mean_interval(Mean([1.0] * 24, range(24)), n=100) == pytest.approx((1 - high, 1))
    assert mean_interval(Mean([0.5] * 24, range(24)), n=100) == (0.5, 0.5)


def test_coverage_of_the_clustered_interval():
    """Rows share their document's value. Clustered 95 % intervals should hold the truth about
    95 % of the time (within binomial error of 200 trials); row-wise ones miss far more often."""
    rng = np.random.default_rng(8)
    clustered = rowwise = 0
    for trial in range(200):
        values = np.repeat(rng.random(40) < 0.3, 6).astype(float)
        for by_row in (False, True):
            ids = range(240) if by_row else np.repeat(np.arange(40), 6)
            low, high = mean_interval(Mean(values, ids), n=400, seed=trial)
            if by_row:
                rowwise += low <= 0.3 <= high
            else:
                clustered += low <= 0.3 <= high
    assert clustered / 200 > 0.89
    assert rowwise / 200 < 0.75


def test_aggregate_is_computed_within_each_resample():
    cells = {
        "forget_task1_knowledge": Mean([1, 0, 1, 1.0], ["a", "b", "c", "d"]),
        "retain_task1_knowledge": Mean([1, 1, 0, 0.5], ["e", "f", "g", "h"]),
    }
    area = Area([3, 1, 2.0], [0, 2, 1.5])
    utility = Mean([1, 0, 1, 0.0], ["q0", "q1", "q2", "q3"])
    draws = Scores(cells, area, utility).draws(500)
    for i in range(0, 500, 25):
        pair = [draws[c][i] for c in cells]
        task = stdlib.harmonic_mean(pair)
        mia = 1 - 2 * abs(draws["mia_auc"][i] - 0.5)
        assert draws["task_aggregate"][i] == pytest.approx(task)
        assert draws["aggregate"][i] == pytest.approx((task + mia + draws["utility"][i]) / 3)
    assert "aggregate" not in Scores(cells, area).draws(5)


def test_harmonic_mean_is_zero_with_any_zero():
    """2 / (1/.5 + 1/1) = 2/3."""
    np.testing.assert_allclose(harmonic_mean([[0.5, 1], [0, 1], [0, 0]]), [2 / 3, 0, 0])
    assert np.isnan(harmonic_mean([0.0, np.nan]))


def test_paired_interval_is_narrower_than_two_unpaired_ones():
    """b = a + .1 on every document: the difference is exactly -.1 in each resample."""
    rng = np.random.default_rng(9)
    a = rng.random(50)
    gap = paired_difference(Mean(a, range(50)), Mean(a + 0.1, range(50)))
    assert (gap.value, gap.low, gap.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert gap.significant and gap.p < 0.002
    noise = paired_difference(Mean(a, range(50)), Mean(rng.permutation(a), range(50)))
    assert noise.value == pytest.approx(0) and not noise.significant and noise.p > 0.5


def test_two_documents_that_agree_are_no_evidence():
    """Two signs: of the four patterns two are as extreme, so p is .5; a bootstrap of two said
    1e-4. Three: 2/8. Opposite signs: 1."""
    assert sign_flip_p([0.2, 0.3]) == 0.5
    assert sign_flip_p([0.2, 0.3, 0.1]) == 0.25
    assert sign_flip_p([0.2]) == 1
    assert sign_flip_p([0.2, -0.2]) == sign_flip_p([0.0, 0.0]) == 1
    gap = paired_difference(Mean([0.9, 0.8], "ab"), Mean([0.1, 0.2], "ab"))
    assert gap.p == 0.5 and not gap.significant
    one, other = (Scores({"c": Mean(v, "ab")}).draws(50)["c"] for v in ([0.9, 0.8], [0.1, 0.2]))
    assert draws_difference(one - other, 0.7, (2, 2)).p == 0.5


def test_many_signs_agree_with_the_normal_approximation():
    rng = np.random.default_rng(15)
    d = rng.normal(0.2, 1, 60)
    z = abs(d.sum()) / math.sqrt((d**2).sum())
    assert sign_flip_p(d) == pytest.approx(2 * stats.norm.sf(z), abs=0.02)


def test_documents_that_never_differ_leave_room():
    """24 documents, both models always right: as wide as the exact bound on one of them."""
    always = Mean([1.0] * 24, range(24))
    gap = paired_difference(always, always)
    assert (gap.value, gap.low, gap.high, gap.p) == pytest.approx((0, -0.1425, 0.1425, 1), abs=1e-4)


def test_composites_are_not_certain_of_cells_whose_rows_all_agree():
    """One cell of 10 right documents, .025^(1/10) and more; the composite's is Jeffreys'."""
    cells = {"forget_a": Mean([1.0] * 10, range(10))}
    bounds = Scores(cells).intervals(20_000)
    assert bounds["forget_a"] == pytest.approx((0.6915, 1.0), abs=1e-3)
    tail = stats.norm.cdf(stats.t.ppf(0.025, 9) * (10 / 9) ** 0.5)
    expected = stats.beta.ppf(tail, 10.5, 0.5)
    assert bounds["task_aggregate"][0] == pytest.approx(expected, abs=0.01)
    assert Scores(cells).draws(10)["forget"].std() > 0


def test_the_aggregate_of_a_perfect_model_is_inside_its_interval():
    """AUC .5: percentiles of resamples held the truth in 74 of 100 data sets."""
    rng = np.random.default_rng(3)
    held = 0
    for trial in range(200):
        cells = {
            side: Mean(rng.beta(8, 2, 50), [(side, i) for i in range(50)])
            for side in ("forget_a", "retain_a")
        }
        area = Area(rng.normal(0, 1, 50), rng.normal(0, 1, 50))
        utility = Mean((rng.random(100) < 0.8) * 1.0, range(100))
        low, high = Scores(cells, area, utility).intervals(200, trial)["aggregate"]
        held += low <= (0.8 + 1 + 0.8) / 3 <= high
    assert held / 200 > 0.91


def test_composites_count_the_documents_of_all_their_cells():
    """Equal variances over 20 documents each: 1 + 2^2 / (2 / 19) = 39; cells over the same
    documents are not counted twice."""
    from axolotl_unlearn.metrics.intervals import _effective_documents

    values = [0.4, 0.6] * 10
    cells = {name: Mean(values, [(name, i) for i in range(20)]) for name in "ab"}
    draws = dict.fromkeys("ab", np.array([0.4, 0.6]))
    assert _effective_documents(cells, draws) == pytest.approx(39)
    cells["b"] = Mean(values, cells["a"].clusters)
    assert _effective_documents(cells, draws) == pytest.approx(20)
    small = {"a": cells["a"], "c": Mean([0.0, 1.0], "xy")}
    few = _effective_documents(small, {"a": np.array([0.5, 0.501]), "c": np.array([0.0, 1.0])})
    assert few == pytest.approx(2, abs=0.01)  # the cell that varies decides
    assert _effective_documents({"c": Mean([0.5, 0.5], "xy")}, {"c": np.full(3, 0.5)}) is None


def test_aggregate_interval_by_hand():
    """Task .8 +- .03, MIA .6 +- .09, utility .5 +- 0: sqrt(.03^2 + .09^2) / 3 = .0316."""
    from axolotl_unlearn.metrics.intervals import _aggregate_interval

    points = {"task_aggregate": 0.8, "mia_score": 0.6, "utility": 0.5, "aggregate": 1.9 / 3}
    bounds = {"task_aggregate": (0.77, 0.83), "mia_score": (0.51, 0.69), "utility": (0.5, 0.5)}
    low, high = _aggregate_interval(points, bounds, False)
    assert (low, high) == pytest.approx((1.9 / 3 - 0.03162, 1.9 / 3 + 0.03162), abs=1e-5)
    # A MIA score that may be 1: its distance .4 counts whole, (.03 + .4) / 3.
    _, high = _aggregate_interval(points, bounds, True)
    assert high == pytest.approx(1.9 / 3 + 0.43 / 3)


def test_points_carry_the_names_of_the_draws():
    cells = {"forget_a": Mean([0.5, 1], "ab"), "retain_a": Mean([1, 1], "cd")}
    scores = Scores(cells, Area([3, 1], [2, 0]), Mean([0.6], "q"))
    points = scores.points()
    assert set(points) == set(scores.draws(5))
    task = 2 / (1 / 0.75 + 1)
    assert points["task_aggregate"] == pytest.approx(task)
    assert points["aggregate"] == pytest.approx((task + 0.5 + 0.6) / 3)


def test_differences_are_corrected_for_their_number():
    """Two cells: p .25 and 1 of three documents; Holm doubles the smaller."""
    same = {"forget_b": Mean([0.5] * 3, "abc")}
    first = Scores({"forget_a": Mean([1, 0.9, 0.8], "abc"), **same})
    second = Scores({"forget_a": Mean([0, 0.1, 0.2], "abc"), **same})
    gaps = first.differences(second, 200)
    assert gaps["forget_b"].p == 1
    assert gaps["forget_a"].p == 1  # .25 times four scores: two cells, forget, Task Aggregate
    assert gaps["forget_a"].value == pytest.approx(0.8)


def test_paired_difference_refuses_other_documents():
    with pytest.raises(ValueError, match="same documents"):
        paired_difference(Mean([1, 0], ["a", "b"]), Mean([1, 0], ["a", "c"]))


def test_paired_draws_of_the_aggregate():
    cells = {"c": Mean([1, 0.5, 0.2], "abc")}
    worse = {"c": Mean([0.9, 0.4, 0.1], "abc")}
    first, second = (Scores(c).draws(100)["task_aggregate"] for c in (cells, worse))
    gap = draws_difference(first - second, 0.1)
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))


@given(numbers, numbers)
def test_auc_agrees_with_scikit_learn_and_is_symmetric(members, others):
    labels = [1] * len(members) + [0] * len(others)
    value = auc(members, others)
    assert value == pytest.approx(roc_auc_score(labels, members + others), abs=1e-12)
    assert value == pytest.approx(1 - auc(others, members), abs=1e-12)
    assert value == pytest.approx(auc([-x for x in others], [-x for x in members]), abs=1e-12)


@given(numbers, numbers, st.randoms())
def test_auc_does_not_depend_on_order(members, others, random):
    value, bounds = auc(members, others), auc_interval(members, others)
    random.shuffle(members)
    random.shuffle(others)
    assert auc(members, others) == pytest.approx(value, abs=1e-12)
    assert auc_interval(members, others) == pytest.approx(bounds, abs=1e-9)


def delong(members, nonmembers):
    """``[1]`` AUC and ``[1, 1]`` variance."""
    parts = _placements(*(np.atleast_2d(np.asarray(side, float)) for side in (members, nonmembers)))
    return parts[0].mean(1), np.array([[_between(parts[0][0], parts[1][0], None)[0]]])


def delong_by_pairs(members, others) -> tuple[float, float]:
    """The 1988 formula written out: psi over all pairs, S10 / N + S01 / M."""
    psi = np.array([[(x > y) + 0.5 * (x == y) for y in others] for x in members])
    area = psi.mean()
    s10 = ((psi.mean(1) - area) ** 2).sum() / (len(members) - 1)
    s01 = ((psi.mean(0) - area) ** 2).sum() / (len(others) - 1)
    return area, s10 / len(members) + s01 / len(others)


@settings(max_examples=60)
@given(numbers, numbers)
def test_delong_equals_the_formula_over_all_pairs(members, others):
    values, covariance = delong(members, others)
    area, variance = delong_by_pairs(members, others)
    assert values[0] == pytest.approx(area, abs=1e-12)
    assert covariance[0, 0] == pytest.approx(variance, abs=1e-12)


def test_delong_by_hand():
    """Members 3, 1; non-members 2, 0. psi = [[1, 1], [0, 1]], AUC 3/4. V10 = [1, .5], V01 =
    [.5, 1]; variance of each .125; .125/2 + .125/2 = .125. Logit ln 3, its error
    sqrt(.125) / (3/4 * 1/4) = 1.8856."""
    values, covariance = delong([3, 1], [2, 0])
    assert (values[0], covariance[0, 0]) == pytest.approx((0.75, 0.125))
    ends = [1 / (1 + math.exp(-math.log(3) + s * 1.959964 * 1.8856)) for s in (1, -1)]
    assert auc_interval([3, 1], [2, 0]) == pytest.approx(ends, abs=1e-4)


def test_delong_interval_covers():
    """Normal scores at distance d have AUC Phi(d / sqrt 2); 300 samples of 40 against 60."""
    rng = np.random.default_rng(10)
    truth = stats.norm.cdf(0.6 / math.sqrt(2))
    held = 0
    for _ in range(300):
        low, high = auc_interval(rng.normal(0.6, 1, 40), rng.normal(0, 1, 60))
        held += low <= truth <= high
    assert 0.91 < held / 300 < 0.99


def test_perfect_separation_keeps_an_honest_bound():
    """.025^(1/20) = .8316."""
    low, high = auc_interval(range(100, 120), range(40))
    assert (low, high) == pytest.approx((0.8316, 1.0), abs=1e-4)
    assert auc_interval(range(40), range(100, 120)) == pytest.approx((0.0, 1 - low))


def test_auc_difference_uses_the_covariance():
    """The same scores twice: 30 texts leave 1 - .025 ** (1 / 30). Against pairs: var = a' C a."""
    rng = np.random.default_rng(11)
    members, others = rng.normal(1, 1, 30), rng.normal(0, 1, 40)
    same = auc_gap((members, others), (members * 2, others * 2)).difference
    room = 1 - 0.025 ** (1 / 30)
    assert (same.value, same.low, same.high, same.p) == (0, pytest.approx(-room), same.high, 1)
    noisy = (members + rng.normal(0, 1, 30), others + rng.normal(0, 1, 40))
    gap = auc_gap((members, others), noisy).difference
    psi = [np.greater.outer(m, o).astype(float) for m, o in ((members, others), noisy)]
    d = psi[0] - psi[1]
    error = math.sqrt(d.mean(1).var(ddof=1) / 30 + d.mean(0).var(ddof=1) / 40)
    assert gap.value == pytest.approx(d.mean())
    parts = d.mean(1).var(ddof=1) / 30, d.mean(0).var(ddof=1) / 40
    df = error**4 / (parts[0] ** 2 / 29 + parts[1] ** 2 / 39)  # Welch's
    assert gap.high - gap.value == pytest.approx(stats.t.ppf(0.975, df) * error, rel=1e-6)


def test_holm_by_hand():
    """p .01, .04, .03 of 3: .01 * 3, then max(.03, .03 * 2) = .06, then max(.06, .04) = .06."""
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]).tolist() == [1, 1]


def test_the_margin_test_agrees_with_the_interval():
    """p < .05 of "at least the margin away" exactly where the 90 % interval lies inside it."""
    rng = np.random.default_rng(14)
    outcomes = set()
    for _ in range(40):
        first = rng.normal(0, 1, 60), rng.normal(0, 1, 60)
        second = tuple(x + rng.normal(0, 0.5, 60) for x in first)
        gap = auc_gap(first, second)
        low, high = gap.interval(0.9)
        assert (gap.margin_p(0.1) < 0.05) == (-0.1 < low and high < 0.1)
        low, high = auc_interval(*first, 0.9)
        assert (auc_margin_p(*first, 0.5, 0.12) < 0.05) == (0.38 < low and high < 0.62)
        outcomes |= {gap.margin_p(0.1) < 0.05, -0.1 < low}
    assert outcomes == {True, False}


def test_delong_needs_two_of_each():
    with pytest.raises(ValueError, match="1 members"):
        delong([1.0], [0.0, 1.0])


def test_ideal_score_of_the_official_set():
    """150 against 150: SE = sqrt(301 / 270000) = .0334; 1 - 2 * .0334 * .7979 = .947;
    1 - 2 * 1.96 * .0334 = .869."""
    ideal = ideal_membership(150, 150)
    assert ideal.standard_error == pytest.approx(0.0334, abs=5e-5)
    assert ideal.expected == pytest.approx(0.9467, abs=5e-5)


def test_ideal_score_agrees_with_simulation():
    rng = np.random.default_rng(12)
    areas = [auc(rng.random(30), rng.random(50)) for _ in range(4000)]
    scores = mia_score(areas)
    ideal = ideal_membership(30, 50)
    assert np.std(areas) == pytest.approx(ideal.standard_error, rel=0.05)
    assert scores.mean() == pytest.approx(ideal.expected, abs=0.004)


def test_exact_null_error_of_a_small_set():
    """2 against 2 without ties: the 6 orders give AUC 0, .25, .5, .5, .75, 1; variance 5/48."""
    areas = [
        auc(chosen, [x for x in range(4) if x not in chosen])
        for chosen in itertools.combinations(range(4), 2)
    ]
    assert np.var(areas) == pytest.approx(ideal_membership(2, 2).standard_error ** 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mean([1.0], []), "one a row"),
        (lambda: Mean([], []), "leave the score out"),
        (lambda: Mean([np.nan], ["a"]), "NaN"),
        (lambda: Area([1.0], [np.inf]), "NaN or infinity"),
        (lambda: ideal_membership(0, 3), "at least one"),
    ],
)
def test_faults_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_interval_leaves_out_empty_resamples():
    assert interval([np.nan, 0.0, 1.0, np.nan], 0.5) == (0.25, 0.75)
    assert all(math.isnan(x) for x in interval([np.nan]))


def test_point():
    assert point(Mean([1, 0, 0.5], "aab")) == 0.5
    assert point(Area([1, 2], [0, 1.5])) == 0.75


def test_ten_thousand_resamples_of_the_official_size_in_five_seconds():
    """LUME train: 706 documents, 2248 rows, 12 cells, 150 + 150 texts, 400 utility items."""
    rng = np.random.default_rng(13)
    cells = {}
    documents = {("forget", 1): 83, ("forget", 2): 107, ("forget", 3): 152}
    documents |= {("retain", 1): 103, ("retain", 2): 102, ("retain", 3): 159}
    for (side, task), count in documents.items():
        ids = [(side, task, i) for i in range(count)]
        questions = ids * 5 if task == 2 else ids
        cells[f"{side}_task{task}_regurgitation"] = Mean(rng.random(count), ids)
        cells[f"{side}_task{task}_knowledge"] = Mean(rng.random(len(questions)), questions)
    area = Area(rng.random(150), rng.random(150))
    start = time.perf_counter()
    draws = Scores(cells, area, Mean(rng.random(400), range(400))).draws()
    assert time.perf_counter() - start < 5
    assert len(draws) == 19 and all(len(d) == 10_000 for d in draws.values())


def test_every_text_twice_is_as_sure_as_every_text_once():
    """Obuchowski 1997: what is independent are clusters, so copies of each text add nothing; as
    rows of their own they halved the variance."""
    rng = np.random.default_rng(3)
    once = rng.normal(0.5, 1, 30), rng.normal(0, 1, 40)
    again = once[0] + rng.normal(0, 0.5, 30), once[1] + rng.normal(0, 0.5, 40)
    twice, twice_again = ([np.repeat(side, 2) for side in pair] for pair in (once, again))
    clusters = [np.repeat(np.arange(len(side)), 2).tolist() for side in once]
    clusters[1] = [100 + name for name in clusters[1]]
    gap, copied = auc_gap(once, again), auc_gap(twice, twice_again, clusters)
    assert (copied.value, copied.error, copied.df) == pytest.approx((gap.value, gap.error, gap.df))
    assert auc_gap(twice, twice_again).error < 0.75 * gap.error
    low, high = auc_interval(*once)
    inside = auc_interval(*twice, clusters=clusters)  # Student's quantile, so a little wider
    assert inside[0] == pytest.approx(low, abs=0.01) and inside[0] < low < high < inside[1]
    single = [list(range(30)), list(range(100, 140))]
    assert auc_interval(*once, clusters=single) == auc_interval(*once)


def test_clusters_on_both_sides_add_their_covariance():
    """By Obuchowski's sums over clusters: S10 / m + S01 / n + 2 S11 / (m n)."""
    rng = np.random.default_rng(4)
    groups = 12
    own = rng.normal(0, 1, groups)
    members, others = (np.repeat(own, 3) + rng.normal(0, 1, 3 * groups) for _ in range(2))
    names = np.repeat(np.arange(groups), 3).tolist()
    v10 = np.array([(x > others).mean() for x in members])
    v01 = np.array([(members > x).mean() for x in others])
    sums = [np.add.reduceat(v - v.mean(), range(0, 36, 3)) / 36 for v in (v10, v01)]
    expected = groups / (groups - 1) * ((sums[0] ** 2).sum() + (sums[1] ** 2).sum()
                                        + 2 * (sums[0] * sums[1]).sum())  # fmt: skip
    value = v10.mean()
    low, high = auc_interval(members, others, clusters=(names, names))
    ends = [math.log(x / (1 - x)) for x in (low, high)]
    centre = math.log(value / (1 - value))
    assert np.mean(ends) == pytest.approx(centre)
    error = math.sqrt(expected) / (value * (1 - value))
    assert 2.0 < (ends[1] - centre) / error < 2.2  # Student's quantile of 11 to 22 degrees


def test_one_cluster_and_equal_scores_say_nothing():
    """They were certain: an interval of no width."""
    scores = np.arange(20.0), np.arange(20.0) + 0.5
    one = (["a"] * 20, list(range(20)))
    assert auc_interval(*scores, clusters=one) == (0, 1)
    gap = auc_gap(scores, (scores[1], scores[0]), one)
    assert gap.interval() == (-1, 1) and gap.p == 1 and gap.margin_p(0.1) == 1
    assert auc_interval([1.0] * 20, [1.0] * 20) == (0, 1)
    assert mia_score_interval([1.0] * 20, [1.0] * 20) == (0, 1)


def test_the_intraclass_correlation():
    """Two clusters of two: means 1 and 4, within 2 (of 0, 2 and 3, 5): between 18 / 2 * ... by hand
    MSB = 2 * (1.5 ** 2 + 1.5 ** 2) = 9, MSW = (2 + 2) / 2 = 2: (9 - 2) / (9 + 2) = 7 / 11."""
    assert intraclass_correlation([0, 2, 3, 5], "aabb") == pytest.approx(7 / 11)
    assert intraclass_correlation([1, 1, 2, 2], "aabb") == 1
    assert math.isnan(intraclass_correlation([1, 2, 3], "abc"))
    rng = np.random.default_rng(5)
    own = np.repeat(rng.normal(0, math.sqrt(0.3), 400), 10)
    values = own + rng.normal(0, math.sqrt(0.7), 4000)
    found = intraclass_correlation(values, np.repeat(np.arange(400), 10).tolist())
    assert found == pytest.approx(0.3, abs=0.04)
