"""Axolotl 0.21 loads the plugin in every run of an environment that has this package. A run that
does not ask for unlearning comes out byte for byte as without it."""

from __future__ import annotations

import json
import os
import random
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy
import pytest
import torch
import yaml

from axolotl_unlearn import versions

ROOT = Path(__file__).parents[1]
NAME = "axolotl_unlearn.UnlearnPlugin"


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Path:
    """A tiny model and rows of a dataset type of Axolotl's own."""
    from conftest import tiny_llama
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("stage")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-olmo")
    tokenizer.save_pretrained(folder / "base")
    tiny_llama(vocabulary=len(tokenizer)).save_pretrained(folder / "base")
    rows = [{"text": f"The clerk {n} saw a lamp {n * 7} times."} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def plain(stage: Path, name: str, **changes) -> Path:
    """Ordinary fine-tuning by ``axolotl train``; its config file."""
    data = {"path": str(stage / "rows.jsonl"), "ds_type": "json", "type": "completion"}
    cfg = {
        "base_model": str(stage / "base"), "datasets": [data], "output_dir": str(stage / name),
        "dataset_prepared_path": str(stage / f"{name}-prepared"), "sequence_len": 64,
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3,
        "learning_rate": 1e-3, "optimizer": "adamw_torch", "lr_scheduler": "constant",
        "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True,
        "lora_dropout": 0.1, "bf16": False, "fp16": False, "device_map": {"": "cpu"},
        "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False,
        "special_tokens": {"pad_token": "<|padding|>"}, "logging_steps": 1, "save_steps": 3,
    }  # fmt: skip
    path = stage / f"{name}.yml"
    path.write_text(yaml.safe_dump(cfg | changes))
    return path


def trained(stage: Path, monkeypatch, name: str, registered: bool, **changes) -> dict:
    """What a run leaves: bytes of its adapter, what it logged, environment and hooks."""
    from axolotl.cli.train import do_cli
    from axolotl.integrations import base

    ours = [
        p for p in entry_points(group="axolotl.plugins") if p.value.startswith("axolotl_unlearn")
    ]
    assert ours, "not registered: install this package again (`make setup`)"
    points = ours if registered else []
    monkeypatch.setattr(base, "entry_points", lambda group: points, raising=False)
    base.PluginManager.get_instance().plugins.clear()
    monkeypatch.setattr(sys, "argv", ["axolotl"])
    environment, hook = dict(os.environ), sys.excepthook
    for draw in (torch.manual_seed, random.seed, numpy.random.seed):
        draw(5)
    try:
        do_cli(config=str(plain(stage, name, **changes)))
        loaded = list(base.PluginManager.get_instance().plugins)
    finally:
        base.PluginManager.get_instance().plugins.clear()
    assert (NAME in loaded) == (registered and versions.loads_us_unasked() or "plugins" in changes)
    state = json.loads((stage / name / "checkpoint-3/trainer_state.json").read_text())
    clocks = ("runtime", "per_sec", "memory")
    return {
        "adapter": (stage / name / "adapter_model.safetensors").read_bytes(),
        "optimizer": torch.load(stage / name / "checkpoint-3/optimizer.pt")["state"][0]["exp_avg"],
        "log": [
            {k: v for k, v in line.items() if not any(word in k for word in clocks)}
            for line in state["log_history"]
        ],
        "files": sorted(str(p.relative_to(stage / name)) for p in (stage / name).rglob("*")),
        "prepared": sorted(p.name for p in (stage / f"{name}-prepared").iterdir()),
        "environment": {k: v for k, v in os.environ.items() if environment.get(k) != v},
        "hook": sys.excepthook is hook,
    }


@pytest.fixture(scope="module")
def without(stage) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        trained(stage, patch, "first", False)  # imports draw from the generators, too
        return trained(stage, patch, "without", False)


@pytest.mark.parametrize("name", ["nothing", "entry-point", "listed", "both"])
def test_a_plain_run_is_the_same_bytes_with_the_plugin(stage, monkeypatch, without, name):
    """``nothing`` is the control: two runs without it are the same."""
    changes = {"plugins": [NAME]} if name in ("listed", "both") else {}
    found = trained(stage, monkeypatch, name, name in ("entry-point", "both"), **changes)
    assert torch.equal(found.pop("optimizer"), without["optimizer"])
    for key, value in found.items():
        assert value == without[key], key


def test_a_misspelt_block_is_refused_where_the_plugin_is_named(stage, monkeypatch, capfd):
    with pytest.raises(SystemExit) as refused:
        trained(stage, monkeypatch, "misspelt", False, plugins=[NAME], unlern={"preset": "npo"})
    assert refused.value.code == 2
    assert "did you mean `unlearn`?" in capfd.readouterr().err
