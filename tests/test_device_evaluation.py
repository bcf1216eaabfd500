"""Evaluation on the pretended accelerator: its numbers, its forwards, what the host waits for."""

from __future__ import annotations

import pretend_device
import pytest
import torch
from conftest import tiny_llama
from test_eval_generate import PROMPTS, Words

from axolotl_unlearn.engine.token_scoring import score_texts
from axolotl_unlearn.evaluation.generate import generate_greedily

pytestmark = pytest.mark.usefixtures("pretended")
TOKENS = 24


def forwards(model) -> list[int]:
    """Rows of each forward, as they come."""
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    return seen


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1] * 3])
def test_generation_waits_less_than_once_a_token(prompts):
    """Forwards: as many as `model.generate` makes, and one a token of the prompts' spread."""
    model = tiny_llama(seed=3)
    model.generation_config.eos_token_id = None
    how = {"max_new_tokens": TOKENS, "batch_size": 64}
    expected = generate_greedily(model, Words(), prompts, **how)
    model, lengths = model.to("pretend"), [len(Words()(one)["input_ids"]) for one in prompts]
    seen = forwards(model)
    with pretend_device.watch("/axolotl_unlearn/", "/transformers/") as watch:
        found = generate_greedily(model, Words(), prompts, **how)
    assert found == expected
    assert len(seen) <= TOKENS + max(lengths) - min(lengths)
    assert watch.total <= len(seen) / 2, str(watch)


def test_all_facts_of_a_text_come_of_one_forward():
    """Log-probability, arg max, mean and spread of each token; a wait for each batch, and one of
    transformers, which looks for packed rows."""
    model, texts = tiny_llama(seed=3), [one for one in PROMPTS if " " in one]
    expected = score_texts(model, Words(), texts)
    model = model.to("pretend")
    seen = forwards(model)
    score_texts(model, Words(), texts[:1])  # what is verified once a model
    seen.clear()
    with pretend_device.watch("/axolotl_unlearn/", "/transformers/") as watch:
        found = score_texts(model, Words(), texts, batch_tokens=40)
    assert sum(seen) == len(set(texts)), seen
    assert watch.total <= 2 * len(seen), str(watch)
    for one, other in zip(found, expected, strict=True):
        for name in ("logp", "greedy", "mean", "sd"):
            ours, theirs = (torch.as_tensor(getattr(x, name)) for x in (one, other))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
