"""The study over seeds: which stages it has, what it chooses on, and its arithmetic."""

import json
import math
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from conftest import count

from axolotl_unlearn.errors import UnlearnError
from research.__main__ import research
from research.analysis.paper import COLUMNS
from research.analysis.seeds import interval_over_seeds
from research.analysis.study import page, read_seed, study_tables, told_apart
from research.harness.stages import Plan
from research.studies.reproduce import (
    EPOCHS,
    FOUR,
    OTHERS,
    PAIRS,
    SINGLES,
    SIZES,
    plan_seed,
)

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("original", "over", "under", "fixed", "tuned", "tuned_four", "single", "retrained")


def _scores(aggregate):
    return {**dict.fromkeys(COLUMNS, 0.5), "aggregate": aggregate, "cells": {}}


def _seed(**aggregates):
    return {name: _scores(aggregates.get(name, 0.5)) for name in ORDER}


def test_halves_are_large_enough():
    """At least 80 members, 80 non-members and 80 utility questions a half."""
    assert min(SIZES.facts_forget, SIZES.nonmembers, SIZES.general) // 2 >= 80


def test_stages_of_a_seed(tmp_path):
    out = tmp_path / "seed-7"
    plan = plan_seed(out, 7, trials=5)
    stages = {stage.name: stage for stage in plan.job.stages}
    assert set(stages) >= {"over", "under", "merged", "tuned", "reproduction", "test", "retrained"}
    assert set(stages) >= {"tuned_four", "pairs", *SINGLES, *OTHERS}
    assert not {"eval", "path", "single"} & set(stages)
    assert {"--data", "--trials"} <= set(stages["tuned"].command())
    for name, half in (("validation", "validation"), ("test", "test")):
        command = stages[name].command()
        assert command[command.index("--data") + 1] == str(out / "data" / half)
    words = [word.partition("=")[0] for word in command if "=" in word]
    assert words == [
        "original", "over", "under", "fixed", "tuned", "tuned_four", *SINGLES, "retrained",
    ]  # fmt: skip
    tables = stages["reproduction"].command()
    assert tables[tables.index("--over") + 1] == str(out / "over")
    # The other runs differ from the over-run in what their name says alone.
    over = yaml.safe_load((out / "configs" / "over.yml").read_text())
    under = yaml.safe_load((out / "configs" / "under.yml").read_text())
    assert over["num_epochs"] == under["num_epochs"] == EPOCHS
    assert [Path(entry["path"]).name for entry in over["datasets"]] == [
        "forget.jsonl", "retain.jsonl", "replay.jsonl",
    ]  # fmt: skip
    assert over["datasets"][2]["type"] == over["datasets"][1]["type"]
    for name, changes in (SINGLES | OTHERS).items():
        config = yaml.safe_load((out / "configs" / f"{name}.yml").read_text())
        shift = changes.get("seed", 0)
        assert config["seed"] == over["seed"] + shift == 7 + shift
        expected = over["unlearn"]["forget"] | {k: v for k, v in changes.items() if k != "seed"}
        assert config["unlearn"]["forget"] == expected
        same = set(over) - {"output_dir", "save_strategy", "save_steps", "save_total_limit", "seed"}
        for key in same - {"unlearn"}:
            assert config[key] == over[key]
    # The twins are the parents with another seed.
    for name, parent in (("over", over), ("under", under)):
        assert OTHERS[f"{name}_twin"]["beta"] == parent["unlearn"]["forget"]["beta"]
    runs = {"over", "under", *SINGLES, *OTHERS}
    assert {name for pair in PAIRS for name in pair.split("+")} <= runs and set(FOUR) <= runs

    assert over["unlearn"]["pairing"] == {"retain_per_forget": 2}
    assert over["unlearn"]["data"] == {"eos": "retain"}
    options = {"sizes": replace(SIZES, replay=0), "retain_per_forget": 1, "forget_eos": True}
    plan_seed(tmp_path / "other", 7, **options)
    for name in ("over", "under", "single_a"):
        other = yaml.safe_load((tmp_path / f"other/configs/{name}.yml").read_text())
        assert len(other["datasets"]) == 2
        assert not {"pairing", "data"} & set(other["unlearn"])


@pytest.mark.parametrize(("tables", "pairs"), [(True, False), (False, True), (False, False)])
def test_what_a_seed_leaves_out(tmp_path, tables, pairs):
    plan = plan_seed(tmp_path / "seed-7", 7, tables=tables, pairs=pairs)
    few = {stage.name for stage in plan.job.stages}
    assert few >= {"tuned", "tuned_four", "test", *SINGLES}
    assert few & {"reproduction", "pairs", *OTHERS} == (
        ({"reproduction"} if tables else set()) | ({"pairs", *OTHERS} if pairs else set())
    )


