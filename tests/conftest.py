"""Shared set-up: offline, one thread, and tiny real models made once a session."""

from __future__ import annotations

import gc
import os
import re
import sys
import textwrap
from pathlib import Path

import offline  # noqa: F401  before the libraries that read it

# isort: split
import absl.logging
import pytest
import torch
from hypothesis import settings
from torch.testing import assert_close

torch.set_num_threads(1)
# In a fork the first use of torch's thread pool makes it anew. Threads of autograd, one a device,
# start at once and race for it: "Invalid thread pool!". After this they find it made.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
# absl, which rouge-score imports, would keep pytest's stderr and close it as soon as Axolotl
# configures logging anew; it leaves the interpreter's own alone.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
# Time limits of single examples fail on a busy machine; pytest-timeout guards whole tests.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run last, so that a fault in the quick ones shows early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    gc.freeze()  # Axolotl collects five times a run


def code_of(page: str) -> str:
    """The first program of a page of docs/."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text("utf-8")
    return textwrap.dedent(re.search(r"^ *```python\n(.*?)^ *```$", text, re.S | re.M)[1])


def tiny_llama(seed: int = 0, vocabulary: int = 23, tie: bool = False, **config):
    """A real, randomly initialised LlamaForCausalLM small enough for float64 oracles."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **config}))
    with torch.no_grad():  # larger weights: distributions that differ visibly from uniform
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def with_lora(
    model, seed: int = 0, rank: int = 4, dropout: float = 0.0, trained: bool = True, saved=None
):
    """Wrap in a PEFT LoRA; ``trained`` gives B random values, as after some steps; ``saved``: names
    of modules to save."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=saved,
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(model, config)
    if trained:
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return peft_model


#: The paper's three objectives.
CONFIGS = (
    ("forget", {"objective": "npo", "weight": 0.4}),
    ("retain", {"objective": "nll", "weight": 0.4}),
    ("retain", {"objective": "kl", "weight": 0.2}),
)


def entries_for(*pairs):
    """Of sides and lines of a config."""
    from axolotl_unlearn.config import ObjectiveArgs
    from axolotl_unlearn.engine.views import make_entries

    return make_entries([(side, ObjectiveArgs(**config)) for side, config in pairs])


def random_batch(
    seed: int = 0,
    forget: int = 3,
    retain: int = 2,
    time: int = 11,
    vocabulary: int = 23,
    alternatives: bool = False,
) -> dict[str, torch.Tensor]:
    """Rows of unequal length, right-padded, prompts without labels; an alternative of each forget
    row at the end, if asked."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.tensor([*range(forget + retain), *range(forget if alternatives else 0)])
    rows = len(place)
    lengths = torch.randint(5, time + 1, (rows,), generator=generator)
    lengths[0] = time
    input_ids = torch.randint(3, vocabulary, (rows, time), generator=generator)
    steps = torch.arange(time)
    attention_mask = (steps < lengths[:, None]).long()
    prompts = torch.randint(1, 4, (rows,), generator=generator)
    labelled = attention_mask.bool() & (steps >= prompts[:, None])
    return {
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "labels": torch.where(labelled, input_ids, torch.tensor(-100)),
        "role": torch.tensor(([0] * forget + [1] * retain + [2] * forget)[:rows]),
        "kind": place % 2,
        "task": place % 3 + 1,
    }


def moved(model, seed: int = 0):
    """As after some steps of training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def assert_oracle(total: torch.Tensor, expected: torch.Tensor, model, atol: float = 1e-5) -> None:
    """A loss, and the gradient of every trained weight, are those of the plain implementation."""
    assert_close(total.double(), expected, rtol=atol, atol=atol)
    trained = [p for p in model.parameters() if p.requires_grad]
    got, want = (torch.autograd.grad(x, trained, retain_graph=True) for x in (total, expected))
    for g, w in zip(got, want, strict=True):
        assert_close(g.double(), w, rtol=1e-4, atol=atol)
    assert any(w.abs().max() > 1e-4 for w in want)  # the comparison is not of zeros


@pytest.fixture
def forks(monkeypatch) -> None:
    """Commands start as forks of this process: see forks.py."""
    import subprocess

    from forks import Fork, execvpe
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for module in (subprocess, subprocess_handler):  # the second starts torchrun's ranks
        monkeypatch.setattr(module, "Popen", Fork)
    monkeypatch.setattr(os, "execvpe", execvpe)


@pytest.fixture(scope="session")
def pretended(request) -> torch.device:
    """The pretended accelerator, which stays for the life of the process."""
    import pretend_device

    others = [one for one in request.session.items if "pretended" not in one.fixturenames]
    if others:
        pytest.skip(f"needs a process of its own, and {others[0].path.name} runs in this one")
    if why := pretend_device.unavailable():
        pytest.skip(why)
    return pretend_device.start()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return random_batch()
