"""The driver: configs derived from the examples, the gate, and one small job from end to end."""

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import count
from report_fixture import make_results
from rich.console import Console
from safetensors.torch import load_file

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from research.harness import stages
from research.harness.stages import Evaluate, Make, Plan, Run, Train, change
from research.studies.demo import SINGLE_BETA, plan_demo, retain_fault, write_trajectory
from research.worlds.generate import Sizes

ROOT = Path(__file__).parents[2]
TASKS = [f"{part}" for part in ("regurgitation", "knowledge")]


def load(path):
    return yaml.safe_load(path.read_text())


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_configs_differ_from_the_examples_only_in_paths_seed_and_beta(at_root, tmp_path):
    plan_demo(tmp_path, seed=7, full=True)
    configs = {path.stem: path for path in (tmp_path / "configs").glob("*.yml")}
    for name, example in (
        ("memorised", "memorise"),
        ("retrained", "memorise"),
        ("over", "npo_over"),
        ("under", "npo_under"),
        ("single", "npo_over"),
    ):
        ours, theirs = load(configs[name]), load(ROOT / stages.example_file(ROOT, example))
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
    # An exact deletion is another draw of its judge.
    again = load(configs["exact"]) | {"output_dir": 0}
    assert again == load(configs["retrained"]) | {"output_dir": 0, "seed": 1007}
    merged = load(configs["merged"])
    assert [Path(m["model"]) for m in merged["models"]] == [
        tmp_path / "over" / "merged",
        tmp_path / "under" / "merged",
    ]
    assert Path(merged["base_model"]) == tmp_path / "memorised"


@pytest.mark.parametrize("full", [False, True])
def test_the_demo_scores_what_it_makes(full, tmp_path):
    """Without --full a model was scored that no stage had made."""
    plan = plan_demo(tmp_path, full=full)
    made = {stage.name for stage in plan.job.stages}
    assert set(plan.table["eval"].models.values()) <= made


def test_paths_inside_the_working_folder_stay_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plan_demo(Path("out/demo"))
    over = load(tmp_path / "out/demo/configs/over.yml")
    assert over["base_model"] == "out/demo/memorised"
    # The tiny model is the repository's, wherever one stands.
    base = load(tmp_path / "out/demo/configs/memorised.yml")["base_model"]
    assert (tmp_path / base / "tokenizer.json").is_file()


def test_stages_wait_for_what_they_name(tmp_path):
    """Built by hand: two runs from one base, their merge, and a model that is there already."""
    outside = tmp_path / "outside"
    table = {
        "base": Train("memorise", "examples/tiny-olmo"),
        "run": Train("npo_over", "base", {"unlearn.forget.beta": 0.2}, merged=True),
        "raw": Train("npo_under", "base", {"datasets.1.path": Path("other/rows.jsonl")}),
        "eval": Evaluate({"original": "base", "run": "run", "raw": "raw", "old": str(outside)}),
    }
    plan = Plan("a job", tmp_path / "out", table, seed=3, threads=2)
    made = {stage.name: stage for stage in plan.job.stages}
    assert list(made) == ["base", "run", "run-merged", "raw", "eval"]
    assert made["run"].needs == made["raw"].needs == ["base"]
    assert made["run-merged"].needs == ["base", "run"]
    assert made["eval"].needs == ["base", "run-merged", "raw"]
    command = made["eval"].command()
    out = stages.near(tmp_path / "out")
    for word in (f"original={out}/base", f"run={out}/run/merged", f"raw={out}/base+{out}/raw"):
        assert word in command
    assert f"old={outside}" in command
    config = load(tmp_path / "out" / "configs" / "raw.yml")
    assert config["datasets"][1]["path"] == "other/rows.jsonl" or Path(
        config["datasets"][1]["path"]
    ) == Path("other/rows.jsonl")
    assert load(tmp_path / "out" / "configs" / "run.yml")["unlearn"]["forget"]["beta"] == 0.2


def test_a_job_counts_its_own_attacks(at_root, tmp_path):
    """Their files lie beside the evaluation; page, table and verdict left them out before."""
    from axolotl_unlearn.attacks.probes import Scores
    from axolotl_unlearn.attacks.results import curve, figures_row, save

    ids = [f"row{i}" for i in range(40)]
    before, after = (
        Scores(ids=ids, documents=ids, recalled=found * 10, probability=found * 10)
        for found in ([1.0, 0, 0, 0], [1.0, 1, 1, 0])
    )
    rows = [figures_row("0 steps", 0, before, before), figures_row("10 steps", 10, after, before)]
    attack = {"attack": "relearn", "title": "Relearning", "model": "merged", "rows": rows}

    def scores(plan):
        save(tmp_path / "eval", attack, [curve("relearn", "merged", "step", rows, "recalled")])
        depth = {"merged": {"score": 0.4, "sentence": "merged is erased to .4"}}
        write_json(tmp_path / "eval" / "depth.json", [])
        write_json(tmp_path / "eval" / "uds.json", {"models": depth})
        write_json(tmp_path / "eval" / "results.json", make_results(("original", "merged")))

    console = Console(file=io.StringIO(), width=200)
    table = {"eval": Make(scores, "eval/results.json")}
    plan = Plan("a job", tmp_path, table, seed=3, threads=1, console=console)
    assert not any("verdict" in model for model in plan.show()["models"])  # facts alone
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "relearn on merged" in page and "merged is erased to .4" in page
    assert "comes back" in console.file.getvalue()


