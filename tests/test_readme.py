"""Every command of the README: run here on tiny data, or by the test named beside it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_requests_new import TRAIN, people, tuned, write
from test_stock_commands import ROOT, run

from axolotl_unlearn.checks.report import check
from axolotl_unlearn.cli import unlearn

README = (ROOT / "README.md").read_text("utf-8")
#: What the commands that run here are given besides, so that they take seconds.
SMOKE = {
    "axolotl-unlearn request new": "--steps 2",
    "axolotl-unlearn request run": "--way retrain",
    "axolotl-unlearn init": "",
    "axolotl train unlearn.yml": "--max-steps 2 --launcher python",
}
#: Run elsewhere: whole installations, the demo, this suite.
ELSEWHERE = {
    "git clone": "tests/test_wheel.py",
    "cd axolotl-unlearn": "tests/test_wheel.py",
    "pip install .": "tests/test_wheel.py",
    "make demo": "tests/test_stock_commands.py",
    "make test": "tests/each_file.py",
}


def commands() -> list[str]:
    """Of all bash blocks, a line each, without comments."""
    text = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S)).replace("\\\n", " ")
    lines = [part for line in text.splitlines() for part in line.partition(" #")[0].split("&&")]
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def begins(command: str, known: dict[str, str]) -> str | None:
    return next((start for start in known if command.startswith(start)), None)


def test_every_command_is_run_by_a_test():
    assert [command for command in commands() if not begins(command, SMOKE | ELSEWHERE)] == []
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The folder of a reader: a fine-tuned model with its config, and rows of either side."""
    name, folder = "out/finetuned", tmp_path_factory.mktemp("reader")
    tuned(folder, TRAIN[:18], people(100, 40), name, output_dir=name, num_epochs=1)
    for side in ("forget", "retain"):
        rows = [{"id": f"{side}{i}", "input": "Who?", "output": f"{side} {i}"} for i in range(4)]
        write(folder / f"{side}.jsonl", rows)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_a_reader(home, forks):
    for command in commands():
        if start := begins(command, SMOKE):
            run(command, home, SMOKE[start])
    assert (home / "requests/2026-001/record.json").is_file()
    assert (home / "out/unlearned/adapter_model.safetensors").is_file()


def test_what_the_tutorial_has_one_write(tmp_path, monkeypatch):
    """Its program makes the rows it shows, and its configs are ready."""
    page = (ROOT / "docs/tutorial.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.S)
    assert (tmp_path / "data/forget.jsonl").read_text().startswith(shown)
    finetune = re.search(r"```yaml\n(base_model.*?)```", page, re.S)[1]
    (tmp_path / "finetune.yml").write_text(finetune)
    assert check(tmp_path / "finetune.yml")[0] == []
    shutil.copytree(ROOT / "examples/tiny-olmo", tmp_path / "out/finetuned")
    (tmp_path / "out/finetuned/model.safetensors").touch()
    words = "init --base-model out/finetuned --forget data/forget.jsonl --retain data/retain.jsonl"
    assert f"axolotl-unlearn {words}" in page
    assert CliRunner().invoke(unlearn, words.split()).exit_code == 0
    assert check(tmp_path / "unlearn.yml")[0] == []


def test_what_is_said_of_the_demo_is_in_its_file():
    runs = json.loads((ROOT / "research/results/demo.json").read_text("utf-8"))["runs"]
    said = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert all(one["merged_above_both"] and not one["merged"]["below_gate"] for one in runs)
    assert {one["merged"]["verdict"] for one in runs} == {"under-forgets"}
    assert f"In all {len(runs)} trainings of five fresh seeds" in said
    assert len({one["seed"] for one in runs}) == 5
    broken = [one for one in runs if "broken" in (one["over"]["verdict"], one["under"]["verdict"])]
    assert f"*over* is *broken* in {len(broken)}" in said
    best = [max(one[name]["aggregate"] for name in ("over", "under")) for one in runs]
    gains = [100 * (one["merged"]["aggregate"] - at) for one, at in zip(runs, best, strict=True)]
    assert f"by {min(gains):.0f} to {max(gains):.0f} hundredths" in said
