"""The official scores, against hand arithmetic and other people's implementations."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axolotl_unlearn.metrics import semeval as sv


def test_twelve_cells_in_the_agreed_names():
    expected = {
        f"{side}_task{task}_{kind}"
        for side in ("forget", "retain")
        for task in (1, 2, 3)
        for kind in ("regurgitation", "knowledge")
    }
    assert set(sv.CELLS) == expected and len(sv.CELLS) == 12


def test_rouge_l_recall_by_hand():
    """Expected: "the cats sat on mats" (5 words). Generated: "the cat was sitting on a mat".
    Stemmed (more than 3 letters): the cat sat on mat / the cat was sit on a mat.
    "cats" -> "cat" and "mats" -> "mat" match; "sitting" -> "sit" is not "sat".
    LCS = the, cat, on, mat = 4 of 5."""
    assert sv.rouge_l_recall("the cat was sitting on a mat", "The cats sat on mats!") == 0.8


def test_rouge_counts_order_and_recall_only():
    assert sv.rouge_l_recall("b a", "a b") == 0.5
    # Recall: what comes on top costs nothing.
    assert sv.rouge_l_recall("a b and then many other words", "a b") == 1.0
    assert sv.rouge_l_recall("", "a b") == 0.0


@pytest.mark.parametrize(
    ("generated", "expected", "score"),
    [
        (" Paris \n", "paris", 1.0),
        ("Paris.", "Paris", 0.0),
        ("Paris is the capital", "Paris", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_exact_match_of_the_whole_generation(generated, expected, score):
    assert sv.exact_match(generated, expected) == score


def test_cells_and_task_aggregate_by_hand():
    """forget task 1 completions .25 and .75: mean .5, cell .5; forget task 1 questions 0: cell 1;
    retain task 3 questions 1, 0, 0, 0: cell .25. Harmonic mean of .5, 1, .25 = 3/(2+1+4) = 3/7."""
    rows = [
        (sv.cell("forget", 1, "completion"), 0.25),
        (sv.cell("forget", 1, "completion"), 0.75),
        (sv.cell("forget", 1, "question"), 0.0),
        *[(sv.cell("retain", 3, "question"), v) for v in (1.0, 0.0, 0.0, 0.0)],
    ]
    cells, n = sv.cell_values(rows)
    assert cells["forget_task1_regurgitation"] == 0.5
    assert cells["forget_task1_knowledge"] == 1.0
    assert cells["retain_task3_knowledge"] == 0.25
    assert sum(value is not None for value in cells.values()) == 3
    assert n["forget_task1_regurgitation"] == 2 and n["retain_task1_knowledge"] == 0
    assert sv.task_aggregate(cells) == pytest.approx(3 / 7, abs=1e-15)


def test_harmonic_mean_like_the_standard_library():
    values = [random.Random(0).random() for _ in range(12)]
    assert sv.harmonic_mean(values) == pytest.approx(statistics.harmonic_mean(values), abs=1e-15)
    assert sv.harmonic_mean([0.5, 0.0]) == statistics.harmonic_mean([0.5, 0.0]) == 0.0


def test_a_missing_cell_is_left_out_not_zero():
    assert sv.harmonic_mean([0.5, None, 0.5]) == 0.5
    assert sv.harmonic_mean([None, None]) is None


losses = st.lists(st.integers(0, 8).map(lambda i: i / 2), min_size=1, max_size=30)


@given(losses, losses)
def test_auc_is_the_share_of_ordered_pairs(members, nonmembers):
    """Counted pair by pair; turned round it is the rest; the order of texts does not matter."""
    pairs = [(m < n) + (m == n) / 2 for m in members for n in nonmembers]
    auc = sv.mia_auc(members, nonmembers)
    assert auc == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert auc + sv.mia_auc(nonmembers, members) == pytest.approx(1.0, abs=1e-12)
    assert auc == pytest.approx(sv.mia_auc(members[::-1], nonmembers[::-1]), abs=1e-12)


def test_auc_by_hand():
    """Members 1, 3; non-members 2, 3: pairs (1<2), (1<3), (3>2), (3=3) = 1 + 1 + 0 + 1/2."""
    assert sv.mia_auc([1, 3], [2, 3]) == 2.5 / 4


@pytest.mark.parametrize(("auc", "score"), [(0.5, 1.0), (1.0, 0.0), (0.0, 0.0), (0.25, 0.5)])
def test_mia_score(auc, score):
    assert sv.mia_score(auc) == score


def test_published_rows_are_reproduced():
    """SemEval-2025 Task 4, arXiv 2503.21088 Table 1: Task Aggregate .944, MIA score .048,
    MMLU .471 give .487; locally .939, .997 (AUC .501: 1 - .002 = .998), .480 give .806 (.805)."""
    assert sv.aggregate(0.944, 0.048, 0.471) == pytest.approx(0.487, abs=1e-3)
    assert sv.aggregate(0.939, 0.997, 0.480) == pytest.approx(0.806, abs=1e-3)
    assert sv.mia_score(0.501) == pytest.approx(0.997, abs=1.1e-3)


def test_aggregate_without_a_part_is_none():
    assert sv.aggregate(0.9, 0.9, None) is None
    assert sv.aggregate(None, 0.9, 0.9) is None


def test_gate_of_the_task():
    """.371 is 75 % of .495: .370 is below, .372 is not."""
    assert sv.gate(0.370, 0.495)["below_gate"] and not sv.gate(0.372, 0.495)["below_gate"]
    assert sv.gate(0.4, 0.495)["threshold"] == pytest.approx(0.37125)
    assert sv.gate(None, 0.5) is None and sv.gate(0.5, None) is None


def test_empty_sets_and_nan_are_refused():
    with pytest.raises(ValueError, match="no non-members"):
        sv.mia_auc([1.0], [])
    with pytest.raises(ValueError, match="not finite"):
        sv.mia_auc([1.0, math.nan], [2.0])


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match="tasks are 1, 2 and 3"):
        sv.cell("forget", 4, "question")
