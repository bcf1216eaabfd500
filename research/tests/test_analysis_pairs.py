"""Pairs of runs: the scores are those of the merges, the geometry that of the pair."""

from __future__ import annotations

import json

import pytest
from merging_models import runs_and_data

from axolotl_unlearn.errors import UnlearnError
from research.analysis.geometry import task_vectors
from research.analysis.pairs import RECIPES, compare_pairs, main
from research.merging.lab import Lab


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    runs_and_data(root, {"over": 0, "under": 0, "twin": 1})
    return root


def norm(model) -> dict[str, float]:
    """A score that tells every merge from every other: the length of all weights."""
    return {
        "norm": sum(float(p.detach().double().square().sum()) for p in model.parameters()) ** 0.5
    }


def test_scores_are_of_the_merges(made):
    runs = {name: made / name for name in ("over", "under", "twin")}
    result = compare_pairs(made / "base", runs, [("over", "under"), ("over", "twin")], norm)
    for name, where in runs.items():
        lab = Lab(made / "base", [where])
        assert result["runs"][name] == norm(lab.load(lab.resident_model(), 0))
    for row in result["pairs"]:
        both = [runs[name] for name in row["pair"]]
        lab = Lab(made / "base", both, force=True)
        for name, recipe in RECIPES.items():
            expected = norm(lab.load(lab.resident_model(), recipe))["norm"]
            assert row["merges"][name]["norm"] == pytest.approx(expected, rel=1e-6)
        geometry = task_vectors(made / "base", both)
        assert row["cosine"] == geometry["cosine"]["0,1"] and row["norm"] == geometry["norm"]
    same, other = (row["initialisation"] for row in result["pairs"])
    assert same > 0.2 > abs(other)


def test_unknown_run(made):
    with pytest.raises(UnlearnError, match="'udner', which is none of over"):
        compare_pairs(made / "base", {"over": made / "over"}, [("over", "udner")], norm)


def test_command(made, capsys):
    words = ["--base", made / "base", "--data", made / "data", "--out", made / "out", "--runs",
             f"over={made / 'over'}", f"under={made / 'under'}"]  # fmt: skip
    main([str(word) for word in words])
    result = json.loads((made / "out" / "pairs.json").read_text())
    assert [row["pair"] for row in result["pairs"]] == [["over", "under"]]
    assert 0 <= result["pairs"][0]["merges"]["mean"]["aggregate"] <= 1
    for bad, message in (
        (["--runs", "over"], "write NAME=FOLDER"),
        (["--pairs", "a"], "two names"),
    ):
        with pytest.raises(SystemExit):
            main([str(word) for word in words[:6]] + ["--runs", f"over={made / 'over'}", *bad])
        assert message in capsys.readouterr().err
