"""Uncertainty by clusters and the noise floor, against hand arithmetic and other code."""

from __future__ import annotations

import itertools
import math
import statistics as stdlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from axolotl_unlearn.metrics.intervals import (
    Scores,
    area_of,
    auc,
    harmonic_mean,
    holm,
    ideal_membership,
    intraclass_correlation,
    mean_of,
    share_of,
    smallest_difference,
)

numbers = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)


def test_single_rows_have_the_error_of_their_mean():
    """sd / sqrt(n), n - 1 degrees of freedom, as scipy's standard error."""
    values = np.random.default_rng(1).random(40)
    one = mean_of(values)
    assert one.value == pytest.approx(values.mean())
    assert one.error == pytest.approx(stats.sem(values)) and one.df == pytest.approx(39)


def test_leaving_out_one_cluster_at_a_time():
    """The jackknife by a loop: (G - 1) / G times the squares around the whole mean."""
    rng = np.random.default_rng(2)
    sizes = [7, 1, 3, 2]
    names = np.repeat(list("abcd"), sizes)
    values = rng.random(13)
    left = [values[names != name].mean() for name in "abcd"]
    variance = 3 / 4 * ((np.array(left) - values.mean()) ** 2).sum()
    assert mean_of(values, names.tolist()).error == pytest.approx(math.sqrt(variance))


def test_equal_clusters_count_as_their_means():
    """50 documents of 4 identical rows: as sure as 50 rows, not as 200."""
    documents = np.random.default_rng(1).random(50)
    once, rows = mean_of(documents), mean_of(np.repeat(documents, 4), np.repeat(range(50), 4))
    assert (rows.value, rows.error) == pytest.approx((once.value, once.error))
    assert rows.df == pytest.approx(once.df)


@pytest.mark.parametrize("hits, n", [(0, 24), (3, 40), (20, 41), (40, 40)])
def test_where_rows_are_single_the_interval_is_the_exact_one(hits, n):
    """Clopper and Pearson; between 0 and 1 the variance has n - 1, so it is a little wider."""
    exact = stats.binomtest(hits, n).proportion_ci(method="exact")
    found = mean_of([1.0] * hits + [0.0] * (n - hits)).interval()
    wider = 1e-9 if hits in (0, n) else 0.01
    assert found == pytest.approx((exact.low, exact.high), abs=wider)
    assert found[0] <= exact.low + 1e-9 and found[1] >= exact.high - 1e-9


@pytest.mark.parametrize("n", [1, 7, 100])
def test_a_share_has_the_exact_interval(n):
    for hits in range(n + 1):
        exact = stats.binomtest(hits, n).proportion_ci(method="exact")
        assert share_of(hits, n) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_nothing_is_certain_of_one_document():
    assert mean_of([0.5, 0.9, 1.0], "aaa").interval() == (0, 1)
    gap = mean_of([1.0, 0.9], "aa").minus(mean_of([0.1, 0.2], "aa"))
    assert gap.p == 1 and gap.half() == 1


def test_rows_that_agree_have_no_error_of_rounding():
    """Three rows of .885 had one of 1e-16, and an interval of NaN, which no JSON holds."""
    found = mean_of([0.885] * 3)
    assert found.error == 0 and found.interval()[0] < 0.885 < found.interval()[1]
    assert found.minus(mean_of([0.1] * 3)).p == 0.25


