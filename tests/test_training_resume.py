"""Killed anywhere, a run that goes on ends as if nothing had happened, to the last bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_train_axolotl import ROOT, config, stage, train  # noqa: F401

from axolotl_unlearn.data.prepared import drop_half_written
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training import resume
from axolotl_unlearn.training.resume import choose_checkpoint, why_broken

STEPS = 6
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
RESUMING = {"auto_resume_from_checkpoints": True}
#: Every way in which weights and reference come about; phases and dual
#: variables are in test_train_axolotl.
MODES = {
    "lora": {},
    "starting adapter": {"lora_model_dir": True},
    "full": {"adapter": None},
    "full, cached": {"adapter": None, "reference": "cached"},
    "accumulation": {"gradient_accumulation_steps": 2},
}


class Killed(BaseException):
    """Stands for the signal: nothing in Axolotl or here catches it."""


def run(stage, name, mode, **changes):  # noqa: F811
    given = dict(MODES[mode])
    block = config(stage, "x")["unlearn"]
    block |= {key: given.pop(key) for key in ("reference",) if key in given}
    if given.pop("lora_model_dir", None):
        given["lora_model_dir"] = str(stage / "begun")
    return train(stage, name, unlearn=block, **SAVING, **given, **changes, max_steps=STEPS)


def damage(checkpoint: Path, rng: random.Random) -> str:
    """As a kill leaves it: one file cut anywhere, and all that is written after it missing."""
    order = ["*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
    cut = rng.randrange(len(order))
    for number, pattern in enumerate(order):
        for path in checkpoint.glob(pattern):
            if number > cut:
                path.unlink()
            elif number == cut:
                os.truncate(path, rng.randrange(path.stat().st_size))
    return order[cut]


def differences(one: Path, two: Path) -> list[str]:
    """Weights, optimiser, scheduler and generators of the last step, and every logged loss."""
    found = []
    a, b = (folder / f"checkpoint-{STEPS}" for folder in (one, two))
    for path in a.glob("*.safetensors"):
        x, y = load_file(path), load_file(b / path.name)
        found += [f"{path.name} {n}" for n in x if not torch.equal(x[n], y[n])]
        assert x and x.keys() == y.keys()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        x, y = (torch.load(folder / name, weights_only=False) for folder in (a, b))
        found += [name] if not same(x, y) else []
    x, y = (json.loads((f / "trainer_state.json").read_text())["log_history"] for f in (a, b))
    clock = {"train_runtime", "train_samples_per_second", "tokens/train_per_sec_per_gpu"}
    for first, second in zip(x, y, strict=True):
        found += [
            f"log of step {first['step']}: {key}"
            for key in first
            if first[key] != second.get(key) and key not in clock and "per_sec" not in key
        ]
    return found


def same(x, y) -> bool:
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    return bool((x == y).all()) if hasattr(x, "dtype") else x == y


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_a_random_step_in_a_random_place(stage, monkeypatch, mode):  # noqa: F811
    """In this process: the last checkpoint is cut as if under way, the one before is used."""
    from axolotl_unlearn.training.trainer import UnlearnTrainer

    if mode == "starting adapter" and not (stage / "begun").exists():
        train(stage, "begun", max_steps=2)
    rng = random.Random(f"{mode} {time.time_ns() if 'FUZZ_CASES' in os.environ else 0}")
    whole = run(stage, f"whole {mode}", mode)
    last = rng.randint(2, STEPS - 1)
    real = UnlearnTrainer.training_step

    def dying(self, *args, **options):
        if self.state.global_step == last:
            raise Killed
        return real(self, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(UnlearnTrainer, "training_step", dying)
        run(stage, f"killed {mode}", mode)
    out = stage / f"killed {mode}"
    cut = damage(out / f"checkpoint-{last}", rng)
    said = []
    with monkeypatch.context() as patch:  # Axolotl's set-up of logging takes away caplog's handler
        patch.setattr(resume.LOG, "warning", lambda text, *values: said.append(text % values))
        run(stage, f"killed {mode}", mode, **RESUMING)
    assert f"going on from {out}/checkpoint-{last - 1}." in said[0], cut
    found = differences(whole, out)
    assert found == []


@pytest.mark.slow
def test_killed_with_kill_9(stage, forks):  # noqa: F811
    """A process of its own, killed at a time that nobody chose."""
    whole = stage / "whole lora"
    if not whole.exists():
        run(stage, whole.name, "lora")
    path = stage / "nine.yml"
    cfg = config(stage, "nine", **SAVING, **RESUMING, max_steps=STEPS)
    path.write_text(yaml.safe_dump(cfg))
    command = [sys.executable, "-m", "axolotl.cli.train", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for wanted in (3,) if "FUZZ_CASES" not in os.environ else (1, 3, 5):
        with (stage / "nine.log").open("a") as log:
            process = subprocess.Popen(
                command, cwd=stage, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            while not (stage / "nine" / f"checkpoint-{wanted}").exists():
                assert process.poll() is None, (stage / "nine.log").read_text()[-3000:]
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    done = subprocess.run(command, cwd=stage, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = differences(whole, stage / "nine")
    assert found == []


def test_tokenised_rows_that_were_saved_in_part_go(tmp_path):
    """As a kill leaves them: Axolotl reads every folder that holds a file and ends at the missing
    dataset_info.json, at each later start."""
    whole = {"data-00000-of-00001.arrow": "x", "state.json": "{}", "dataset_info.json": "{}"}
    folders = {
        "a" * 32: whole,
        "b" * 32: {name: text for name, text in whole.items() if name != "dataset_info.json"},
        "c" * 32: whole | {"dataset_info.json": '{"fe'},
        "d" * 32: {"data-00000-of-00001.arrow": "x"},
        "e" * 32: {},
        "cache": {"other": "x"},
    }
    for name, files in folders.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    drop_half_written(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "a" * 32, "e" * 32, "cache",
    }  # fmt: skip


# --- half-written checkpoints --------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """What Trainer writes, without a trainer."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint-10"
    folder.mkdir()
    save_file({"a": torch.arange(50.0), "b": torch.ones(3)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.arange(40.0), "step": 3}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10, "log_history": []}))
    (folder / "config.json").write_text("{}")
    assert why_broken(folder) is None
    return folder