def test_equal_chances(tmp_path):
    """The single runs are searched like the merges, four runs are compared like four parents."""
    plan = plan_seed(tmp_path / "seed-7", 7, equal=True, held_out=2, trials=5)
    stages = {stage.name: stage for stage in plan.job.stages}
    for name, run in (("tuned_a", "single_a"), ("tuned_b", "single_b")):
        words = stages[name].command()
        assert words[words.index("--parents") + 1] == str(tmp_path / "seed-7" / run)
        assert words[words.index("--parents") + 2] == "--base"
        assert words[words.index("--trials") + 1] == "5"
    named = [w.partition("=")[0] for w in stages["validation"].command() if "=" in w]
    assert set(named) == {"original", *FOUR, "tuned_a", "tuned_b"}
    test = [w.partition("=")[0] for w in stages["test"].command() if "=" in w]
    assert set(test) >= {"tuned_a", "tuned_b", "retrained_twin", "retrained"}
    twin, retrained = (
        yaml.safe_load((tmp_path / "seed-7" / "configs" / f"{name}.yml").read_text())
        for name in ("retrained_twin", "retrained")
    )
    assert twin["seed"] == 1007 and retrained["seed"] == 7
    assert twin["datasets"] == retrained["datasets"]
    assert stages["data"].settings[1]["held_out"] == 2


def test_best_of_four_is_chosen_on_validation(tmp_path):
    """On validation under is the best of four, tuned_b of two searches; test differs."""
    names = ("over", "under", "single_a", "single_b", "tuned_a", "tuned_b", "retrained")
    for half, values in (
        ("validation", (0.5, 0.9, 0.6, 0.7, 0.6, 0.8, 0.9)),
        ("test", (0.9, 0.4, 0.3, 0.2, 0.7, 0.1, 0.95)),
    ):
        models = [{"name": n, **_scores(v)} for n, v in zip(names, values, strict=True)]
        (tmp_path / half).mkdir()
        (tmp_path / half / "results.json").write_text(json.dumps({"models": models}))
    found = {name: model["aggregate"] for name, model in read_seed(tmp_path).items()}
    assert found["best_of_four"] == 0.4 and found["single"] == 0.2
    assert found["tuned_single"] == 0.1 and "single_a" not in found


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


def test_results_say_the_command_with_its_options(tmp_path, monkeypatch):
    """They said the seeds alone: nobody could tell a held-out study from another. No path of a
    machine, no number of processes."""

    def halves(plan, results):
        models = [{"name": name, **_scores(0.5)} for name in (*ORDER, *SINGLES)]
        for half in ("validation", "test"):
            (plan.out / half).mkdir()
            (plan.out / half / "results.json").write_text(json.dumps({"models": models}))

    monkeypatch.setattr(Plan, "run", halves)
    words = ["--seeds", "3 4", "--held-out", "2", "--equal", "--tables", "0", "--jobs", "1"]
    done = CliRunner().invoke(research, ["reproduce", "--out", str(tmp_path), *words])
    assert done.exit_code == 0, done.output
    command = json.loads((tmp_path / "results.json").read_text())["command"]
    assert shlex.split(command)[:2] == ["research", "reproduce"]
    assert set(shlex.split(command)[2:]) == {*words[:-2]} and "--jobs" not in command
    assert "--tables 0" in command and "--seeds '3 4'" in command


def test_interval_over_seeds_by_hand():
    """.7, .8, .9: mean .8, standard error .1/sqrt(3), t(2) = 4.3027: half width .2484."""
    mean, half = interval_over_seeds([0.7, 0.8, 0.9])
    assert mean == pytest.approx(0.8)
    assert half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    assert math.isnan(interval_over_seeds([0.7])[1])


def test_differences_are_paired_by_seed():
    """tuned - fixed = +.1 and 0: mean .05, above in one seed, level in the other."""
    seeds = {0: _seed(tuned=0.9, fixed=0.8), 1: _seed(tuned=0.6, fixed=0.6)}
    seeds[0]["over"]["intervals"] = {"aggregate": [0.4, 0.62]}
    text = page("Who wins, on the test half", seeds, {})
    assert "## Who wins, on the test half (2 seeds)" in text and "Holm" in text
    assert "| 0 | 0.500 | 0.500 (0.40-0.62) |" in text
    assert "| fixed | +0.050 ± 0.635 | 1 of 2 (level in 1) |" in text
    assert "| 1 | 0.500 | 0.500 | 0.500 | 0.600 | 0.600 | 0.500 | 0.500 | 0.500 |" in text


