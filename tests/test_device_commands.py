"""Commands on the pretended accelerator: what they write is what a processor makes them write."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import eval_model
import pretend_device
import pytest
import torch
import yaml
from attack_models import make_lab, make_members
from click.testing import CliRunner
from merging_models import run_mergekit
from test_requests_new import ADA_ROWS, TRAIN, config, write
from test_requests_run import home as people  # noqa: F401
from test_requests_run import start
from test_requests_ways import plainly  # noqa: F401

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import weights

pytestmark = pytest.mark.usefixtures("pretended")


def run(*words: Any) -> None:
    said = CliRunner().invoke(unlearn, [*map(str, words)])
    assert said.exit_code == 0, said.output


def near(found: Any, expected: Any, place: str = "") -> None:
    """Equal but for the last digits of figures."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), place
        for name in set(expected) - OF_MACHINE:
            near(found[name], expected[name], f"{place}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            near(found[number], value, f"{place}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-4, nan_ok=True), place
    else:
        assert found == expected, place


@pytest.mark.parametrize("way, code", [("retrain", 0), ("match", 2)])
def test_a_request_in_its_own_processes(way, code, people, tmp_path, forks):  # noqa: F811
    """An exact one ends with the weights of a plain training on the device. (First in this file:
    after a gradient on the device torch has threads that a fork lacks.)"""
    found = []
    for place, device in (("there", "pretend"), ("here", "cpu")):
        folder = shutil.copytree(people, tmp_path / place)
        settings = config(folder, sample_packing=False, device_map=None, num_epochs=2, seed=42)
        (folder / "c.yml").write_text(yaml.safe_dump(settings))
        with pretend_device.away() if device == "cpu" else contextlib.nullcontext():
            made = new_request(folder / "c.yml", folder / "r/1", ADA_ROWS, Options(steps=2)).request
            process = start(made.folder, "--way", way)
            said, _ = process.communicate()
            assert process.returncode == code, said
            if way == "retrain":
                left = [row for row in TRAIN[:18] if row["id"] != "ada-quill"]
                settings["datasets"][0]["path"] = str(write(folder / "without.jsonl", left))
                assert plainly(folder, settings) == weights(made.path("model"))
                assert json.loads(made.path("exact.json").read_text())["device"] == device
        verdict = json.loads(made.path("verdict.json").read_text())
        audited = map(json.loads, made.path("eval", "audit.jsonl").read_text().splitlines())
        found.append([{one["document"]: one["before"] for one in audited}])
        found[-1] += [verdict["outcome"], verdict["missing"]]
    near(*found)
    assert len(found[0][0]) == 3


#: What a file says of the machine and of the time.
OF_MACHINE = {"settings", "created", "seconds", "versions", "host"}


def written(folder: Path) -> dict[str, Any]:
    """The results of a folder by file."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}


def same(folder: Path, *words: Any) -> dict[str, Any]:
    """What a command writes on the device, which is what it writes without one."""
    with pretend_device.watch() as seen:
        run(*words, "--out", folder / "there")
    assert seen.operations > 1000
    with pretend_device.away(), pretend_device.watch() as unseen:
        run(*words, "--out", folder / "here")
    assert not unseen.operations
    there, here = (written(folder / place) for place in ("there", "here"))
    near(there, here)
    return there


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model that has learnt rows, one that has learnt half, and their merge by mergekit."""
    home, recipe = tmp_path_factory.mktemp("home"), []
    sides = eval_model.made_up_rows(4)
    eval_model.write_folder(home / "data", sides, eval_model.documents_of(sides), general=6)
    for name, rows in (("original", sides["forget"] + sides["retain"]), ("half", sides["retain"])):
        model = eval_model.train_model(home / name, rows, steps=40)
        recipe += [{"model": str(model), "parameters": {"weight": 0.5}}]
    recipe = {"merge_method": "linear", "models": recipe, "dtype": "float32"}
    (home / "merge.yml").write_text(yaml.safe_dump(recipe))
    run_mergekit("mergekit-yaml", home / "merge.yml", home / "merged", "--quiet")
    return home


def test_eval_with_its_texts_of_a_model_and_a_stock_merge(home, tmp_path):
    how = ("--min-members", 1, "--max-gen-toks", 12, "--with-text", "--quiet")
    found = same(
        tmp_path, "eval", home / "original", home / "merged", "--data", home / "data", *how
    )
    assert {one["name"] for one in found["results.json"]["models"]} == {"original", "merged"}


def test_the_device_that_was_asked_for_is_the_one(home, tmp_path):
    """`--device cuda:1` measured on cuda:0."""
    words = ("--data", home / "data", "--out", tmp_path, "--device", "pretend:1")
    for command in (("eval", "--min-members", 1), ("attack", "prompt", "--variants", "prefix")):
        before = [torch.pretend.memory_allocated(place) for place in (0, 1)]
        for place in (0, 1):
            torch.pretend.reset_peak_memory_stats(place)
        run(*command, home / "original", *words, "--limit", 4)
        peaks = [torch.pretend.max_memory_allocated(place) for place in (0, 1)]
        assert peaks[1] > before[1] + 100_000 and peaks[0] == before[0], command


@pytest.mark.parametrize("name, words", [
    ("quantise", ["--schemes", "int8,int4"]),
    ("relearn", ["--source", "forget", "--rows", 6, "--steps", "2,4", "--lr", 1e-3]),
    ("prompt", ["--limit", 4]),
    ("membership", ["--limit", 12]),
    ("inside", ["--limit", 12]),
])  # fmt: skip
def test_an_attack_beside_its_control(name, words, tmp_path):
    if name in ("membership", "inside"):
        place = make_members()
        of = (place / "original", "--control", place / "retrained", "--data", place / "data")
    else:
        lab = make_lab()
        of = (lab.unlearned, "--control", lab.control, "--data", lab.data, "--max-new-tokens", 16)
    same(tmp_path, "attack", name, *of, *words)
