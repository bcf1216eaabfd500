"""Paired comparison of two models: differences by hand, pairing, and what is said when it is
missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fault_codes import fails

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.evaluation.compare import compare, sentence
from axolotl_unlearn.evaluation.measurement import Measured
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.evaluation.summary import scores_of
from axolotl_unlearn.metrics.intervals import Difference, smallest_difference


def make_sets(documents: int = 8) -> EvaluationSets:
    def side(mark: str) -> list[Record]:
        return [
            Record(f"{mark}{i}{kind}", f"p{i}", f"o{i}", "Task1", name)
            for i in range(documents)
            for kind, name in (("sc1", "completion"), ("qa0", "question"))
        ]

    return EvaluationSets(
        folder=Path("data"),
        forget=side("f"),
        retain=side("r"),
        member=[(f"f{i}sc1", f"member {i}") for i in range(documents)],
        nonmember=[(f"n{i}", f"other {i}") for i in range(documents)],
    )


def make_measured(sets: EvaluationSets, forget: float, retain: float, seed: int = 0) -> Measured:
    rng = np.random.default_rng(seed)
    n = len(sets.member)
    return Measured(
        values={row.key: forget if row.side == "forget" else retain for row in sets.rows},
        member_loss=rng.random(n).tolist(),
        nonmember_loss=rng.random(n).tolist(),
        options=[1, 1, 0, 0],
    )


def compare_measured(first, second, sets):
    return scores_of(first, sets).differences(scores_of(second, sets))


def test_differences_by_hand():
    """Forget cells are 1 - v: .75 against .5; retain .8 against .8. Task Aggregate: harmonic
    means of (.75, .75, .8, .8) and (.5, .5, .8, .8)."""
    sets = make_sets(14)
    gaps = compare_measured(make_measured(sets, 0.25, 0.8), make_measured(sets, 0.5, 0.8), sets)
    assert gaps["forget_task1_knowledge"].value == pytest.approx(0.25)
    assert gaps["retain_task1_regurgitation"].value == pytest.approx(0)
    expected = 4 / (2 / 0.75 + 2 / 0.8) - 4 / (2 / 0.5 + 2 / 0.8)
    task = gaps["task_aggregate"]
    # Every row of a cell has one value: what 14 documents leave is 1 - .025 ** (1 / 14).
    room = 1 - 0.025 ** (1 / 14)
    assert (task.value, task.high - task.value) == pytest.approx((expected, room))
    assert gaps["aggregate"].value == pytest.approx(expected / 3)
    # 14 documents that agree: signs of one of 2^13 kinds, and ten scores are shown.
    assert gaps["forget_task1_knowledge"].p <= 0.005
    assert gaps["retain_task1_regurgitation"].p == 1
    # The same losses: what 14 texts leave of no difference.
    assert (gaps["mia_auc"].low, gaps["mia_auc"].high) == pytest.approx((-room, room))
    text = sentence("a", "b", gaps)
    # Of four questions eight signs are all there is: no aggregate with them says more.
    assert gaps["aggregate"].p >= 0.125 and text.startswith("a is higher in task_aggregate")


def test_the_smallest_difference_is_that_of_the_interval():
    """A half width of 1.96 standard errors; (1.96 + 0.842) of them are found in four of five."""
    assert smallest_difference(-0.1, 0.1) == pytest.approx(0.1 * (1.95996 + 0.84162) / 1.95996)
    assert smallest_difference(-0.1, 0.1, 14) > smallest_difference(-0.1, 0.1)


def test_the_reverse_comparison_is_the_mirror_image():
    sets = make_sets()
    first, second = make_measured(sets, 0.2, 0.9, seed=1), make_measured(sets, 0.3, 0.7, seed=2)
    there = compare_measured(first, second, sets)
    back = compare_measured(second, first, sets)
    for metric, gap in there.items():
        assert gap.value == pytest.approx(-back[metric].value)
        assert (gap.low, gap.high) == pytest.approx((-back[metric].high, -back[metric].low))


def test_scores_that_one_model_lacks_are_left_out():
    sets = make_sets()
    first, second = make_measured(sets, 0.2, 0.9), make_measured(sets, 0.3, 0.7)
    second.options = []
    gaps = compare_measured(first, second, sets)
    assert "utility" not in gaps and "aggregate" not in gaps and "task_aggregate" in gaps


def test_sentence_without_a_difference():
    gaps = {"aggregate": Difference(0.1, -0.1, 0.3, 0.2)}
    assert "No headline score tells a from b" in sentence("a", "b", gaps)


def test_missing_evaluation_is_named(tmp_path):
    with fails("results.missing"):
        compare("a", "b", out_dir=tmp_path)
    results = {"settings": {}, "data_dir": str(tmp_path / "none"), "schema": 2}
    results["models"] = [{"name": "a"}]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with fails("eval.no-folder"):
        compare("a/b/c", "d/e/f", out_dir=tmp_path)
    with fails("eval.no-model") as caught:
        compare("a", "mine", out_dir=tmp_path)
    assert "'mine'; it holds a." in str(caught.value)