def test_four_parents_in_some_seeds_only():
    seeds = {0: _seed(tuned_four=0.7), 1: _seed()}
    del seeds[1]["tuned_four"]
    text = page("a", seeds, {})
    assert any(line.startswith("| tuned_four | ") and "of 1" in line for line in text.splitlines())
    assert "| tuned_four (1 seed) | 0.700 |" in text
    assert "| 1 | 0.500 | 0.500 | 0.500 | 0.500 | 0.500 |  | 0.500 | 0.500 |" in text


def test_told_apart_by_holm():
    """p .01, .02, .03 of three: .01 <= .05/3 is found, .02 <= .05/2 too, .03 <= .05/1 too;
    with .03 for the second, .03 > .025 ends it although the third is .03 <= .05."""

    def model(**ps):
        # Sums of others are not tests of their own.
        return {
            "distance": {
                n: {"p": p, "value": 0.1, "interval": [-0.096, 0.296]}
                for n, p in {**ps, "aggregate": 0.0}.items()
            }
        }

    assert told_apart(model(mia_auc=0.02, utility=0.01, forget_task1_knowledge=0.03)) == [
        "utility", "mia_auc", "forget_task1_knowledge",
    ]  # fmt: skip
    assert told_apart(model(mia_auc=0.03, utility=0.01, forget_task1_knowledge=0.03)) == ["utility"]
    assert told_apart(model(mia_auc=0.03, utility=0.02, forget_task1_knowledge=0.5)) == []
    seeds = {3: _seed()}
    seeds[3]["over"] |= model(mia_auc=0.001, utility=0.5)
    seeds[3]["under"] |= model(mia_auc=0.5)
    row = next(r for r in study_tables(seeds)["told"]["rows"])
    assert row[:4] == [3, "", "1: mia_auc +0.10", "none"]
    # A standard error of .1, two tests: (2.2414 + .8416) x .1; one test: (1.9600 + .8416) x .1.
    found = study_tables(seeds)["detectable"]
    assert found["columns"] == ["figure", "over", "under"]
    assert sorted(found["rows"]) == [["mia_auc", "0.31", "0.28"], ["utility", "0.31", ""]]
    seeds[3]["over"]["distance"]["utility"]["interval"] = [0.0, 0.0]
    assert [row[0] for row in study_tables(seeds)["detectable"]["rows"]] == ["mia_auc"]


def test_page_of_pairs():
    def scores(aggregate):
        return {"aggregate": aggregate, "mia_auc": 0.5}

    def seed(value):
        row = {
            "pair": ["over", "under"],
            "cosine": 0.1,
            "initialisation": 0.6,
            "sign_conflict": 0.4,
            "merges": {"mean": scores(value)},
        }
        return {"runs": {"over": scores(value - 0.2)}, "pairs": [row]}

    seeds = {0: _seed(), 1: _seed()}
    text = page("a", seeds, {}, {0: seed(0.6), 1: seed(0.8)})
    assert "## Which pairs merge well (2 seeds" in text
    assert "| over | 0.500 (0.50) |" in text
    assert "| over x under | 0.10 | 0.60 | 0.40 | 0.700 (0.50) |" in text


#: `reproduce` as a process of its own, small: what is killed is the real job with its fork server.
SMALL = """
import sys
from pathlib import Path
from research.worlds.generate import Sizes
from research.studies import reproduce as job

job.EPOCHS = 1
sizes = Sizes(stories=2, pii=2, facts_forget=40, facts_retain=4, nonmembers=40, general=8,
              background=2, passes=1, background_per_pass=1, replay=4)
job.reproduce(Path(sys.argv[1]), [7], tables=0, trials=1, sizes=sizes)
"""


@pytest.mark.slow
def test_killed_with_kill_9_reproduce_goes_on(tmp_path):
    """The whole study on a small scale, its process killed once the merges are searched: called
    again it keeps what had ended and has the numbers of a study that nobody killed."""

    def start(name: str) -> subprocess.Popen:
        with (tmp_path / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-c", SMALL, str(tmp_path / name)],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text()

    assert start("whole").wait(800) == 0, said("whole")[-3000:]
    killed = start("killed")
    while ": started, log" not in said("killed").partition("search the best merge")[2]:
        assert killed.poll() is None, said("killed")[-3000:]
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    before = said("killed")
    assert start("killed").wait(800) == 0, said("killed")[-3000:]
    count("runs killed and resumed")
    done = set(re.findall(r"\d\d (.*): done", before))
    kept = set(re.findall(r"\d\d (.*): unchanged, kept", said("killed")))
    assert "memorise" in done and done == kept
    numbers = [
        json.loads((tmp_path / name / "results.json").read_text())["seeds"]
        for name in ("whole", "killed")
    ]
    count("differences found", int(numbers[0] != numbers[1]))
    assert numbers[0] == numbers[1]
