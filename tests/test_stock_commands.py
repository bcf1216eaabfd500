"""The README's stock commands, one after another, through the real command lines (3 steps each).

The first is started as a user starts it; the others begin with what this process has imported.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def commands() -> list[str]:
    """The block of stock commands as the README has it, without comments."""
    block = next(
        b for b in re.findall(r"```bash\n(.*?)```", README, re.S) if "examples/memorise.yml" in b
    )
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like the repository root, so that ``out/`` stays out of the real one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "mergekit_configs", "eval_tasks"):
        (folder / name).symlink_to(ROOT / name)
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
def test_the_readme_chain(checkout, request):
    """Train three times, merge both adapters, merge the models, evaluate with lm_eval and by
    `axolotl unlearn eval`, make the page."""
    chain = commands()
    assert [c.split()[0] for c in chain] == (
        ["axolotl"] * 5 + ["mergekit-yaml", "axolotl", "lm_eval", "axolotl", "axolotl"]
    )
    run(chain[0], checkout, "--max-steps 3")
    request.getfixturevalue("forks")
    for command in chain[1:]:
        if command.startswith("axolotl train"):  # else it is replaced by `accelerate launch`
            run(command, checkout, "--max-steps 3 --launcher python")
        elif command.startswith("axolotl unlearn tasks register"):
            continue  # changes the installed lm-eval; tested with it in test_eval_*
        elif command.startswith("lm_eval"):
            short = "--limit 2 --gen_kwargs max_gen_toks=8 --output_path out/lm"
            run(command, checkout, f"--include_path eval_tasks {short}")  # not registered here
        elif command.startswith("axolotl unlearn eval"):
            run(
                command,
                checkout,
                "--limit 4 --max-gen-toks 8 --resamples 50 --min-members 2 --quiet",
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
    assert [model["name"] for model in models] == ["original", "over", "merged"]
    assert "<html" in (checkout / "out/eval/report.html").read_text("utf-8")
