"""Commands on the pretended accelerator: what they write is what a processor makes them write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import eval_model
import pretend_device
import pytest
from attack_models import make_lab, make_members
from click.testing import CliRunner
from merging_models import run_mergekit

from axolotl_unlearn.cli import unlearn

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
    """Two models that have learnt rows, and their merge by mergekit."""
    home = tmp_path_factory.mktemp("home")
    sides = eval_model.made_up_rows(4)
    eval_model.write_folder(home / "data", sides, eval_model.documents_of(sides), general=6)
    for seed, name in enumerate(("original", "other")):
        rows = [*sides["forget"], *sides["retain"]] if seed else sides["retain"]
        eval_model.train_model(home / name, rows, steps=40)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": str(home / n), "parameters": {"weight": 0.5}} for n in ("original", "other")],
        "dtype": "float32",
    }
    (home / "merge.yml").write_text(json.dumps(recipe))
    run_mergekit("mergekit-yaml", home / "merge.yml", home / "merged", "--quiet")
    return home


def test_eval_with_texts_and_a_stock_merge(home, tmp_path):
    models = [home / name for name in ("original", "merged")]
    same(tmp_path, "eval", *models, "--data", home / "data", "--min-members", 1, "--max-gen-toks", 12, "--with-text", "--quiet")


MEMBERS = ["--attacks", "all", "--data"]
@pytest.mark.parametrize("name, words", [
    ("quantise", ["--schemes", "int8,int4,nf4", "--group", 32, "--max-new-tokens", 16]),
    ("relearn", ["--source", "forget", "--rows", 6, "--steps", "2,4", "--lr", 1e-3, "--max-new-tokens", 16]),
    ("prompt", ["--max-new-tokens", 16, "--limit", 4]),
])
def test_attack(name, words, tmp_path):
    lab = make_lab()
    same(tmp_path, "attack", name, lab.unlearned, "--control", lab.control, "--data", lab.data, *words)


@pytest.mark.parametrize("kind", ["membership", "inside"])
def test_members(kind, tmp_path):
    place = make_members()
    same(tmp_path, "attack", kind, place / "original", "--control", place / "retrained", "--data", place / "data", "--limit", 12)
