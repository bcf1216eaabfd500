"""The TOFU study: whose rows are where, and intervals over authors."""

from __future__ import annotations

import json
from functools import partial
from statistics import fmean
from types import SimpleNamespace

import pytest

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_lines
from eval_tasks.tofu.utils import UTILITY_MEASURES
from research.runs import changed
from research.studies import tofu
from research.studies.reproduce import METHODS, SOURCES, Real
from research.studies.tofu import COLUMNS, SEED, SETS, Tofu, over_units


def test_authors_are_drawn_with_all_of_their_rows():
    """Of two authors, all of 0 and all of 1, a draw has means 0, .5 or 1: the interval is whole,
    where 40 independent rows would give a width of .3."""
    assert over_units([[[0.0] * 20, [1.0] * 20]], fmean) == (0.0, 1.0)
    assert over_units([[[0.25] * 20] * 10], fmean) == (0.25, 0.25)


def test_each_figure_has_the_interval_of_its_own_rows(tmp_path, monkeypatch):
    """Beside scipy's p of what two models say: one that is the other keeps 1 in each draw; two
    authors of ten that are known give an AUC of .6, whose draws are steps of .05."""
    monkeypatch.setattr(Real, "draw", lambda world: None)
    monkeypatch.setattr(Tofu, "draw", lambda world: None)
    monkeypatch.setattr(tofu, "over_units", partial(over_units, draws=400))
    world = Tofu(tmp_path, 1)
    for model, shift in (("retrained", 0.0), ("same", 0.0), ("far", 9.0)):
        rows = [sample("forget", n, 100, n // 10 < 2, shift) for n in range(100)]
        rows += [sample("holdout", n, 100, False, shift) for n in range(100)]
        rows += [sample("retain", n, 45, n < 9, shift) for n in range(45)]
        rows += [
            sample(side, n, 30, False, shift)
            for side in SETS["model_utility"][1:]
            for n in range(30)
        ]
        folder = world.out / "eval" / model
        write_lines(folder / "samples_tofu_1.jsonl", rows)
        figures = {f"{key},none": 0.5 for key in COLUMNS.values()}
        (folder / "scores_1.json").write_text(json.dumps({"results": {"tofu": figures}}))
    assert {side: len(units) for side, units in world.units("same").items()} == {
        "forget": 10, "holdout": 10, "retain": 15, "real_authors": 30, "world_facts": 30}  # fmt: skip
    assert world.scores("retrained")["forget quality (p)"] == [0.5]
    assert world.scores("same")["forget quality (p)"] == [0.5, 1.0, 1.0]
    assert world.scores("far")["forget quality (p)"][2] < 1e-10
    low, high = world.scores("same")["AUC"][1:]
    assert low == 0.5 and round(high, 9) in (0.7, 0.75)  # four or five of ten authors
    # of retained rows a fifth, three authors of fifteen, has 1: 9 means, six of which are .5
    low, high = world.scores("same")["utility"][1:]
    part = lambda mean: 9 / (3 / mean + 6 / 0.5)  # noqa: E731
    assert part(0.5) <= low < part(0.6) < high <= part(0.8)
    assert world.scores("nobody") == {}


def sample(side: str, number: int, count: int, known: bool, shift: float) -> dict:
    """As lm-eval logs it: what a row adds to each figure."""
    value = 1.0 if known else 0.5
    return {
        "doc": {"set": side, "number": number, "answer": f"{side} {number}"},
        **dict.fromkeys(("forget_rouge_l_recall", "forget_truth_ratio"), value),
        "forget_extraction_strength": value,
        "forget_quality": ["asked", number + shift * 100] if side == "forget" else None,
        "auc_min_k_plus_0.4": [side, value] if side in SETS["auc_min_k_plus_0.4"] else None,
        "model_utility": [side, dict.fromkeys(UTILITY_MEASURES, value)],
    }


def test_no_author_is_on_two_sides(tmp_path):
    if not SOURCES["TOFU"].is_dir():
        pytest.skip("TOFU's files are not here (TOFU_DIR)")
    data = Tofu(tmp_path / "out", SEED).data
    names = ("forget", "retain", "heldout")
    sides = {name: read_json_lines(data / f"{name}.jsonl") for name in names}
    sides["holdout"] = read_json_lines(data / "scored/holdout.jsonl")
    assert [len(rows) for rows in sides.values()] == [200, 300, 200, 100]
    questions = [{(row["question"], row["answer"]) for row in rows} for rows in sides.values()]
    assert len(set().union(*questions)) == sum(map(len, questions))
    scored = read_json_lines(data / "scored/forget05_perturbed.jsonl")
    numbers = [sides["forget"].index(row) for row in scored]
    assert [sum(n // 20 == author for n in numbers) for author in range(10)] == [10] * 10
    rows = read_json_lines(data / "scored/retain_perturbed.jsonl")
    kept = {(row["question"], row["answer"]) for row in rows}
    assert kept <= questions[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_given_the_rows_that_it_uses(tmp_path, monkeypatch, method):
    """A config with retained rows that no objective reads is refused, and the tries with it."""
    monkeypatch.setattr(Real, "draw", lambda world: setattr(world, "base", tmp_path / "base"))
    world, seen = Real(tmp_path, 1), {}
    world.measure = lambda name: None
    world.runs = SimpleNamespace(train=lambda name, example, changes: seen.update(changes))
    world.method("name", method, 0.001)
    args = parse_unlearn(changed({}, seen)["unlearn"])
    rows = {entry["type"].rsplit(".", 1)[1] for entry in seen["datasets"]}
    assert rows == {"forget"} | ({"retain"} if args.retain else set())
