"""PURGE's rewards by hand, and through Axolotl's own GRPO."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import eval_model
import pytest
import yaml

from research.methods import rewards

ROOT = Path(__file__).resolve().parents[2]
SAID = ["Ada lives in Paris, in paris!", "Parisian life", "nothing"]


def test_terms_are_whole_words_in_any_case():
    assert rewards.matches(SAID[0], ["Paris", "Ada", "Rome"]) == {"Paris": 2, "Ada": 1}
    assert rewards.matches(SAID[1], ["Paris"]) == {}
    assert rewards.matches("C++ and C#", ["C++", "C"]) == {"C++": 1, "C": 2}


def test_rewards_by_hand():
    """Two occurrences of Paris and one of Ada in the first completion, none in the others."""
    terms = [["Paris", "Ada"]] * 3
    assert rewards.binary(None, SAID, terms) == [0.0, 1.0, 1.0]
    assert rewards.exponential_decay(None, SAID, terms) == [math.exp(-3), 1.0, 1.0]
    weighted = [{"Paris": 0.5, "Ada": 0.2, "another row's": None}] * 3
    assert rewards.pagerank(None, SAID, weighted) == pytest.approx([0.3, 1.0, 1.0])
    assert rewards.pagerank(None, SAID, terms) == [0.0, 1.0, 1.0]
    chat = [[{"role": "assistant", "content": SAID[0]}]]
    assert rewards.binary(None, chat, terms[:1]) == [0.0]


@pytest.mark.slow
def test_the_example_trains_through_axolotls_own_grpo(tmp_path, forks):
    """Three steps on a tiny model; the rewards that were logged are ours."""
    eval_model.train_model(tmp_path / "model", eval_model.made_up_rows(1)["retain"], steps=1)
    rows = [{"prompt": f"Who is {n}?", "terms": list("abcdefghijklmnopqrstuvwxyz")} for n in "AB"]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    config = yaml.safe_load((ROOT / "examples" / "purge" / "purge.yml").read_text("utf-8"))
    config |= {
        "base_model": str(tmp_path / "model"),
        "datasets": [{"path": str(data), "ds_type": "json"}],
        "output_dir": str(tmp_path / "out"),
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "save_steps": 3,
    }
    config["trl"] |= {"num_generations": 2, "max_completion_length": 8}
    (tmp_path / "c.yml").write_text(yaml.safe_dump(config), "utf-8")
    command = ["axolotl", "train", str(tmp_path / "c.yml"), "--launcher", "python"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    state = next((tmp_path / "out").glob("checkpoint-*/trainer_state.json"))
    logged = [h["reward"] for h in json.loads(state.read_text())["log_history"] if "reward" in h]
    assert len(logged) == 3 and all(0 < value <= 1 for value in logged)
