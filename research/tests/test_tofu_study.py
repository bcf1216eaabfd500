"""The TOFU study: whose rows are where, and intervals over authors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.data.records import read_json_lines
from research.runs import changed
from research.studies.reproduce import METHODS, SOURCES, Real
from research.studies.tofu import SEED, Tofu, over_authors


def test_authors_are_drawn_with_all_of_their_rows():
    """Of two authors, all of 0 and all of 1, a draw has means 0, .5 or 1: the interval is whole,
    where 40 independent rows would give a width of .3."""
    assert over_authors([[0.0] * 20, [1.0] * 20]) == (0.0, 1.0)
    assert over_authors([[0.25] * 20] * 10) == (0.25, 0.25)


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
