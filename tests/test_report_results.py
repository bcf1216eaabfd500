"""Flags, statuses, the best row and bad input; expected values worked out in the docstrings."""

import copy
import json
import math

import pytest
from report_fixture import make_results

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.report.results import (
    auc_standard_error,
    bars,
    best,
    broken,
    find,
    flags,
    forgetting,
    ideal_mia_score,
    load_results,
    membership_sizes,
    recognised,
    show,
    side_mean,
    status,
    unstopped_answers,
)
from axolotl_unlearn.report.verdict import verdict


@pytest.fixture
def results():
    return make_results()


def by_name(results, name):
    return next(model for model in results["models"] if model["name"] == name)


def test_side_mean_is_harmonic_and_skips_missing_cells():
    """Harmonic mean of 1/2 and 1 is 2 / (2 + 1) = 2/3; a null cell counts neither way."""
    cells = {"forget_task1_regurgitation": 0.5, "forget_task2_knowledge": 1.0}
    model = {"name": "m", "cells": {**cells, "forget_task3_knowledge": None}}
    assert side_mean(model, "forget") == pytest.approx(2 / 3)
    assert side_mean(model, "retain") is None
    assert side_mean({"name": "m", "cells": {**cells, "forget_task3_knowledge": 0}}, "forget") == 0


def test_the_two_sides_give_the_task_aggregate(results):
    """HM of 12 = 12 / (6/F + 6/R) = 2 / (1/F + 1/R), which the plane's contours rely on."""
    model = by_name(results, "merged")
    forget, retain = side_mean(model, "forget"), side_mean(model, "retain")
    assert 2 / (1 / forget + 1 / retain) == pytest.approx(model["task_aggregate"])


def test_expected_mia_score_of_a_perfect_model():
    """150 against 150: SE = sqrt(301 / 270000) = .0334; 1 - 2 * .0334 * sqrt(2/pi) = .947
    (CATALOGUE C1)."""
    assert auc_standard_error(150, 150) == pytest.approx(0.03339, abs=1e-5)
    assert ideal_mia_score(150, 150) == pytest.approx(0.947, abs=5e-4)
    assert auc_standard_error(3, 5) == pytest.approx(math.sqrt(9 / 180))


def test_flagged_rows_are_never_best(results):
    """The highest Aggregate belongs to a collapsed row here, the next to one below the gate."""
    by_name(results, "ascent")["aggregate"] = 0.99
    under = by_name(results, "under")
    under["aggregate"] = 0.98
    under["gate"]["below_gate"] = True
    assert best(results) == "merged"
    assert flags(by_name(results, "ascent")) == ["collapsed", "below gate"]
    assert flags(under) == ["below gate"]


def test_the_retrained_target_is_not_a_candidate(results):
    assert by_name(results, "retrained")["aggregate"] > by_name(results, "merged")["aggregate"]
    assert best(results) == "merged"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("original", "before"),
        ("over", "over-forgets"),
        ("under", "under-forgets"),
        ("merged", "good"),
        ("retrained", "target"),
        ("ascent", "collapsed"),
    ],
)
def test_status(results, name, expected):
    original, retrained = find(results, "original"), find(results, "retrained")
    assert status(by_name(results, name), original, retrained) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"collapse": {"collapsed": True}}, "collapsed"),
        ({"gate": {"below_gate": True}}, "below gate"),
        ({"utility": None}, "utility unknown"),
        ({"gate": None}, "utility unknown"),
        ({"mia_auc": None, "forgetting": None}, "no membership"),
    ],
)
def test_what_keeps_a_model_from_being_called_good(results, change, expected):
    model = {**by_name(results, "merged"), **change}
    assert status(model, find(results, "original"), find(results, "retrained")) == expected


def test_bars_follow_the_retrained_model_or_the_original(results):
    """Without both: .8 and .8. The original's retain side sets .8 of itself; a retrained model
    replaces both bars by its own sides minus .1."""
    original, retrained = find(results, "original"), find(results, "retrained")
    assert bars(None, None) == (0.8, 0.8)
    assert bars(original, None) == (0.8, pytest.approx(0.8 * side_mean(original, "retain")))
    assert bars(original, retrained) == (
        pytest.approx(side_mean(retrained, "forget") - 0.1),
        pytest.approx(side_mean(retrained, "retain") - 0.1),
    )


def test_low_retain_and_low_forget_are_named(results):
    merged = by_name(results, "merged")
    lost = {**merged, "cells": {**merged["cells"], "retain_task2_knowledge": 0.05}}
    knows = {**merged, "cells": {**merged["cells"], "forget_task2_knowledge": 0.05}}
    assert status(lost) == "lost knowledge"
    assert status(knows) == "still knows"


