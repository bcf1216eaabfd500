"""The study over seeds: which stages it has, what it chooses on, and its arithmetic."""

import json
import math

import pytest
import yaml

from axolotl_unlearn.analysis.study import (
    COLUMNS,
    ORDER,
    SINGLE_BETAS,
    SIZES,
    make_study,
    mean_interval,
    page,
    read_seed,
    summarise,
)
from axolotl_unlearn.errors import UnlearnError


def _scores(aggregate):
    return {**dict.fromkeys(COLUMNS, 0.5), "aggregate": aggregate, "cells": {}}


def _seed(**aggregates):
    return {name: _scores(aggregates.get(name, 0.5)) for name in ORDER}


def test_halves_are_large_enough():
    """At least 80 members and 80 non-members a half."""
    assert SIZES.facts_forget // 2 >= 80 and SIZES.nonmembers // 2 >= 80


def test_stages_of_a_seed(tmp_path):
    job = make_study(tmp_path / "seed-7", 7, trials=5)
    stages = {stage.name: stage for stage in job.stages}
    assert set(stages) >= {"over", "under", "merged", "tuned", "reproduction", "test", "retrained"}
    assert not {"eval", "path", "single"} & set(stages)
    assert "--data" in stages["tuned"].command and "--trials" in stages["tuned"].command
    for name, half in (("validation", "validation"), ("test", "test")):
        command = stages[name].command
        assert command[command.index("--data") + 1] == str(tmp_path / "seed-7" / "data" / half)
    # The single runs differ from the over-run in beta and output alone.
    over = yaml.safe_load((tmp_path / "seed-7" / "configs" / "over.yml").read_text())
    for name, beta in SINGLE_BETAS.items():
        config = yaml.safe_load((tmp_path / "seed-7" / "configs" / f"{name}.yml").read_text())
        assert config["unlearn"]["forget"]["beta"] == beta
        config["unlearn"]["forget"]["beta"] = over["unlearn"]["forget"]["beta"]
        same = set(over) - {"output_dir", "save_strategy", "save_steps", "save_total_limit"}
        assert {key: config[key] for key in same} == {key: over[key] for key in same}


def test_the_single_run_is_chosen_on_validation(tmp_path):
    """On validation single_b is better, on test single_a: the table shows single_b's test score."""
    for half, a, b in (("validation", 0.6, 0.7), ("test", 0.9, 0.8)):
        models = [{"name": name, **_scores(0.5)} for name in ORDER if name != "single"]
        models += [{"name": "single_a", **_scores(a)}, {"name": "single_b", **_scores(b)}]
        (tmp_path / half).mkdir()
        (tmp_path / half / "results.json").write_text(json.dumps({"models": models}))
    assert read_seed(tmp_path)["single"]["aggregate"] == 0.8
    (tmp_path / "test" / "results.json").unlink()
    with pytest.raises(UnlearnError, match="run this seed to its end"):
        read_seed(tmp_path)


def test_interval_over_seeds_by_hand():
    """.7, .8, .9: mean .8, standard error .1/sqrt(3), t(2) = 4.3027: half width .2484."""
    mean, half = mean_interval([0.7, 0.8, 0.9])
    assert mean == pytest.approx(0.8)
    assert half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    assert math.isnan(mean_interval([0.7])[1])


def test_differences_are_paired_by_seed():
    """tuned - fixed = +.1 and 0: mean .05, above in one seed, level in the other."""
    seeds = {0: _seed(tuned=0.9, fixed=0.8), 1: _seed(tuned=0.6, fixed=0.6)}
    row = summarise(seeds)["differences"]["fixed"]
    assert row["mean"][0] == pytest.approx(0.05)
    assert (row["above"], row["level"], row["of"]) == (1, 1, 2)
    seeds[0]["over"]["intervals"] = {"aggregate": [0.4, 0.62]}
    text = page(seeds, summarise(seeds), {})
    assert "| 0 | 0.500 | 0.500 (0.40-0.62) |" in text
    assert "| fixed | +0.050 ± 0.635 | 1 of 2 (level in 1) |" in text
    assert "| 1 | 0.500 | 0.500 | 0.500 | 0.600 | 0.600 | 0.500 | 0.500 |" in text