#: Sizes of clusters, and the coverage that the bootstrap of documents had there.
LAYOUTS = {
    "single": [1] * 100,
    "tens": [10] * 10,
    "hundred beside singles": [100] + [1] * 100,
    "twenties beside singles": [20] * 5 + [1] * 50,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_the_interval_covers_whatever_the_clusters(layout, alike):
    """A cluster of 100 beside 100 singles covered in .79 by the bootstrap. 300 draws: .92 is two
    and a half errors below .95."""
    rng = np.random.default_rng(3)
    sizes = LAYOUTS[layout]
    names = np.repeat(np.arange(len(sizes)), sizes)

    def drawn():
        own = rng.normal(size=len(sizes))[names]
        return math.sqrt(alike) * own + math.sqrt(1 - alike) * rng.normal(size=len(names))

    held = areas = 0
    area = float(stats.norm.cdf(0.5 / math.sqrt(2)))
    for _ in range(300):
        low, high = mean_of((drawn() > 0.5).astype(float), names.tolist()).interval()
        held += low <= stats.norm.sf(0.5) <= high
        sides = names.tolist(), (names + 1000).tolist()
        low, high = area_of(drawn() + 0.5, drawn(), sides).interval()
        areas += low <= area <= high
    assert min(held, areas) / 300 > 0.92


def test_composites_follow_by_the_chain_rule():
    """Slopes of the harmonic mean of .5 and .8, H = .6154: H^2 / 2 / x^2."""
    rng = np.random.default_rng(4)
    a, b = rng.beta(5, 5, 60), rng.beta(8, 2, 50)
    cells = {"forget_a": mean_of(a, range(60)), "forget_b": mean_of(b, range(100, 150))}
    found = Scores(cells).estimates["forget"]
    value = stdlib.harmonic_mean([a.mean(), b.mean()])
    slopes = value**2 / 2 / np.array([a.mean(), b.mean()]) ** 2
    error = math.hypot(*(slopes * [stats.sem(a), stats.sem(b)]))
    assert (found.value, found.error) == pytest.approx((value, error))


def test_scores_over_the_same_documents_vary_together():
    """y = 1 - x over the same documents: their sum does not vary at all."""
    x = np.random.default_rng(5).random(30)
    one, other = mean_of(x, range(30)), mean_of(1 - x, range(30))
    assert one.minus(mean_of(x, range(30))).error == 0
    assert one.minus(other).error == pytest.approx(2 * one.error)


def test_all_scores_have_intervals_that_hold_them():
    rng = np.random.default_rng(6)

    def cell(side, share):
        return mean_of((rng.random(9) < share).astype(float), [(side, i) for i in range(9)])

    shares = {"a": 0.9, "b": 1.1, "c": 0.5}
    cells = {f"{s}_{name}": cell(s, x) for s in ("forget", "retain") for name, x in shares.items()}
    scores = Scores(
        cells, area_of(rng.random(30), rng.random(30)), mean_of([1.0] * 9 + [0.0], range(10))
    )
    ends = scores.intervals()
    assert {"forget", "retain", "task_aggregate", "mia_auc", "mia_score", "aggregate"} <= set(ends)
    for name, one in scores.estimates.items():
        assert 0 <= ends[name][0] <= one.value + 1e-12 and one.value - 1e-12 <= ends[name][1] <= 1
    parts = ("task_aggregate", "mia_score", "utility")
    assert scores.estimates["aggregate"].value == pytest.approx(
        sum(scores.estimates[part].value for part in parts) / 3
    )
    assert "aggregate" not in Scores(cells).intervals()
    # A cell at 0 is not certain: the mean may be what the upper ends give.
    one, other = mean_of([0.0] * 9, range(9)), mean_of([1.0] * 9, range(9, 18))
    zero = Scores({"forget_a": one, "forget_b": other})
    low, high = zero.intervals()["forget"]
    assert low == 0 and high == pytest.approx(stdlib.harmonic_mean([1 - 0.025 ** (1 / 9), 1]))


def test_the_composite_interval_covers():
    rng = np.random.default_rng(7)
    truth, held = stdlib.harmonic_mean([0.6, 0.9]), 0
    for _ in range(300):
        cells = {
            name: mean_of((rng.random(40) < share).astype(float), [(name, i) for i in range(40)])
            for name, share in (("forget_a", 0.6), ("forget_b", 0.9))
        }
        low, high = Scores(cells).intervals()["forget"]
        held += low <= truth <= high
    assert held / 300 > 0.92


def test_harmonic_mean_is_zero_with_any_zero():
    """2 / (1/.5 + 1/1) = 2/3."""
    np.testing.assert_allclose(harmonic_mean([[0.5, 1], [0, 1], [0, 0]]), [2 / 3, 0, 0])


def test_a_paired_difference_sees_what_an_unpaired_one_does_not():
    """b = a + .1 on every document: nothing varies, and 50 signs agree."""

    def paired(first, second):
        return mean_of(first).minus(mean_of(second))

    rng = np.random.default_rng(9)
    a = rng.random(50)
    gap = paired(a, a + 0.1)
    assert gap.value == pytest.approx(-0.1) and gap.p < 0.05
    noise = paired(a, rng.permutation(a))
    assert noise.value == pytest.approx(0) and noise.p > 0.5
    one = rng.random(60), rng.random(60)
    found = paired(*one)
    assert found.p == pytest.approx(stats.ttest_rel(*one).pvalue)
    with pytest.raises(ValueError, match="same documents"):
        mean_of([1, 0], ["a", "b"]).minus(mean_of([1, 0], ["a", "c"]))


def test_few_documents_never_say_more_than_their_signs():
    """Two documents that agree: p .5 at least; three: .25."""
    for n in (2, 3, 6):
        gap = mean_of([0.9] * (n - 1) + [0.91], range(n)).minus(mean_of([0.1] * n, range(n)))
        assert gap.p == pytest.approx(2.0 ** (1 - n))


def test_documents_that_never_differ_leave_room():
    """24 documents, both models always right: they may differ in as many as the exact bound."""
    one = mean_of([1.0] * 24)
    gap = one.minus(mean_of([1.0] * 24))
    assert gap.value == 0 and gap.p == 1
    assert gap.half() == pytest.approx(1 - 0.025 ** (1 / 24), rel=0.07)


def test_differences_are_corrected_for_their_number():
    first = Scores(
        {"forget_a": mean_of([1, 0.9, 0.8], "abc"), "forget_b": mean_of([0.5] * 3, "abc")}
    )
    second = Scores(
        {"forget_a": mean_of([0, 0.1, 0.2], "abc"), "forget_b": mean_of([0.5] * 3, "abc")}
    )
    gaps = first.differences(second)
    assert gaps["forget_b"]["p"] == 1 and gaps["forget_a"]["value"] == pytest.approx(0.8)
    assert gaps["forget_a"]["p"] == 1  # .25 times four scores: two cells, forget, Task Aggregate
    means = [2 / (1 / a + 1 / 0.5) for a in (0.9, 0.1)]
    assert gaps["task_aggregate"]["value"] == pytest.approx(means[0] - means[1])
    back = second.differences(first)["forget"]
    assert (back["low"], back["high"]) == (-gaps["forget"]["high"], -gaps["forget"]["low"])


def drawn(rng, low: float, rows: int = 20) -> Scores:
    cells = dict.fromkeys([f"{side}_{i}" for side in ("forget", "retain") for i in range(3)], 0.9)
    cells["retain_0"] = low
    return Scores(
        {n: mean_of(1.0 * (rng.random(rows) < p), [(n, i) for i in range(rows)])
         for n, p in cells.items()},
        area_of(rng.random(30), rng.random(30)), mean_of(1.0 * (rng.random(60) < 0.7), range(60)),
    )  # fmt: skip


def test_a_cell_at_0_makes_no_difference_sure():
    """All slopes were 0, and so was that model's error: of those with a zero cell 60 % had an
    interval without 0. A cell of .08 in both models: there is no difference."""
    rng, missed, told, zero = np.random.default_rng(5), [], [], 0
    while zero < 60:
        first, second = drawn(rng, 0.08), drawn(rng, 0.08)
        values = [one.estimates["retain"].value for one in (first, second)]
        if 0 not in values:
            continue
        zero += 1
        gaps = first.differences(second)
        for name in ("retain", "task_aggregate", "aggregate"):
            gap = gaps[name]
            assert gap["low"] <= gap["value"] <= gap["high"]
            if name != "aggregate":  # the MIA score and utility vary beside it
                missed.append(not gap["low"] <= 0 <= gap["high"])
            told.append(gap["p"] < 0.05)
    assert np.mean(missed) < 0.05 and not any(told)


def test_a_cell_that_is_lost_is_found():
    """0 of 20 against 18 of 20, and against none of 20: the second says nothing."""
    rng = np.random.default_rng(6)
    lost, kept = drawn(rng, 0.0), drawn(rng, 0.9)
    for first, second, sign in ((lost, kept, -1), (kept, lost, 1)):
        for name in ("retain", "task_aggregate"):
            gap = first.differences(second)[name]
            assert gap["p"] < 0.05 and sign * gap["value"] > 0
            assert min(sign * gap["low"], sign * gap["high"]) > 0
    gap = lost.differences(drawn(rng, 0.0))["retain"]
    assert gap["value"] == 0 and gap["p"] == 1 and -gap["low"] > 0.3 < gap["high"]


def test_p_of_ends_is_where_they_exclude_0():
    rng = np.random.default_rng(7)
    lost, kept = drawn(rng, 0.0), drawn(rng, 0.5)
    p = lost._by_ends(kept, "retain")["p"]
    for level, outside in ((1 - 1.02 * p, True), (1 - 0.97 * p, False)):
        one, two = lost.intervals(level)["retain"], kept.intervals(level)["retain"]
        value = kept.estimates["retain"].value
        assert (value > math.hypot(one[1], value - two[0])) == outside
    # Of G clusters never below what their signs say.
    few = [Scores({"retain_0": mean_of([x] * 4, "abcd")}) for x in (0.0, 1.0)]
    assert few[0]._by_ends(few[1], "retain")["p"] >= 2.0**-3


@given(numbers, numbers)
def test_auc_agrees_with_scikit_learn_and_is_symmetric(members, others):
    labels = [1] * len(members) + [0] * len(others)
    value = auc(members, others)
    assert value == pytest.approx(roc_auc_score(labels, members + others), abs=1e-12)
    assert value == pytest.approx(1 - auc(others, members), abs=1e-12)
    assert value == pytest.approx(auc([-x for x in others], [-x for x in members]), abs=1e-12)


def delong_by_pairs(members, others) -> tuple[float, float]:
    """The 1988 formula written out: psi over all pairs, S10 / N + S01 / M."""
    psi = np.array([[(x > y) + 0.5 * (x == y) for y in others] for x in members])
    s10 = ((psi.mean(1) - psi.mean()) ** 2).sum() / (len(members) - 1)
    s01 = ((psi.mean(0) - psi.mean()) ** 2).sum() / (len(others) - 1)
    return psi.mean(), s10 / len(members) + s01 / len(others)


@settings(max_examples=60)
@given(numbers, numbers)
def test_delong_equals_the_formula_over_all_pairs(members, others):
    one = area_of(members, others)
    area, variance = delong_by_pairs(members, others)
    assert one.value == pytest.approx(area, abs=1e-12)
    if np.ptp(members + others):
        assert one.error**2 == pytest.approx(variance, abs=1e-12)


def test_perfect_separation_keeps_an_honest_bound():
    """.025^(1/20) = .8316."""
    low, high = area_of(range(100, 120), range(40)).interval()
    assert (low, high) == pytest.approx((0.8316, 1.0), abs=1e-4)
    assert area_of(range(40), range(100, 120)).interval() == pytest.approx((0.0, 1 - low))


def test_auc_difference_uses_the_covariance():
    """The same scores twice: 30 texts leave 1 - .025 ** (1 / 30). Against pairs: var = a' C a."""
    rng = np.random.default_rng(11)
    members, others = rng.normal(1, 1, 30), rng.normal(0, 1, 40)
    same = area_of(members, others).minus(area_of(members * 2, others * 2))
    assert (same.value, same.half(), same.p) == (0, pytest.approx(1 - 0.025 ** (1 / 30)), 1)
    noisy = (members + rng.normal(0, 1, 30), others + rng.normal(0, 1, 40))
    gap = area_of(members, others).minus(area_of(*noisy))
    psi = [np.greater.outer(m, o).astype(float) for m, o in ((members, others), noisy)]
    d = psi[0] - psi[1]
    error = math.sqrt(d.mean(1).var(ddof=1) / 30 + d.mean(0).var(ddof=1) / 40)
    assert (gap.value, gap.error) == pytest.approx((d.mean(), error))


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
    assert area_of(members, others, (names, names)).error ** 2 == pytest.approx(expected)


def test_one_cluster_and_equal_scores_say_nothing():
    """They were certain: an interval of no width."""
    scores = np.arange(20.0), np.arange(20.0) + 0.5
    one = (["a"] * 20, list(range(20)))
    assert area_of(*scores, one).interval() == (0, 1)
    gap = area_of(*scores, one).minus(area_of(*(scores[1], scores[0]), one))
    assert gap.half() == 1 and gap.p == 1 and gap.margin_p(0.1) == 1
    assert area_of([1.0] * 20, [1.0] * 20).interval() == (0, 1)


def test_the_margin_test_agrees_with_the_interval():
    """p < .05 of "at least the margin away" exactly where the 90 % interval lies inside it."""
    rng = np.random.default_rng(14)
    outcomes = set()
    for _ in range(40):
        first = rng.normal(0, 1, 60), rng.normal(0, 1, 60)
        gap = area_of(*first).minus(area_of(*(x + rng.normal(0, 0.5, 60) for x in first)))
        inside = abs(gap.value) + gap.half(0.9) < 0.1
        assert (gap.margin_p(0.1) < 0.05) == inside
        outcomes.add(inside)
    assert outcomes == {True, False}


def test_holm_by_hand():
    """p .01, .04, .03 of 3: .01 * 3, then max(.03, .03 * 2) = .06, then max(.06, .04) = .06."""
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]).tolist() == [1, 1]