def test_a_file_cut_anywhere_is_seen(saved, tmp_path):
    """Every length of every file but its own."""
    copy = tmp_path / "checkpoint-10"
    shutil.copytree(saved, copy)
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        for size in range(0, len(content), max(1, len(content) // 40)):
            path.write_bytes(content[:size])
            assert "was cut off while it was written" in why_broken(copy), (path.name, size)
        path.write_bytes(content)
    (copy / "trainer_state.json").unlink()
    assert why_broken(copy) == "was cut off while it was written (trainer_state.json is missing)"


def test_the_last_whole_checkpoint_is_taken(saved, tmp_path, caplog):
    for number in (5, 10, 20, 30):
        shutil.copytree(saved, tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-30" / "trainer_state.json").unlink()
    os.truncate(tmp_path / "checkpoint-20" / "optimizer.pt", 100)
    cfg = {"output_dir": str(tmp_path), "auto_resume_from_checkpoints": True}
    choose_checkpoint(cfg)
    assert cfg["resume_from_checkpoint"] == str(tmp_path / "checkpoint-10")
    assert "checkpoint-20 was cut off while it was written (optimizer.pt)" in caplog.text
    named = {"resume_from_checkpoint": str(tmp_path / "checkpoint-30")}
    with pytest.raises(UnlearnError, match=r"is missing\); use .*checkpoint-10"):
        choose_checkpoint(named)
    with pytest.raises(UnlearnError, match=r"checkpoint-40` does not exist; use .*checkpoint-10"):
        choose_checkpoint({"resume_from_checkpoint": str(tmp_path / "checkpoint-40")})
    for number in (5, 10):
        (tmp_path / f"checkpoint-{number}" / "optimizer.pt").unlink()
    cfg = {"output_dir": str(tmp_path), "auto_resume_from_checkpoints": True}
    choose_checkpoint(cfg)
    assert not cfg["auto_resume_from_checkpoints"] and "from the start" in caplog.text
    assert "has no optimizer (`save_only_model`?)" in caplog.text


def test_a_checkpoint_of_older_code_counts_answers_by_kind(stage):  # noqa: F811
    """It ended with a TypeError."""
    out = run(stage, "older", "lora")
    for step in range(4, STEPS + 1):
        shutil.rmtree(out / f"checkpoint-{step}")
    (counts,) = (out / "checkpoint-3").rglob("reference-*.json")
    assert json.loads(counts.read_text()) > 0
    counts.write_text('{"logp": 2, "states": 1}')
    run(stage, "older", "lora", **RESUMING)
    assert (out / f"checkpoint-{STEPS}").is_dir()
