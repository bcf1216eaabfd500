"""The real model's study over seeds: its stages, its configs, its page. No training here."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from research.__main__ import research
from research.analysis.paper import COLUMNS
from research.analysis.study import SHARED, page
from research.studies.reproduce import OWN_SEED, plan_real_seed

ROOT = Path(__file__).parents[2]
MODELS = ("original", "over", "under", "merged", "retrained")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "real"
    for part in ("memorised/merged", "retrained/merged", "data", "eval", "configs"):
        (folder / part).mkdir(parents=True)
    return folder


def test_stages_of_a_new_seed(source, tmp_path):
    out = tmp_path / "seed-1"
    plan = plan_real_seed(source, out, 1, bf16=True, threads=2)
    stages = {stage.name: stage for stage in plan.job.stages}
    assert list(stages) == [
        "over", "over-merged", "under", "under-merged", "merged", "eval", "reproduction",
    ]  # fmt: skip
    words = stages["eval"].command()
    assert [w.partition("=")[0] for w in words if "=" in w] == list(MODELS)
    assert f"original={source / 'memorised' / 'merged'}" in words
    assert f"merged={out / 'merged'}" in words
    assert f"retrained={source / 'retrained' / 'merged'}" in words
    # What demo-real knows of models by content is not measured again.
    assert words[words.index("--store") + 1] == str(source / "store")
    for name in ("over", "under"):
        config = yaml.safe_load((out / "configs" / f"{name}.yml").read_text())
        theirs = yaml.safe_load((ROOT / "examples" / "smollm2" / f"{name}.yml").read_text())
        assert config["seed"] == 1 and config["output_dir"] == str(out / name)
        assert config["base_model"] == str(source / "memorised" / "merged")
        changed = {key for key in config if config.get(key) != theirs.get(key)}
        assert changed == {
            *("seed", "output_dir", "base_model", "datasets", "dataset_prepared_path"),
            *("save_strategy", "save_steps", "save_only_model"),
        }
        assert "--bf16=false" not in stages[name].command()


def test_its_own_seed_is_not_trained_again(source, tmp_path):
    out = tmp_path / "seed-42"
    plan = plan_real_seed(source, out, OWN_SEED, bf16=True)
    stages = {stage.name: stage for stage in plan.job.stages}
    assert list(stages) == ["eval", "reproduction"]
    assert f"over={source / 'over' / 'merged'}" in stages["eval"].command()
    assert str(source / "over") in stages["reproduction"].command()


def test_what_is_missing_is_named(tmp_path):
    words = ["reproduce-real", "--source", str(tmp_path / "no"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(research, words)
    assert done.exit_code == 2 and "run `make demo-real` first" in done.output


def test_page_by_hand():
    """.5, .6, .7: mean .6, half width t(2) * .1 / sqrt(3) = .248; the shared models have one."""

    def seed(value):
        scores = dict.fromkeys(COLUMNS, value)
        models = {name: {**scores, "cells": {}, "intervals": {}} for name in MODELS}
        models["original"] = models["retrained"] = {**dict.fromkeys(COLUMNS, 0.9), "cells": {}}
        models["over"]["distance"] = {
            "mia_auc": {"p": 0.001, "value": -0.1, "interval": [-0.2, 0.0]}
        }
        return models

    def merge(value):
        scores = {"aggregate": value, "task_aggregate": 0.5, "mia_auc": 0.5}
        recipe = {"method": "ties", "space": "factors", "scale": "average", "density": 0.8}
        return {"recipe": recipe, "scores": scores}

    reproduced = {
        n: {
            "table_2": [merge(value)],
            "figure_5": [merge(value)],
            "geometry": {"cosine": {"0,1": 0.25}},
        }
        for n, value in ((42, 0.4), (1, 0.5), (2, 0.6))
    }
    text = page("a", {42: seed(0.5), 1: seed(0.6), 2: seed(0.7)}, reproduced, shared=SHARED)
    assert "| over | 0.600 ± 0.248 |" in text and "| retrained | 0.900 | 0.900 |" in text
    assert "| 42 | 0.900 | 0.500 | 0.500 | 0.500 | 0.900 |" in text
    assert "| 42 |  | 1: mia_auc -0.10 |" in text
    assert (
        "| ties | factors | average | 0.500 ± 0.248 | 0.500 ± 0.000 | 0.500 ± 0.000 | n/a | n/a "
        "| 0.806 |" in text
    )