def spread_losses(low, high):
    """100 members against 100 non-members at 1.00 .. 1.99: `low` members below all of them,
    `high` above all, the others in the middle."""
    others = [1 + i / 100 for i in range(100)]
    members = [0.1] * low + [5.0] * high + [1.5] * (100 - low - high)
    return {"name": "m", "likelihood": {"member_loss": members, "nonmember_loss": others}}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (30, 30, ("low", 0.3)),
        (0, 20, ("high", 0.2)),
        # 3 of 100: the Clopper-Pearson bound is .0062, under 1 %; 5 of 100: .0164, above it.
        (3, 0, None),
        (5, 0, ("low", 0.05)),
        (0, 0, None),
    ],
)
def test_single_members_are_found_where_the_auc_is_one_half(low, high, expected):
    """30 far below and 30 far above leave the AUC at about .5, yet a third can be named."""
    assert recognised(spread_losses(low, high)) == expected


def test_recognition_is_read_against_the_retrained_model(results):
    """10 of 100 (lower bound .049) is nothing special where the target itself has 6 of 100."""
    model, target = spread_losses(10, 0), spread_losses(6, 0)
    assert recognised(model) == ("low", 0.1)
    assert recognised(model, target) is None
    assert recognised({"name": "m"}) is None
    merged = {**by_name(results, "merged"), "likelihood": spread_losses(30, 30)["likelihood"]}
    assert status(merged, find(results, "original"), find(results, "retrained")) == "recognisable"


def test_answers_that_exact_match_does_not_see_are_still_known(results):
    """.02 exact and .09 contained: .07 is over .05; .02 and .06 is not."""
    original, retrained = find(results, "original"), find(results, "retrained")
    merged = by_name(results, "merged")

    def answers(exact, contained, side="forget"):
        return {**merged, "answers": {side: {"n": 100, "exact": exact, "contained": contained}}}

    plain = status(merged, original, retrained)
    assert status(answers(0.02, 0.09), original, retrained) == "still knows" != plain
    assert status(answers(0.02, 0.06), original, retrained) == plain
    assert unstopped_answers(answers(0.02, 0.09), "forget") == pytest.approx(0.07)
    assert unstopped_answers(merged, "forget") is None
    said = verdict(answers(0.02, 0.09), original, retrained)
    assert "7 % of its answers about the forget set" in said and "counts as forgotten" in said
    said = verdict(answers(0.7, 0.9, "retain"), original, retrained)
    assert "20 % of its answers about the retain set" in said and "counts as lost" in said


def test_broken_answers_on_the_forget_set_are_not_good(results):
    """.34 is over .1 and over .1 + .2 of the target, not over .1 + .3."""

    def with_broken(model, share):
        return {**model, "collapse": {"collapsed": False, "forget": {"broken": share}}}

    merged, retrained = by_name(results, "merged"), find(results, "retrained")
    original = find(results, "original")
    assert status(with_broken(merged, 0.34), original, retrained) == "broken answers"
    assert broken(with_broken(merged, 0.34), with_broken(retrained, 0.2)) == 0.34
    assert broken(with_broken(merged, 0.34), with_broken(retrained, 0.3)) is None
    assert broken(with_broken(merged, 0.05)) is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"mia_auc": 0.65, "intervals": {"mia_auc": [0.48, 0.8]}}, "balanced"),
        ({"mia_auc": 0.65, "intervals": {"mia_auc": [0.55, 0.75]}}, "under"),
        ({"mia_auc": 0.38}, "over"),
        ({"mia_auc": 0.42}, "balanced"),
        ({"mia_auc": float("nan")}, None),
        ({"mia_auc": 0.9, "forgetting": "over"}, "over"),
    ],
)
def test_forgetting_is_named_from_the_interval(model, expected):
    """The evaluation's own word wins; else the interval (or +-.1) must contain .5 for balanced."""
    assert forgetting({"name": "m", **model}) == expected


def test_membership_sizes_fall_back_to_the_loss_arrays():
    assert membership_sizes({"n": {"member": 80, "nonmember": 160}}) == (80, 160)
    arrays = {"member_loss": [1.0] * 3, "nonmember_loss": [1.0] * 4}
    assert membership_sizes({"likelihood": arrays}) == (3, 4)
    assert membership_sizes({}) is None


def test_missing_numbers_are_not_zero():
    assert [show(v) for v in (None, float("nan"), True, "x", 0)] == ["n/a"] * 4 + ["0.000"]


def test_reads_a_folder_a_file_and_a_dict(results, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert load_results(tmp_path) == load_results(tmp_path / "results.json") == results
    assert load_results(results) == results


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[]", "no list `models`"),
        ('{"models": []}', "lists no models"),
        ('{"models": [{}]}', r"models\[0\] has no `name`"),
        ('{"schema": 7, "models": [{"name": "a"}]}', "schema 7"),
        ('{"models": [{"name": "a"}, {"name": "a"}]}', "two models named 'a'"),
        ('{"models": [{"name": "a", "cells": {"forget_task9_x": 1}}]}', "forget_task9_x"),
    ],
)
def test_bad_results_get_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UnlearnError, match=sentence) as fault:
        load_results(path)
    assert str(path) in str(fault.value)


def test_a_missing_file_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(UnlearnError, match="axolotl unlearn eval"):
        load_results(tmp_path / "nowhere")


def test_loading_does_not_change_what_it_is_given(results):
    before = copy.deepcopy(results)
    load_results(results)
    assert results == before