def test_results_of_another_schema_have_no_verdict_beside_attacks(tmp_path):
    def scores(plan):
        view = {"title": "t", "auc": 0.9, "told": {"auc": 0.9, "p": 0.001}, "picked": 0}
        inside = {"attack": "inside", "title": "t", "model": "match", "views": {"v": view}}
        write_json(tmp_path / "eval" / "inside-match.json", inside)
        write_json(tmp_path / "eval" / "results.json", {"schema": "tofu", "seeds": {}})

    plan = Plan("make tofu", tmp_path, {"eval": Make(scores, "eval/results.json")}, seed=1)
    assert plan.run()["schema"] == "tofu"
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 1


def test_a_job_that_fails_after_its_evaluation_leaves_results(at_root, tmp_path):
    def scores(plan):
        (tmp_path / "eval").mkdir(exist_ok=True)
        (tmp_path / "eval" / "results.json").write_text('{"schema": 2, "models": [{"name": "m"}]}')

    # Of the models of an earlier run: not counted while that attack has not run again.
    view = {"title": "t", "auc": 0.9, "told": {"auc": 0.9, "p": 0.001}, "picked": 0}
    old = {"attack": "inside", "title": "t", "model": "m", "views": {"v": view}}
    write_json(tmp_path / "eval" / "inside-m.json", old)

    def attack(code):
        words = [sys.executable, "-c", f"open({str(tmp_path / 'attack')!r}, 'w'); exit({code})"]
        return Run(lambda plan: words, "attack", needs=("eval",))

    def plan(code):
        table = {
            "eval": Make(scores, "eval/results.json"),
            "attack": attack(code),
            "later": Make(lambda plan: None, "eval/inside-m.json", needs=("attack",)),
        }
        return Plan("a job", tmp_path, table, seed=3, threads=1)

    with pytest.raises(UnlearnError, match="exit code 3"):
        plan(3).run()
    left = json.loads((tmp_path / "results.json").read_text())
    assert left["models"] == [{"name": "m"}] and left["seed"] == 3
    assert list(left["stages"]) == ["eval"] and left["unfinished"] == ["attack", "later"]
    assert "unfinished" not in plan(0).run()
    assert "unfinished" not in json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").unlink()
    with pytest.raises(UnlearnError, match="exit code 3"):
        Plan("a job", tmp_path, {"eval": Run(attack(3).words, "nothing")}, threads=1).run()
    assert not (tmp_path / "results.json").exists()  # none were scored


RESUMABLE = """
import sys
from pathlib import Path
from research.worlds.generate import Sizes
from research.studies.demo import TINY, data_stage
from research.harness.stages import Plan, Train
sizes = Sizes(stories=2, pii=2, facts_forget=12, facts_retain=4, nonmembers=12, general=4,
              background=2, passes=1, background_per_pass=1, replay=4)
table = {"data": data_stage(0, sizes), "run": Train("memorise", TINY, {"max_steps": 20})}
Plan("a job", Path(sys.argv[1]), table, seed=0, resumable=True, threads=1).job.run()
"""


