"""Every objective and preset trains: three steps of Axolotl's own trainer on a tiny LoRA model,
twice, with the same losses. What is run is what `axolotl-unlearn methods` says."""

from __future__ import annotations

import copy
import gc
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from data_tokenizers import byte_tokenizer
from test_train_axolotl import loaded

from axolotl_unlearn.cli.methods import command as methods
from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.config.presets import preset_names, preset_text
from axolotl_unlearn.objectives import OBJECTIVES


def shown(name: str) -> dict:
    """The block that `axolotl-unlearn methods NAME` ends with."""
    said = CliRunner().invoke(methods, [name])
    assert said.exit_code == 0, said.output
    text = said.output[said.output.rindex("unlearn:\n") :]
    return yaml.safe_load(text)["unlearn"]


def objectives_of(block: dict) -> set[str]:
    return {entry.objective for _, entry in parse_unlearn(block).entries()}


def block_of(preset: str, stage: Path = Path("stage")) -> dict:
    """A preset with what it takes."""
    if preset != "never-seen":
        return {"preset": preset}
    given = {"teacher": str(stage / "teacher"), "heldout": str(stage / "heldout.jsonl")}
    return {"preset": preset, **given, "level": {"every": 2, "least_rows": 1}}


PRESETS = {name: yaml.safe_load(preset_text(name))["unlearn"] for name in preset_names()}
IN_PRESETS = set().union(*(objectives_of(block_of(name)) for name in PRESETS))
#: What is run: all presets, and by itself each objective that is in none.
METHODS = [*PRESETS, *sorted(set(OBJECTIVES) - IN_PRESETS)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Path:
    # Every run collects garbage some times; without this it walks through all that was imported.
    gc.freeze()
    return make_stage(tmp_path_factory.mktemp("stage"))


def make_stage(folder: Path, end: str = "", steps: int = 60, **shape) -> Path:
    """Three sides of six rows, whose answers have an ``end``, and two models with eight small
    layers: one that has begun to learn the forget rows (some objectives have nothing to do else),
    one of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8}
    given |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = LlamaConfig(**given | shape)
    for role in ("forget", "retain", "alternative", "heldout"):
        with (folder / f"{role}.jsonl").open("w") as file:
            for number in range(6):
                side = "retain" if role == "retain" else "forget"
                item = "vase" if role == "heldout" else "lamp"
                kind = "sc1" if number % 2 else "qa0"
                row = {
                    "id": f"{side}-{number}{kind}",
                    "input": f"{side} {number}?",
                    "output": ("unknown" if role == "alternative" else f"{item} {number * 7}")
                    + end,
                    "task": f"Task{number % 3 + 1}",
                }
                file.write(json.dumps(row) + "\n")
    for seed, name in enumerate(("base", "teacher")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        if name == "base":
            learn(model, folder / "forget.jsonl", steps)
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def learn(model, path: Path, steps: int) -> None:
    """Some steps on the rows of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [f"{row['input']} {row['output']}" for row in rows]
    tokenizer = byte_tokenizer()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()


def prepared(stage: Path, block: dict, **changes) -> tuple:
    """What Axolotl makes of a config: its own, and the rows."""
    datasets = [
        {"path": str(stage / f"{role}.jsonl"), "type": f"axolotl_unlearn.data.{role}"}
        for role in sorted(parse_unlearn(block).roles())
    ]
    given = {
        "dataset_num_proc": 0, "sequence_len": 256, "lora_target_linear": False,
        "lora_target_modules": ["q_proj", "down_proj"], "micro_batch_size": 2, "num_epochs": 1,
        "lr_scheduler": "constant", "save_total_limit": None, **changes,
    }  # fmt: skip
    if "phases" in block:
        given["num_epochs"] = "DELETE"
    return loaded(stage, "out", unlearn=block, datasets=datasets, **given)


def three_steps(cfg, rows) -> tuple[list[dict], float]:
    """The log of each step, and how far the adapter went from its start."""
    from axolotl.train import setup_model_and_trainer

    trainer, model, *_ = setup_model_and_trainer(cfg, rows)
    trainer.train()
    moved = max(w.abs().max().item() for n, w in model.named_parameters() if "lora_B" in n)
    return [entry for entry in trainer.state.log_history if "loss" in entry], moved


def fitted(block: dict) -> dict:
    """A preset for three steps of a model of eight layers: phases of one step (of the last if there
    are two), the deepest layer there is."""
    block = copy.deepcopy(block)
    phases = block.get("phases", [])
    for phase in phases:
        del phase["epochs"]
        phase["steps"] = 4 - len(phases) if phase is phases[-1] else 1
    for part in [block, *phases]:
        for side in ("forget", "retain"):
            entries = part.get(side, [])
            for entry in entries if isinstance(entries, list) else [entries]:
                if "layer" in entry:
                    entry["layer"] = min(entry["layer"], 7)
    return block


def block_to_run(name: str, stage: Path) -> dict:
    """A preset or an objective for three steps on the stage."""
    block = block_of(name, stage) if name in PRESETS else shown(name)
    if name in PRESETS and fitted(PRESETS[name]) != PRESETS[name]:
        block = fitted(PRESETS[name])
    if name not in PRESETS and OBJECTIVES[name].reference:  # else it starts where it wants to be
        block["forget"]["reference"] = {"model": str(stage / "teacher")}
    if name not in PRESETS and OBJECTIVES[name].against_heldout:  # beside what sets its level
        match = {"objective": "match", "reference": {"model": str(stage / "teacher")}}
        block |= {"forget": [block["forget"], match], "retain": {"objective": "nll"}}
        block["level"] = {"heldout": str(stage / "heldout.jsonl"), "every": 2}
    return block


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_and_repeats(stage, name):
    block = block_to_run(name, stage)
    cfg, rows = prepared(stage, block)
    (first, moved), (second, again) = three_steps(cfg, rows), three_steps(cfg, rows)
    assert [entry["step"] for entry in first] == [1, 2, 3]
    losses = [entry["loss"] for entry in first]
    assert losses == [entry["loss"] for entry in second] and moved == again > 0
    assert all(map(math.isfinite, losses))
    parts = {f"{side}/{entry.objective}" for side, entry in parse_unlearn(block).entries()}
    phased = "phases" in block  # each of them logs its own
    assert phased or all(parts <= set(entry) for entry in first)
    assert parts <= set().union(*first)


@pytest.mark.parametrize("kind, least", [("question", 1), ("completion", 1), ("completion", 7)])
def test_never_seen_takes_rows_of_one_kind_without_tasks(stage, tmp_path, kind, least):
    """Entries for the other kind do nothing. Six rows are too few to be drawn to a distribution
    where it takes seven."""
    for side in ("forget", "retain", "heldout"):
        rows = [json.loads(line) for line in (stage / f"{side}.jsonl").read_text().splitlines()]
        kept = ({"input": r["input"], "output": r["output"], "kind": kind} for r in rows)
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    for model in ("base", "teacher"):
        (tmp_path / model).symlink_to(stage / model)
    block = block_of("never-seen", tmp_path)
    block["level"] |= {"least_rows": least, "every": 1}
    log, moved = three_steps(*prepared(tmp_path, block))
    assert moved > 0 and all(math.isfinite(entry["loss"]) for entry in log)
    drawn = [e[f"forget/{m}.{kind}" if kind == "question" else f"forget/{m}"] for e in log
             for m in ("feature_matching", "hidden_matching")]  # fmt: skip
    assert any(drawn) == (least == 1)


def test_what_methods_shows_is_what_there_is():
    """The list names every objective and preset; an objective's block is its defaults and a
    preset's its own."""
    listed = CliRunner().invoke(methods, []).output
    lines = listed.splitlines()
    assert all(any(line.startswith(f"{name}  (") for line in lines) for name in OBJECTIVES)
    presets = next(line for line in lines if line.startswith("Presets, "))
    assert presets.partition(": NAME}`: ")[2].split(", ") == preset_names()
    for name, objective in OBJECTIVES.items():
        ((side, entry),) = parse_unlearn(shown(name)).entries()
        assert side == ("forget" if objective.side == "both" else objective.side)
        defaults = {key: p.default for key, p in objective.parameters.items()}
        assert entry.objective == name and entry.parameters == defaults
    for name, block in PRESETS.items():
        assert shown(name) == block
