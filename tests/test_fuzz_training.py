"""Configs are drawn, and each trained twice: by Axolotl with us, and by a plain loop in float64.

The loop has no accumulation, no micro-batches and no shared code but the order of pairs: it sums
over all rows of a step at once (plain.py), and writes schedules, clipping and AdamW as published.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import plain
import pytest
import torch
from conftest import tiny_llama
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_train_axolotl import run

FORGET = {
    "ga": lambda model, start, rows, which, o: -plain.nll(model, rows, which),
    "npo": lambda model, start, rows, which, o: plain.npo(
        model, start, rows, which, o["beta"], o["reduction"]
    ),
    "simnpo": lambda model, start, rows, which, o: plain.simnpo(
        model, rows, which, o["beta"], o["gamma"]
    ),
}
RETAIN = {
    "nll": lambda model, start, rows, which, o: plain.nll(model, rows, which),
    "kl": lambda model, start, rows, which, o: plain.kl(
        model, start, rows, which, o["direction"], "answer"
    ),
}
WEIGHT = st.sampled_from([0.1, 0.5, 1.0])


def prepared_rows(folder: Path) -> list[dict]:
    """The rows that a run has written in its ``dataset_prepared_path``."""
    from datasets import concatenate_datasets, load_from_disk

    tables = {info.parent for info in folder.rglob("state.json")}
    return list(concatenate_datasets([load_from_disk(str(one)) for one in sorted(tables)]))


def entry(name: str, **options):
    return st.fixed_dictionaries({"objective": st.just(name), "weight": WEIGHT, **options})


CONFIGS = st.fixed_dictionaries(
    {
        "forget": st.one_of(
            entry("ga"),
            entry("npo", beta=st.sampled_from([0.1, 1.0]),
                  reduction=st.sampled_from(["sum", "mean"])),
            entry("simnpo", beta=st.just(1.0), gamma=st.sampled_from([0.0, 0.5])),
        ),
        "retain": st.lists(
            st.one_of(entry("nll"), entry("kl", direction=st.sampled_from(["forward", "reverse"]))),
            min_size=0, max_size=2, unique_by=lambda one: one["objective"],
        ),
        "retain_per_forget": st.integers(1, 2),
        "settings": st.fixed_dictionaries(
            {
                "micro_batch_size": st.integers(1, 3),
                "gradient_accumulation_steps": st.integers(1, 3),
                "num_epochs": st.integers(1, 2),
                "optimizer": st.sampled_from(["sgd", "adamw_torch"]),
                "lr_scheduler": st.sampled_from(["constant", "linear", "cosine"]),
                "warmup_steps": st.sampled_from([0, 2]),
                "weight_decay": st.sampled_from([0.0, 0.1]),
                "max_grad_norm": st.sampled_from([0.5, 100.0]),
                "seed": st.integers(1, 5),
            },
            optional={"max_steps": st.integers(1, 4)},
        ),
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    from attack_models import tokenizer

    folder = tmp_path_factory.mktemp("fuzzed")
    words = tokenizer()
    tiny_llama(vocabulary=len(words)).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    for side, count in (("forget", 5), ("retain", 4)):
        rows = [
            {
                "id": f"{side}{n}-qa0",
                "input": f"{side} {n} who ?",
                "output": f"the {n * 7} " * (n + 1),
            }
            for n in range(count)
        ]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(world, drawn) -> dict[str, torch.Tensor]:
    """By Axolotl with us; the weights."""
    sides = ["forget", "retain"] if drawn["retain"] else ["forget"]
    cfg = {
        "base_model": str(world / "model"), "plugins": ["axolotl_unlearn.UnlearnPlugin"],
        "unlearn": {
            "forget": drawn["forget"], "retain": drawn["retain"],
            "pairing": {"retain_per_forget": drawn["retain_per_forget"]},
        },
        "datasets": [
            {"path": str(world / f"{side}.jsonl"), "type": f"axolotl_unlearn.data.{side}"}
            for side in sides
        ],
        "output_dir": str(world / "out"), "dataset_prepared_path": str(world / "prepared"),
        "sequence_len": 128, "learning_rate": 1e-2, "save_strategy": "no", "bf16": False,
        "fp16": False, "tf32": False, "adam_epsilon": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.9,
        "attn_implementation": "sdpa", **drawn["settings"],
    }  # fmt: skip
    return load_file(run(world / "my.yml", cfg) / "model.safetensors")


def rate(name: str, step: int, warmup: int, total: int) -> float:
    """Share of the learning rate at a step, from 0."""
    if step < warmup and name != "constant":
        return step / warmup
    part = (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}[name]


def by_hand(world, drawn) -> dict[str, torch.Tensor]:
    """The same run in float64, one loss a step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from axolotl_unlearn.data.pairing import PairedDataset

    s = drawn["settings"]
    folder = max((world / "prepared").glob("unlearn-*"), key=lambda path: path.stat().st_mtime_ns)
    pairs = PairedDataset(
        Dataset.from_list(prepared_rows(folder)), seed=s["seed"],
        retain_per_forget=drawn["retain_per_forget"] if drawn["retain"] else 0,
    )  # fmt: skip
    load = AutoModelForCausalLM.from_pretrained
    model, start = (load(world / "model", dtype=torch.float64).eval() for _ in range(2))
    taken, length = s["micro_batch_size"] * s["gradient_accumulation_steps"], len(pairs)
    epoch = math.ceil(length / taken)
    total = s.get("max_steps") or epoch * s["num_epochs"]
    state = {
        name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()
    }
    for step in range(total):
        round_, first = divmod(step, epoch)
        places = range(first * taken, min(length, (first + 1) * taken))
        items = [pairs[round_ * length + place] for place in places]
        rows = [row for side in ("forget", "retain") for item in items for row in item[side]]
        count = len(items)
        width = max(len(row["input_ids"]) for row in rows)
        batch = {
            key: torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in rows])
            for key, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
        }
        forget, retain = range(count), range(count, len(rows))
        one = drawn["forget"]
        loss = one["weight"] * FORGET[one["objective"]](model, start, batch, forget, one)
        for one in drawn["retain"]:
            loss = loss + one["weight"] * RETAIN[one["objective"]](model, start, batch, retain, one)
        model.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        clip = min(1.0, s["max_grad_norm"] / float(norm + 1e-6))
        lr = 1e-2 * rate(s["lr_scheduler"], step, s["warmup_steps"], total)
        with torch.no_grad():
            for name, p in model.named_parameters():
                grad = p.grad * clip
                decay = 0.0 if "norm" in name else s["weight_decay"]
                if s["optimizer"] == "sgd":
                    p -= lr * (grad + decay * p)
                    continue
                p *= 1 - lr * decay
                mean, square = state[name]
                mean.mul_(0.8).add_(0.2 * grad)
                square.mul_(0.9).add_(0.1 * grad**2)
                mean_, square_ = mean / (1 - 0.8 ** (step + 1)), square / (1 - 0.9 ** (step + 1))
                p -= lr * mean_ / (square_.sqrt() + 1e-2)
    return dict(model.named_parameters())


@settings(
    max_examples=int(os.environ.get("TRAINING_DRAWS", 25)), deadline=None,
    derandomize="TRAINING_DRAWS" not in os.environ, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[*HealthCheck],
)  # fmt: skip
@given(CONFIGS)
def test_a_config_trains_as_the_plain_loop_does(world, drawn):
    found = trained(world, drawn)
    wanted = by_hand(world, drawn)
    before = load_file(world / "model/model.safetensors")
    for name, weight in found.items():
        moved = (wanted[name] - before[name].double()).abs().max().item()
        error = (wanted[name] - weight.double()).abs().max().item()
        assert error <= 1e-6 + 2e-4 * moved, (name, error, moved)