@pytest.mark.slow
def test_a_training_run_of_a_killed_job_goes_on(at_root, tmp_path):
    """Killed after a checkpoint, called again: it goes on from there, to the same weights."""
    outs = [tmp_path / name for name in ("whole", "killed")]
    commands = [[sys.executable, "-c", RESUMABLE, str(out)] for out in outs]
    subprocess.run(commands[0], check=True)
    killed = subprocess.Popen(commands[1])
    while not (outs[1] / "run" / "checkpoint-6").exists():
        assert killed.poll() is None
        time.sleep(0.002)  # later, and a fast machine is at the last step
    killed.kill()
    killed.wait()
    subprocess.run(commands[1], check=True)
    count("runs killed and resumed")
    logs = [(out / "logs" / "run.log").read_text() for out in outs]
    # Begun anew it would show step 1, unless the bar skips steps on a busy machine.
    assert min(int(n) for n in re.findall(r" ([1-9]\d*)/20 \[", logs[1])) >= 3
    assert all(" 20/20 [" in log for log in logs)
    one, other = (load_file(out / "run" / "model.safetensors") for out in outs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not [*outs[0].glob("run/checkpoint-*"), *outs[1].glob("run/checkpoint-*")]


def test_weights_and_rows_from_outside_are_part_of_the_key(tmp_path):
    """Other weights under the same path, or other rows, make another result."""
    from research.harness.runner import stage_key

    outside, data = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    data.mkdir()
    weights, rows = outside / "model.safetensors", data / "forget.jsonl"
    keys = set()
    for content in ("a", "b"):
        for row in ("c", "dd"):
            weights.write_text(content * 9)
            rows.write_text(row)
            plan = Plan("a job", tmp_path / "out", {"eval": Evaluate([str(outside)])}, data=data)
            (stage,) = plan.job.stages
            keys.add(stage_key(stage, stage.command(), []))
    assert len(keys) == 4


def test_changes_reach_nested_keys_and_lists():
    config = {"a": 1, "l": [{"x": 1}, {"x": 2}]}
    for key, value in {"a": None, "b.c": 3, "l.1.x": 5, "l.2": {"x": 6}}.items():
        change(config, key, value)
    assert config == {"b": {"c": 3}, "l": [{"x": 1}, {"x": 5}, {"x": 6}]}
    with pytest.raises(UnlearnError, match="3 entries"):
        change(config, "l.7", 1)


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
    parents = [scored("original", 0.1), scored("over", 0.8), scored("under", 0.7)]
    between = [scored("over@9", 0.5), scored("under@9", 0.4)]
    for name, models in (("parents", parents), ("path", between)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"models": models}))
    plan = Plan("a job", tmp_path, {})
    points = json.loads(write_trajectory(plan).read_text())
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
    monkeypatch.setattr(stages, "__file__", str(tmp_path / "a" / "b" / "stages.py"))
    with pytest.raises(UnlearnError, match="checkout"):
        stages.repository()


def test_out_that_cannot_be_written_is_named(at_root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnlearnError, match="--out"):
        plan_demo(tmp_path / "file" / "demo")


@pytest.mark.slow
def test_small_job_from_end_to_end(monkeypatch, tmp_path, forks):
    """Every real command on a handful of rows; too little training, so the gate must close."""
    from rich.console import Console

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
    out = tmp_path / "demo"
    results = plan_demo(out, full=True, sizes=sizes, console=console).run()
    names = [m["name"] for m in results["models"]]
    assert names == ["original", "over", "under", "single", "exact", "retrained"]
    assert "has lost the retain set" in results["left_out"]["merged"]
    assert results["stages"]["merged"]["state"] == "left out"

    plan = plan_demo(out, full=True, force=True, sizes=sizes, console=console)
    results = plan.show()
    states = {name: stage["state"] for name, stage in results["stages"].items()}
    assert states.pop("merged") == states.pop("eval") == "done"
    assert set(states.values()) == {"kept"}
    trajectory = json.loads((out / "trajectory.json").read_text())
    assert {point["run"] for point in trajectory} == {"over", "under"} and len(trajectory) >= 6
    assert results["left_out"] == {} and results["seconds"] > 0
    written = json.loads((out / "results.json").read_text())
    assert [m["name"] for m in written["models"]] == [
        *("original", "over", "under", "merged", "single", "exact", "retrained")
    ]
    for scored in written["models"]:
        assert len(scored["cells"]) == 12 and 0 <= scored["mia_auc"] <= 1
    assert "merged" in (out / "report.html").read_text("utf-8")
    said = (tmp_path / "screen.txt").read_text()
    assert "kept from an earlier run" in said and f"Page: {out / 'report.html'}" in said


def test_the_audit_list_lies_beside_the_results_and_in_the_page(tmp_path):
    """The demo's page lacked it: the list stayed in the evaluation's folder."""
    from rich.console import Console

    write = (
        "import json, pathlib; out = pathlib.Path('eval'); out.mkdir(exist_ok=True); "
        "(out / 'audit.jsonl').write_text(json.dumps({'model': 'm', 'document': 'd', 'p': .1}));"
        "(out / 'results.json').write_text(json.dumps({'schema': 2, 'models': [{'name': 'm'}]}))"
    )
    write = write.replace("'eval'", repr(str(tmp_path / "eval")))
    stage = Run(lambda plan: [sys.executable, "-c", write], output="eval/results.json")
    plan = Plan("job", tmp_path, {"eval": stage}, seed=0, console=Console(quiet=True))
    page = plan.report(plan.run()).read_text()
    assert (tmp_path / "audit.jsonl").is_file() and "Document by document" in page