def test_ideal_score_of_the_official_set():
    """150 against 150: SE = sqrt(301 / 270000) = .0334; 1 - 2 * .0334 * .7979 = .947."""
    ideal = ideal_membership(150, 150)
    assert ideal.standard_error == pytest.approx(0.0334, abs=5e-5)
    assert ideal.expected == pytest.approx(0.9467, abs=5e-5)
    assert ideal_membership(3, 5).standard_error == pytest.approx(math.sqrt(9 / 180))


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
        (lambda: mean_of([1.0], []), "one a row"),
        (lambda: mean_of([]), "leave the score out"),
        (lambda: mean_of([np.nan], ["a"]), "NaN"),
        (lambda: area_of([1.0], [np.inf]), "NaN or infinite"),
        (lambda: ideal_membership(0, 3), "at least one"),
    ],
)
def test_faults_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_intraclass_correlation():
    """Two clusters of two: means 1 and 4, within 2 (of 0, 2 and 3, 5): by hand
    MSB = 2 * (1.5 ** 2 + 1.5 ** 2) = 9, MSW = (2 + 2) / 2 = 2: (9 - 2) / (9 + 2) = 7 / 11."""
    assert intraclass_correlation([0, 2, 3, 5], "aabb") == pytest.approx(7 / 11)
    assert intraclass_correlation([1, 1, 2, 2], "aabb") == 1
    assert math.isnan(intraclass_correlation([1, 2, 3], "abc"))


@pytest.mark.parametrize("groups, level", [(7, 0.05), (12, 0.005), (60, 0.005)])
def test_a_smallest_difference_is_found_in_four_of_five(groups, level):
    draws = np.random.default_rng(0).normal(size=(1500, groups))
    shift = np.median([mean_of(x).smallest(level, 0.8) / mean_of(x).error for x in draws[:20]])
    found = [mean_of(x + shift / math.sqrt(groups)).p < level for x in draws]
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)
    assert mean_of(draws[0][:5]).smallest(0.05, 0.8) == math.inf  # 2 ** -4 > .05


def test_the_smallest_difference_is_that_of_the_interval():
    """Half width .1 is z_.975 standard errors; four of five data sets need z_.8 more."""
    assert smallest_difference(-0.1, 0.1) == pytest.approx(0.1 * (1.95996 + 0.84162) / 1.95996)
    assert smallest_difference(-0.1, 0.1, 14) > smallest_difference(-0.1, 0.1)
