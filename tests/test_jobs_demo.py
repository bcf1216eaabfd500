"""The driver: configs derived from the examples, the gate, and one small job from end to end."""

import json
from pathlib import Path

import pytest
import yaml

from axolotl_unlearn.demo.generate import Sizes
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.jobs.demo import (
    SINGLE_BETA,
    Settings,
    make_job,
    repository,
    retain_fault,
    write_configs,
    write_trajectory,
)

ROOT = Path(__file__).parents[1]
TASKS = [f"{part}" for part in ("regurgitation", "knowledge")]


def load(path):
    return yaml.safe_load(path.read_text())


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_configs_differ_from_the_examples_only_in_paths_seed_and_beta(at_root, tmp_path):
    configs = write_configs(Settings(out=tmp_path, seed=7), ROOT)
    for name, example in (
        ("memorised", "memorise.yml"),
        ("retrained", "memorise.yml"),
        ("over", "npo_over.yml"),
        ("under", "npo_under.yml"),
        ("single", "npo_over.yml"),
    ):
        ours, theirs = load(configs[name]), load(ROOT / "examples" / example)
        moved = {"base_model", "output_dir", "dataset_prepared_path", "datasets", "unlearn", "seed"}
        if name in ("over", "under"):  # which checkpoints are kept
            moved |= {"save_strategy", "save_steps", "save_total_limit"}
        assert {k: v for k, v in ours.items() if k not in moved} == {
            k: v for k, v in theirs.items() if k not in moved
        }
        assert ours["seed"] == 7 and Path(ours["output_dir"]) == tmp_path / name
        assert all(Path(d["path"]).parent == tmp_path / "data" for d in ours["datasets"])
    over, under, single = (load(configs[n]) for n in ("over", "under", "single"))
    assert over["unlearn"]["forget"].pop("beta") < SINGLE_BETA
    assert under["unlearn"]["forget"].pop("beta") > SINGLE_BETA
    assert single["unlearn"]["forget"].pop("beta") == SINGLE_BETA
    # Same start, data and order, else the merge means nothing.
    assert under | {"output_dir": 0} == over | {"output_dir": 0}
    assert load(configs["retrained"])["datasets"][0]["path"].endswith("retrain.jsonl")
    ties = load(configs["ties"])
    assert [Path(m["model"]) for m in ties["models"]] == [
        tmp_path / "over" / "merged",
        tmp_path / "under" / "merged",
    ]


def test_paths_inside_the_working_folder_stay_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    configs = write_configs(Settings(out=Path("out/demo")), ROOT)
    assert load(configs["over"])["base_model"] == "out/demo/memorised"


def model(**cells):
    kept = {f"retain_task{t}_{k}": 0.9 for t in (1, 2, 3) for k in TASKS}
    lost = {f"forget_task{t}_{k}": 0.0 for t in (1, 2, 3) for k in TASKS}
    return {"name": "over", "cells": kept | lost | cells, "collapse": {"collapsed": False}}


def test_gate_looks_at_retain_cells_only():
    assert retain_fault(model()) is None
    assert "retain_task2_knowledge" in retain_fault(model(retain_task2_knowledge=0.05))
    # five cells at .4 and one at .9: mean .483
    low = {f"retain_task{t}_{k}": 0.4 for t in (1, 2, 3) for k in TASKS}
    low["retain_task1_knowledge"] = 0.9
    assert "0.48" in retain_fault(model(**low))
    babbling = model() | {"collapse": {"collapsed": True, "reasons": ["repeats"]}}
    assert retain_fault(babbling) is None


def test_gate_ignores_cells_without_rows():
    assert retain_fault(model(retain_task1_knowledge=None)) is None


def test_trajectory_goes_from_the_original_over_checkpoints_to_the_end(tmp_path):
    """Steps 0 and 20 come from the parents' scores, step 9 from those on the way; 9 < 20 as
    numbers though not as text."""

    def scored(name, value):
        metrics = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")
        return {"name": name} | dict.fromkeys(metrics, value)

    for run in ("over", "under"):
        for step in (9, 20):
            (tmp_path / run / f"checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "eval").mkdir()
    parents = [scored("original", 0.1), scored("over", 0.8), scored("under", 0.7)]
    between = [scored("over@9", 0.5), scored("under@9", 0.4)]
    for name, models in (("parents", parents), ("results", between)):
        (tmp_path / "eval" / f"{name}.json").write_text(json.dumps({"models": models}))
    points = json.loads(write_trajectory(tmp_path).read_text())
    assert [(p["run"], p["step"], p["scores"]["mia_auc"]) for p in points] == [
        ("over", 0, 0.1),
        ("over", 9, 0.5),
        ("over", 20, 0.8),
        ("under", 0, 0.1),
        ("under", 9, 0.4),
        ("under", 20, 0.7),
    ]


def test_outside_a_checkout_the_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("axolotl_unlearn.jobs.demo.__file__", str(tmp_path / "a" / "b" / "run.py"))
    with pytest.raises(UnlearnError, match="checkout"):
        repository()


def test_out_that_cannot_be_written_is_named(at_root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnlearnError, match="--out"):
        make_job(Settings(out=tmp_path / "file" / "demo"))


@pytest.mark.slow
def test_small_job_from_end_to_end(monkeypatch, tmp_path):
    """Every real command on a handful of rows; too little training, so the gate must close."""
    from rich.console import Console

    from axolotl_unlearn.jobs.demo import report_demo, run_demo

    monkeypatch.chdir(ROOT)
    sizes = Sizes(
        stories=2,
        pii=2,
        facts_forget=12,
        facts_retain=4,
        nonmembers=12,
        general=4,
        background=12,
        passes=1,
        background_per_pass=12,
    )
    console = Console(file=(tmp_path / "screen.txt").open("w"))
    settings = Settings(out=tmp_path / "demo", full=True, sizes=sizes)
    results = run_demo(settings, console)
    names = [m["name"] for m in results["models"]]
    assert names == ["original", "over", "under", "single", "retrained"]
    assert "has lost the retain set" in results["gate"]
    assert results["stages"]["merged"]["state"] == "left out"

    forced = Settings(out=tmp_path / "demo", full=True, force=True, sizes=sizes)
    results = run_demo(forced, console)
    states = {name: stage["state"] for name, stage in results["stages"].items()}
    # The scores on the way come after the merge, because both write into one folder.
    assert states.pop("merged") == states.pop("eval") == states.pop("path") == "done"
    assert set(states.values()) == {"reused"}
    trajectory = json.loads((tmp_path / "demo" / "trajectory.json").read_text())
    assert {point["run"] for point in trajectory} == {"over", "under"} and len(trajectory) >= 6
    assert results["gate"] is None and results["seconds"] > 0
    written = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert [m["name"] for m in written["models"]] == [
        *("original", "over", "under", "merged", "single", "retrained")
    ]
    for scored in written["models"]:
        assert len(scored["cells"]) == 12 and 0 <= scored["mia_auc"] <= 1
    page = report_demo(forced, results)
    assert "merged" in page.read_text("utf-8")
    assert "kept from an earlier run" in (tmp_path / "screen.txt").read_text()
