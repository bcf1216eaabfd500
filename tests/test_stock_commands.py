"""The commands of examples/README.md, one after another, by the real command lines (3 steps each).

The first is started as a user starts it; the others begin with what this process has imported.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from research import demo

ROOT = Path(__file__).parents[1]


def commands() -> list[str]:
    """The commands of the demo and of lm_eval as the page has them, without comments."""
    return list(map(shlex.join, demo.commands()))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like the repository root, so that ``out/`` stays out of the real one; of
    the rows that are trained on it has some, each read once."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("mergekit_configs", "eval_tasks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("forget", "retain", "world"):
        path = folder / "examples/demo" / f"{name}.jsonl"
        path.write_text("".join(path.read_text("utf-8").splitlines(True)[:40]))
    path = folder / "examples/memorise.yml"
    path.write_text(path.read_text("utf-8").replace("num_epochs: 24", "num_epochs: 1"))
    return folder


def run(command: str, cwd: Path, extra: str = "") -> str:
    scripts = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    words = shlex.split(f"{command} {extra}")
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{command} {extra}\n{said[-4000:]}"
    return said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_chain_of_the_demo(checkout, request):
    """Train four times, merge both adapters, merge the models, delete by a request, evaluate by
    `axolotl-unlearn eval` and with lm_eval, make the page."""
    chain = commands()
    assert [c.split()[0] for c in chain] == (
        ["axolotl"] * 6 + ["mergekit-yaml"] + ["axolotl-unlearn"] * 4 + ["lm_eval"]
    )
    run(chain[0], checkout, "--max-steps 3 --launcher accelerate")  # Axolotl's default
    request.getfixturevalue("forks")
    for command in chain[1:]:
        if command.startswith("axolotl train"):
            run(command, checkout, "--max-steps 3")
        elif command.startswith("lm_eval"):
            short = "--limit 2 --gen_kwargs max_gen_toks=8 --output_path out/lm"
            run(command, checkout, short)
        elif command.startswith("axolotl-unlearn eval"):
            run(
                command,
                checkout,
                "--limit 4 --max-gen-toks 8 --min-members 2 --quiet",
            )
        else:
            run(command, checkout)
    state = sorted((checkout / "out/over").glob("checkpoint-*/trainer_state.json"))[-1]
    logs = [x for x in json.loads(state.read_text())["log_history"] if "forget/npo" in x]
    assert len(logs) == 3 and {"retain/nll", "retain/kl"} <= set(logs[0])
    results = json.loads(next((checkout / "out/lm").rglob("results_*.json")).read_text())
    assert {"semeval_unlearn", "semeval_unlearn_tasks", "semeval_unlearn_mia"} <= set(
        results["results"]
    )
    assert (checkout / "out/merged/model.safetensors").stat().st_size > 1e6
    models = json.loads((checkout / "out/eval/results.json").read_text())["models"]
    names = ["original", "over", "under", "merged", "request", "retrained"]
    assert [model["name"] for model in models] == names
    assert "<html" in (checkout / "out/eval/report.html").read_text("utf-8")
    # what `make demo` looks for, of each of these commands
    assert len(demo.STEPS) == len(chain) - 1
    assert all((checkout / demo.OUT / makes).exists() for _, makes in demo.STEPS.values())
