"""`make tofu`: its stages and configs, one small run of its own commands, closeness by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from axolotl_unlearn.errors import UnlearnError
from research.analysis.attacked import TITLES
from research.analysis.tofu import (
    attack_share,
    closeness,
    published_tables,
    strongest_attack,
    tables,
)
from research.studies.tofu import METHODS, TofuSizes, plan_tofu

ROOT = Path(__file__).parents[2]
NAMES = "Ada Bo Cy Di Ed Flo Gus Hal Ida Jo Kit Lee Mia Ned Oz Pam".split()


def row(number: int, side: str) -> dict:
    """A question of TOFU's fields; no text of TOFU is needed."""
    name = f"{NAMES[number % 16]} {side}{number}"
    return {
        "question": f"Where was {name} born?",
        "answer": f"{name} was born in town {number} by the river.",
        "paraphrased_question": f"In which place did {name} come into the world?",
        "paraphrased_answer": f"The birthplace of {name} is town {number}.",
        "perturbed_answer": [f"The birthplace of {name} is city {n}." for n in (7, 8, 9)],
    }


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """TOFU's files with made-up rows, and the demo's tiny OLMo with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    home = tmp_path_factory.mktemp("tofu")
    tofu, tiny = home / "tofu", ROOT / "examples" / "tiny-olmo"
    tofu.mkdir()
    write(tofu / "forget10_perturbed.jsonl", [row(n, "F") for n in range(400)])
    retain = [row(n, "R") for n in range(60)]
    write(tofu / "retain_perturbed.jsonl", retain[:20])
    write(tofu / "retain90.jsonl", [{k: r[k] for k in ("question", "answer")} for r in retain])
    for name in ("real_authors", "world_facts"):
        short = [
            {k: row(n, name)[k] for k in ("question", "answer", "perturbed_answer")}
            for n in range(3)
        ]
        write(tofu / f"{name}_perturbed.jsonl", short)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    model.save_pretrained(home / "base")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(home / "base")
    return home


SMALL = TofuSizes(
    split="forget01", retain=8, heldout=6, rows=4, attacked=20, new_tokens=8,
    epochs=(2, 1), methods=("over", "under", "merged", "match"), requests=2,
)  # fmt: skip


def test_every_method_has_a_faultless_config(home, tmp_path):
    """Stages, order and configs of the whole job with requests; the model is not there yet."""
    from axolotl_unlearn.checks.report import check

    sizes = TofuSizes(
        split="forget01", forget=9, retain=8, heldout=6, requests=3, rows=4
    )  # fmt: skip
    plan = plan_tofu(tmp_path, home / "tofu", home / "base", bf16=False, sizes=sizes)
    stages = {stage.name: stage for stage in plan.job.stages}
    assert {"original-merged", "retrained-merged", "merged", "match-merged", "eval"} <= set(stages)
    assert {f"score-{name}" for name in METHODS} <= set(stages)
    assert "depth" not in stages and "relearn-match" not in stages  # nine rows are of one author
    assert "score-retrained" in stages["score-npo"].needs
    assert "score-retrained-after-2" in stages["score-request-2-after-2"].needs
    assert "request-1-merged" in stages["request-2"].needs
    other = TofuSizes(
        split="forget01", forget=9, retain=8, heldout=6, rows=4, epochs=(3, 2), methods=("npo",)
    )
    again = plan_tofu(tmp_path / "b", home / "tofu", home / "base", bf16=False, sizes=other)
    assert stages["data"].settings == again.job.stages[0].settings  # requests keep the models
    stages["data"].action()
    stages["requests"].action()
    data = {path.stem: path.read_text().splitlines() for path in (tmp_path / "data").glob("*")
            if path.suffix}  # fmt: skip
    assert [len(data[n]) for n in ("forget", "retain", "heldout", "holdout")] == [9, 8, 6, 4]
    assert data["request-1"] + data["request-2"] + data["request-3"] == data["forget"]
    assert len({*data["forget"], *data["retain"], *data["heldout"], *data["holdout"]}) == 27
    after = tmp_path / "data" / "after-2" / "forget01_perturbed.jsonl"
    assert after.read_text().splitlines() == [data["forget"][i] for i in (0, 1, 3, 4)]  # of 6
    for name in ("original", "retrained", *METHODS, "match", "request-2"):
        path = tmp_path / "configs" / f"{name}.yml"
        faults, *_ = check(path)
        unmade = ("base_model", "teacher", "original/merged", "start")  # what earlier stages make
        assert all(any(word in fault for word in unmade) for fault in faults), (name, faults)
    retrained = yaml.safe_load((tmp_path / "configs" / "retrained.yml").read_text())
    assert [Path(e["path"]).stem for e in retrained["datasets"]] == ["retain"]
    match = yaml.safe_load((tmp_path / "configs" / "match.yml").read_text())
    assert Path(match["base_model"]).name == "start"  # halfway to the teacher
    assert Path(match["unlearn"]["retain"][1]["reference"]["model"]).parts[-2:] == (
        "original", "merged",
    )  # fmt: skip
    lume = yaml.safe_load(Path("examples/smollm2/match.yml").read_text())
    for key in ("lora_r", "lora_alpha", "learning_rate", "micro_batch_size", "warmup_ratio",
                "optimizer", "adam_beta2", "lr_scheduler", "max_grad_norm", "adapter"):  # fmt: skip
        assert match[key] == lume[key], key
    assert match["unlearn"]["pairing"] == lume["unlearn"]["pairing"]
    assert match["unlearn"]["level"] | {"heldout": ""} == lume["unlearn"]["level"] | {"heldout": ""}
    theirs = {(e["objective"], e.get("weight")) for e in lume["unlearn"]["forget"]}
    assert {(e["objective"], e.get("weight")) for e in match["unlearn"]["forget"]} == theirs


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (TofuSizes(split="forget20"), "forget01, forget05, forget10"),
        (TofuSizes(methods=("merged", "over")), "merged together with over and under"),
        (TofuSizes(methods=("nppo",)), "npo, simnpo"),
        (TofuSizes(attacked=4), "at least 5 rows"),
        (TofuSizes(forget=4), "at least 5 rows"),
    ],
)
def test_bad_options_name_the_cure(home, tmp_path, sizes, says):
    with pytest.raises(UnlearnError, match=says):
        plan_tofu(tmp_path, home / "tofu", home / "base", bf16=False, sizes=sizes)


def test_too_few_rows_to_hold_out(home, tmp_path):
    plan = plan_tofu(tmp_path, home / "tofu", home / "base", bf16=False,
                     sizes=TofuSizes(retain=20))  # fmt: skip
    with pytest.raises(UnlearnError, match="60 rows, 20 to learn and 230 to hold out"):
        next(s for s in plan.job.stages if s.name == "data").action()


def test_a_small_p_is_not_rounded_to_nothing(tmp_path):
    from research.studies.tofu import read_scores

    scores = {"forget_quality,none": 1.0024e-11, "auc,none": 0.123456789, "n,none": float("nan")}
    (tmp_path / "scores_1.json").write_text(json.dumps({"results": {"tofu": scores}}))
    found = {"forget_quality": 1.0024e-11, "auc": 0.123457, "n": None}
    assert read_scores(tmp_path) == found


def run_here(words: list[str]) -> None:
    """A command of the job in this process: its start alone would take twenty seconds."""
    from axolotl.cli.merge_lora import do_cli as merge_lora
    from axolotl.cli.train import do_cli as train

    from axolotl_unlearn.cli import unlearn
    from research.__main__ import research
    from research.analysis import attacked

    _, command, *rest = words
    if rest[0] == attacked.__name__:  # python -m
        attacked.main([str(word) for word in rest[1:]])
    elif command == "unlearn" or rest[0] == "research":
        group, rest = (unlearn, rest) if command == "unlearn" else (research, rest[1:])
        done = CliRunner().invoke(group, rest, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    else:
        {"train": train, "merge-lora": merge_lora}[command](config=rest[0], bf16=False)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_small_run_of_all_kinds_of_stages(home, tmp_path, monkeypatch, forks):
    """Each stage's own command in the job's order, its output there, the tables from the scores."""
    monkeypatch.setattr(sys, "argv", ["axolotl"])
    plan = plan_tofu(tmp_path, home / "tofu", home / "base", bf16=False, sizes=SMALL)
    for stage in plan.job.stages:
        words = stage.command() if callable(stage.command) else stage.command
        if stage.before:
            stage.before()
        if words is not None:
            run_here(words)
        if stage.action:
            stage.action()
        assert stage.output.exists(), stage.name
    content = json.loads((tmp_path / "eval" / "results.json").read_text())
    models = content["seeds"]["42"]
    assert set(models) == {
        *("retrained", "original", *SMALL.methods),
        *(f"{m}-after-{n}" for n in (1, 2) for m in ("retrained", f"request-{n}")),
    }
    assert models["retrained"]["forget_quality"] is None
    for name, model in models.items():
        if not name.startswith("retrained"):
            assert 0 <= model["forget_quality"] <= 1
        assert 0 <= model["auc_min_k_plus_0.4"] <= 1 and 0 <= model["forget_broken_outputs"] <= 1
    watched = json.loads((tmp_path / "match" / "level.json").read_text())["watched"]
    assert "zlib" in watched[0]  # answers are judged, there is no document
    found = tables(content)
    assert [r[0] for r in found["ours"]["rows"]] == ["retrained", "original", *SMALL.methods]
    attacked = tmp_path / "data" / "attacks"
    members = (attacked / "member.jsonl").read_text().splitlines()
    asked = json.loads((tmp_path / "data" / "forget.jsonl").read_text().splitlines()[0])
    assert json.loads(members[0]) == {
        "prompt": f"Question: {asked['question']}\nAnswer:", "document": f" {asked['answer']}",
        "author": "member 0",
    }  # fmt: skip
    others = (attacked / "nonmember.jsonl").read_text().splitlines()
    assert len(members) == len(others) == 20 and not {*members} & {*others}
    rows = [json.loads(x) for x in (attacked / "forget.jsonl").read_text().splitlines()]
    assert [r["document"] for r in rows] == ["author 0", "author 1"] * 20
    first = json.loads(members[0])
    assert rows[0]["input"] + " " + rows[0]["output"] == first["prompt"] + first["document"]
    assert rows[2]["paraphrased_question"] == (
        "Question: In which place did Jo F361 come into the world?\nAnswer:"
    )
    held = dict(found["held"]["rows"])
    assert len(held) == 6 and all(held.values())
    relearned = json.loads((tmp_path / "eval" / "relearn-forget-match.json").read_text())["rows"][1]
    gap = relearned["above_control"]["recalled"]["value"]
    assert held[next(name for name in held if name.startswith("relearned"))].startswith(
        f"{gap:+.3f} ("
    )
    inside = json.loads((tmp_path / "eval" / "inside-match.json").read_text())["views"]["states"]
    assert held["AUC of hidden states, 90 % interval"].startswith(
        f"{inside['auc']:.2f}, *retrained* {inside['control']:.2f}: "
    )
    retrained, *_, match = found["attacked"]["rows"]
    assert retrained[0] == "retrained" and match[0] == "match" and len(match) == 8
    assert found["closeness"]["rows"][0][1] == "1.000" and len(found["requests"]["rows"]) == 4


@pytest.mark.slow
def test_muse_chunks_train_by_the_example(home, tmp_path, monkeypatch):
    """Texts longer than `sequence_len` are several rows, all labelled; two real steps."""
    from axolotl.cli.train import do_cli as train
    from safetensors.torch import load_file

    monkeypatch.setattr(sys, "argv", ["axolotl"])
    config = yaml.safe_load((ROOT / "examples" / "muse" / "forget.yml").read_text())
    config |= {"base_model": str(home / "base"), "output_dir": str(tmp_path / "npo")}
    config |= {"sequence_len": 48, "max_steps": 2, "micro_batch_size": 2, "bf16": False}
    config |= {"gradient_accumulation_steps": 1, "dataset_num_proc": 0}
    config["dataset_prepared_path"] = str(tmp_path / "prepared")
    for side, entry in zip(("F", "R"), config["datasets"], strict=True):
        text = " ".join(row(n, side)["answer"] for n in range(9))
        entry["path"] = str(tmp_path / f"{side}.jsonl")
        write(tmp_path / f"{side}.jsonl", [{"text": text}, {"text": text.lower()}])
    (tmp_path / "muse.yml").write_text(yaml.safe_dump(config))
    train(config=str(tmp_path / "muse.yml"))
    weights = load_file(tmp_path / "npo" / "adapter_model.safetensors")
    assert max(float(w.abs().max()) for n, w in weights.items() if "lora_B" in n) > 0


# ---------------------------------------------------------------- upstream


def test_the_checks_of_a_checkout_run_on_the_copied_tasks(tmp_path, monkeypatch, capsys):
    """A checkout's own settings decide: a rule of its ruff that our folders break is a failure."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("upstream", ROOT / "eval_tasks" / "upstream.py")
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    (tmp_path / "lm_eval" / "tasks").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    template = tmp_path / "templates" / "new_yaml_task" / "README.md"
    template.parent.mkdir(parents=True)
    template.write_text("# Task-name\n\n### Paper\n\n### Leaderboard\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the tools are then those that are installed
    folders = upstream.copy(tmp_path, ["tofu", "muse"])
    changed = tmp_path / ".github" / "outputs" / "tasks_all_changed_and_modified_files.txt"
    names = [Path(line).name for line in changed.read_text().split()]
    assert names == ["tofu.yaml", *(f"muse_{n}.yaml" for n in
                     ("knowmem_forget", "knowmem_retain", "privleak", "verbmem"))]  # fmt: skip
    found = {name: state for name, state, _ in upstream.lint(tmp_path, folders, tmp_path / "none")}
    assert found["ruff check"] == found["ruff format"] == "ok"
    assert found["check-yaml"] in ("ok", "skipped")
    assert [why for _, _, why in upstream.readme(tmp_path, folders)] == ["Leaderboard"] * 2
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 30\n")
    found = {name: state for name, state, _ in upstream.lint(tmp_path, folders, tmp_path / "none")}
    assert found["ruff format"] == "failed"
    assert not upstream.reachable()
    # Its own tests: which tasks they take, and where those have their data.
    (where := tmp_path / "tests").mkdir()
    (where / "test_tasks.py").write_text(
        "import yaml\nfrom pathlib import Path\nfrom .utils import new_tasks\n\n\n"
        "def test_TestNewTasksElseDefault():\n"
        "    assert [n[:4] for n in new_tasks()] == ['tofu', *['muse'] * 4]\n"
        "    text = Path('lm_eval/tasks/muse/muse_verbmem.yaml').read_text()\n"
        "    loaded = yaml.safe_load(text[text.index('metadata:') :])\n"
        f"    assert loaded['metadata'] == {{'data_dir': '{tmp_path / 'b'}', 'version': 1.0}}\n"
    )
    ((_, state, why),) = upstream.tests(tmp_path, folders, {"muse": tmp_path / "b"})
    assert (state, "--data tofu=FOLDER" in why) == ("skipped", True)
    data = {"tofu": tmp_path / "a", "muse": tmp_path / "b"}
    ((_, state, why),) = upstream.tests(tmp_path, folders, data)
    assert (state, why[:8]) == ("ok", "1 passed"), why
    with pytest.raises(SystemExit, match="lm_eval/tasks does not exist"):
        upstream.copy(tmp_path / "templates", ["tofu"])


# ---------------------------------------------------------------- closeness


def test_closeness_by_hand():
    """AUC .9 before, .5 retrained: .6 is a quarter of the way back from the ideal, .3 is half of
    the span beyond it, .95 worse than before. HM(.75, .5) = .6; utility .3 of .4, or .4 of .3."""
    assert attack_share(0.6, 0.9, 0.5) == pytest.approx(0.75)
    assert attack_share(0.3, 0.9, 0.5) == pytest.approx(0.5)
    assert attack_share(0.95, 0.9, 0.5) == 0.0
    assert math.isnan(attack_share(0.5, 0.5, 0.5))
    found = closeness(0.2, [0.75, 0.5, math.nan], 0.3, 0.4)
    assert found == {"forget_quality": 0.2, "privacy": pytest.approx(0.6),
                     "utility": pytest.approx(0.75)}  # fmt: skip
    assert closeness(None, None, 0.4, 0.3)["utility"] == pytest.approx(0.75)
    assert closeness(None, [], None, 0.3) == dict.fromkeys(found)


def test_tables_of_ours_and_of_published_ones_use_the_same_closeness():
    attacks = ("auc_loss", "auc_zlib_ratio", "auc_min_k_0.4", "auc_min_k_plus_0.4")
    models = {
        "retrained": dict.fromkeys(attacks, 0.5) | {"model_utility": 0.4},
        "original": dict.fromkeys(attacks, 0.9) | {"model_utility": 0.4, "forget_quality": 1e-9},
        "npo": dict.fromkeys(attacks, 0.6) | {"model_utility": 0.3, "forget_quality": 0.2},
    }
    assert strongest_attack(models["original"] | {"auc_loss": 0.05}) == 0.05
    rows = tables({"seeds": {"1": models}})["closeness"]["rows"]
    assert rows[1] == ["original", "1e-09", "0.000", "1.000"]
    assert rows[2] == ["npo", "0.200", "0.750", "0.750"]
    two = tables({"seeds": {"1": models, "2": models}})["closeness"]["rows"]
    assert two[-1] == ["npo", *("0.200 ± 0.000", "0.750 ± 0.000", "0.750 ± 0.000")]
    # Bold where both seeds show it; "ref." only one of them.
    found = [
        {name: {"attacks": {attack: {"auc": auc} for attack in TITLES}} for name in models}
        for auc in (0.4, 0.6)
    ]
    for number, seed in enumerate(found):
        for attack in ("loss", "reference"):
            shown = attack == "loss" or number == 0
            seed["npo"]["attacks"][attack]["from_retrained"] = {"equivalent": shown}
    seeds = {"seeds": {"1": models, "2": models}, "attacked": dict(enumerate(found))}
    retrained, _, npo = tables(seeds)["attacked"]["rows"]
    plain = retrained[1]  # .5 and t(1) = 12.7 times .1
    assert retrained == ["retrained", *[plain] * 7] and plain.startswith("0.500 ± 1.27")
    assert npo == ["npo", f"**{plain}**", *[plain] * 6]
    published = {
        "retrained": {"a paper, 1B": 0.4},
        "rows": [{"source": "a paper", "base": "1B", "method": "NPO", "forget_quality": 0.2,
                  "utility": 0.3, "attack_shares": [0.75] * 4}],
    }  # fmt: skip
    (theirs,) = published_tables(published)["closeness"]["rows"]
    assert theirs == ["1B", "NPO", "a paper", "0.2", "0.75", "0.75"]
