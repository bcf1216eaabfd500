"""Axolotl's own trainer on the pretended accelerator, and how often each method waits for it."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pretend_device
import pytest
import torch
from axolotl.train import setup_model_and_trainer
from test_every_method import METHODS, block_to_run, make_stage, prepared, stage  # noqa: F401  a fixture
from transformers import TrainerCallback, training_args

from axolotl_unlearn.checks.estimate import memory
from axolotl_unlearn.config import parse_unlearn

pytestmark = pytest.mark.usefixtures("pretended")

#: Waits of every step (is the loss finite, is the gradient), of one whose rows the reference is
#: asked about, of the step that finds out how the model takes packed rows, and of a look of
#: `unlearn.level` beside the step.
STEP, ASKED, LEARNT, LOOK = 2, 1, 15, 8
#: Waits for each weight and not for rows: a teacher is loaded, and its weights are hashed.
OF_WEIGHTS = ("modeling_utils.py", "weights_digest")


class Waits(TrainerCallback):
    """What is waited for before the first step and in each step."""

    def __init__(self, seen: pretend_device.Watch) -> None:
        self.seen, self.parts = seen, []

    def _part(self) -> None:
        self.parts.append(self.seen.waits - sum(self.parts, Counter()))

    def on_step_begin(self, args, state, control, **_):
        if not state.global_step:
            self._part()

    def on_step_end(self, args, state, control, **_):
        self._part()


def waits(stage: Path, name: str) -> tuple[Counter, list[Counter], float]:  # noqa: F811
    """Of the start and of each step of two epochs of three steps (with phases one, or more); and
    the loss."""
    cfg, rows = prepared(stage, block_to_run(name, stage), logging_steps=100, num_epochs=2)
    trainer, model, *_ = setup_model_and_trainer(cfg, rows)
    with pretend_device.watch("/axolotl_unlearn/", "/transformers/", "/accelerate/") as seen:
        trainer.add_callback(noted := Waits(seen))
        loss = trainer.train().training_loss
    assert {weight.device.type for weight in model.parameters()} == {pretend_device.NAME}
    start, *steps = noted.parts
    return start, steps, loss


FULL = dict.fromkeys(
    ("adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules")
)


def memory_stage(folder: Path, tokens: int) -> Path:
    """Rows of about so many tokens, and two models of a shape that activations fill."""
    shape = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    return make_stage(folder, " a" * (tokens // 2), steps=0, **shape)


def estimate_and_peak(stage: Path, block: dict, **changes) -> tuple[int, int]:  # noqa: F811
    """Bytes of two steps: what `check --full` says, and the most that was allocated. In a process
    of its own: in one, what an earlier run left would be freed by a later one."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_measured, stage, block, changes).result()


def _measured(stage: Path, block: dict, changes: dict) -> tuple[int, int]:  # noqa: F811
    given = {"bf16": True, "gradient_checkpointing": True, "micro_batch_size": 1, "max_steps": 2}
    given |= {"sequence_len": 4096, "lora_r": 8, "lora_target_modules": None, "dataset_num_proc": 0}
    given |= {"lora_target_linear": True, "optimizer": "adamw_torch"}
    before = torch.pretend.memory_allocated(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
        cfg, rows = prepared(stage, block, **given | changes)
        trainer, *_ = setup_model_and_trainer(cfg, rows)
        torch.pretend.reset_peak_memory_stats(0)
        trainer.train()
    peak = torch.pretend.max_memory_allocated(0) - before
    longest = max(map(len, trainer.train_dataset["input_ids"]))
    said = memory(dict(cfg), parse_unlearn(block), longest)
    return said["at_least"] + said["activations"], peak


# First in this file: a process that has taken a gradient on the device cannot be forked.
@pytest.mark.parametrize("name, changes", [
    ("tofu-npo-kl", {}), ("tofu-npo", {"gradient_checkpointing": False}), ("rmu-zephyr", {}),
    ("tofu-npo-kl", FULL),
])  # fmt: skip
def test_memory_is_what_the_estimate_says(name, changes, tmp_path):
    """Of all methods: research/results/memory.json (docs/gpu-sizes.md)."""
    folder = memory_stage(tmp_path, 600)
    said, peak = estimate_and_peak(folder, block_to_run(name, folder), **changes)
    assert 0.9 * peak <= said <= 1.1 * peak, said / peak


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_on_an_accelerator_and_hardly_waits(stage, name):  # noqa: F811
    start, steps, loss = waits(stage, name)
    assert math.isfinite(loss) and len(steps) >= 3
    of_rows = [n for (_, place), n in start.items() if not any(x in place for x in OF_WEIGHTS)]
    assert sum(of_rows) <= 6 * 3 + LEARNT * 3, start  # three sides, up to three models
    looks = "level" in block_to_run(name, stage)
    for number, step in enumerate(steps):
        allowed = STEP + ASKED * (number < 3) + LEARNT * (not number)
        allowed += LOOK * (looks and number > 0 and not number % 2)
        assert step.total() <= allowed, (number, step)


def trained(stage: Path, block: dict, resume: str | None = None, **changes):  # noqa: F811
    """Losses of each step, and the trained weights."""
    cfg, rows = prepared(stage, block, num_epochs=2, **changes)
    trainer, model, *_ = setup_model_and_trainer(cfg, rows)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [weight.detach() for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize("name", ["tofu-npo-kl", "never-seen"])
def test_a_model_over_two_devices_trains_as_on_one(stage, name):  # noqa: F811
    """Its head is on another device than its tokens, and than its teacher's head."""
    first = ("model.embed_tokens", "model.rotary_emb", *(f"model.layers.{i}" for i in range(4)))
    second = (*(f"model.layers.{i}" for i in range(4, 8)), "model.norm", "lm_head")
    spread = dict.fromkeys(first, "pretend:0") | dict.fromkeys(second, "pretend:1")
    block = block_to_run(name, stage)
    losses, weights = trained(stage, block, device_map=spread)
    assert {weight.device.index for weight in weights} == {0, 1}
    expected, _ = trained(stage, block)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_cached_reference_is_asked_once_for_all_runs(stage):  # noqa: F811
    block = {"reference": "cached", "forget": {"objective": "npo"}, "retain": {"objective": "kl"}}
    losses, _ = trained(stage, block)
    answers = {path: path.stat().st_size for path in (stage / "out" / "reference").rglob("*.bin")}
    again, _ = trained(stage, block)
    assert answers and again == losses
    assert answers == {path: path.stat().st_size for path in answers}


def test_a_resumed_run_ends_with_the_same_weights(stage):  # noqa: F811
    """With a teacher, a level, and answers of references in files."""
    block = block_to_run("never-seen", stage)
    saved = {"save_strategy": "steps", "save_steps": 2}
    losses, weights = trained(stage, block, **saved)
    again, other = trained(stage, block, str(stage / "out" / "checkpoint-2"), **saved)
    assert again[-4:] == losses[-4:] and all(map(torch.equal, weights, other))
