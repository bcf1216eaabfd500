"""The package as a user gets it: built, checked, installed away from a checkout, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from conftest import tiny_llama
from eval_model import made_up_rows
from requests_folder import write_lines
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{said[-4000:]}"
    return said


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_wheel_and_source_are_fit_to_publish(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = ZipFile(wheel).namelist()
    for needed in ("presets/zjuklab-paper.yml", "checks/axolotl_options.yml",
                   "templates/npo.yml", "examples/tofu/forget.yml",
                   "eval_tasks/semeval_unlearn/semeval_unlearn_tasks.yaml"):  # fmt: skip
        assert f"axolotl_unlearn/{needed}" in names
    top = {name.split("/")[0] for name in names}
    assert top == {"axolotl_unlearn", next(name for name in top if name.endswith(".dist-info"))}
    with tarfile.open(source) as archive:
        parts = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"constraints", "tests", "docs", "Makefile"} <= parts and "research" not in parts


@pytest.fixture(scope="module")
def place(built, tmp_path_factory) -> Path:
    """An environment with the wheel; all else it finds in the one that runs the tests."""
    place = tmp_path_factory.mktemp("away")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=place)
    python = place / "env/bin/python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=place)
    paths = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place)
    (Path(paths.strip()) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place


@pytest.mark.slow
def test_every_step_away_from_a_checkout(place):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-olmo")
    tokenizer.save_pretrained(place / "base")
    tiny_llama(vocabulary=len(tokenizer)).save_pretrained(place / "base")
    for side, rows in made_up_rows(1).items():
        write_lines(place / f"{side}.jsonl", rows)
    python, ours = place / "env/bin/python", place / "env/bin/axolotl-unlearn"
    where = run(python, "-c", "import axolotl_unlearn as a; print(a.__file__)", cwd=place)
    assert where.strip().startswith(str(place / "env"))
    sides = ("--forget", "forget.jsonl", "--retain", "retain.jsonl")
    run(ours, "init", "--base-model", "base", *sides, cwd=place)
    run(ours, "examples", "shown", cwd=place)
    said = run(ours, "--json", "check", "shown/memorise.yml", cwd=place)
    assert json.JSONDecoder().raw_decode(said)[0]["ready"]
    assert (place / "shown/README.md").is_file()
    axolotl = (python, "-m", "axolotl.cli.main", "train", "unlearn.yml", "--launcher", "python")
    run(*axolotl, "--max-steps", 2, "--sequence-len", 128, cwd=place)
    short = ("--max-gen-toks", 4, "--min-members", 0, "--quiet")
    evaluate = (ours, "eval", "base", "out/unlearned", "--data", ".", "--out", "out/eval", *short)
    run(*evaluate, cwd=place)
    results = json.loads((place / "out/eval/results.json").read_text())
    assert [model["name"] for model in results["models"]] == ["base", "unlearned"]
    assert "Report: " in run(ours, "report", "out/eval", cwd=place)
    assert (place / "out/eval/report.html").stat().st_size > 10_000
    names = ("Ada", "Bo", "Cy")
    rows = [{"id": n, "instruction": f"{n}?", "input": "", "output": f"{n} dives."} for n in names]
    write_lines(place / "rows.jsonl", rows)
    tuned = ("--base-model", "base", "--data", "rows.jsonl", "--output-dir", "out/unlearned")
    run(ours, "init", "--kind", "request", *tuned, cwd=place)
    said = run(ours, "request", "new", "finetune.yml", "--where", "id=Ada", "--out", "requests/1",
               cwd=place)  # fmt: skip
    assert "1 row to forget, 2 of 2 others to keep" in said
