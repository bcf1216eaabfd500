"""Batched greedy generation against `model.generate`, one prompt at a time."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_llama
from fault_codes import fails

from axolotl_unlearn.evaluation import generate as gen
from axolotl_unlearn.evaluation import measure
from axolotl_unlearn.evaluation.measurement import Settings


class Words:
    """A tokenizer of words "3" ... "22"; 2 is the end of sequence."""

    pad_token_id = 0
    eos_token_id = 2

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def batch_decode(self, rows, skip_special_tokens=True):
        assert skip_special_tokens
        return [" ".join(str(t) for t in row if t > 2) for row in rows]


PROMPTS = [
    " ".join(str(3 + (i * 7 + j * j) % 20) for j in range(1 + (i * 5) % 11)) for i in range(12)
]


@pytest.fixture(scope="module")
def model():
    """Its end token is one that its endless texts reach early, late, or never."""
    model = tiny_llama(seed=3)
    model.generation_config.eos_token_id = None
    endless = one_by_one(model)
    for token in range(3, 23):
        places = [row.index(token) if token in row else None for row in endless]
        if None in places and len(set(places)) > 3:
            model.generation_config.eos_token_id = token
            return model
    raise AssertionError("no token is reached at different places; take another seed")


def one_by_one(model, limit: int = 40) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([Words()(prompt)["input_ids"]])
        with torch.no_grad():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                do_sample=False,
                pad_token_id=0,
            )
        found.append(output[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_same_tokens_as_one_prompt_at_a_time(model, batch_size):
    expected = one_by_one(model)
    lengths = {len(row) for row in expected}
    assert len(lengths) > 2 and 40 in lengths, "stopping and endless rows"
    found = gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=40, batch_size=batch_size)
    assert found == Words().batch_decode(expected)


def test_a_repetition_penalty_of_the_model_is_honoured(model):
    """Some chat models carry one; plain arg max would give other tokens than the official way."""
    model.generation_config.repetition_penalty = 1.8
    try:
        expected = one_by_one(model, 12)
        found = gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=12, batch_size=4)
    finally:
        model.generation_config.repetition_penalty = None
    assert found == Words().batch_decode(expected)
    plain = gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=12)
    assert plain != found


def test_several_stop_tokens(model):
    """A second end token, one that occurs in what is generated: the earlier one ends a text."""
    end = model.generation_config.eos_token_id
    other = next(t for row in one_by_one(model, 20) for t in row[1:] if t != end)
    model.generation_config.eos_token_id = [end, other]
    try:
        expected = one_by_one(model, 20)
        found = gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=20)
    finally:
        model.generation_config.eos_token_id = end
    assert found == Words().batch_decode(expected)
    assert any(row[-1] == other for row in expected)


def test_nothing_is_written_past_the_context(model, monkeypatch):
    """It is not what a model learned; a prompt that fills it cannot be asked."""
    whole = gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=72)
    monkeypatch.setattr(gen, "context_of", lambda _: 12)
    lengths = [len(one.split()) for one in PROMPTS]
    assert max(lengths) < 12
    some = gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=72)
    for length, one, full in zip(lengths, some, whole, strict=True):
        assert one.split() == full.split()[: 12 - length]
    monkeypatch.setattr(gen, "context_of", lambda _: max(lengths))
    with fails("eval.no-room") as fault:
        gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=3)
    says = str(fault.value)
    assert f"{lengths.count(max(lengths))} text" in says and f"takes {max(lengths)}" in says
    assert "fewer new" not in says
    monkeypatch.setattr(gen, "context_of", lambda _: None)  # as of a model without positions
    assert gen.generate_greedily(model, Words(), PROMPTS, max_new_tokens=72) == whole


def test_vllm_is_asked_for_nothing_that_has_no_room(model, monkeypatch):
    """It would stop at the end of the context."""
    local = object.__new__(measure.Local)
    local.spec, local.settings = None, Settings(backend="vllm")
    local.model, local.tokenizer = model, Words()
    monkeypatch.setattr(measure.in_vllm, "generate", lambda *given: "made")
    assert local.generate(PROMPTS, 128, lambda *_: None) == "made"
    with fails("eval.no-room"):
        local.generate(["3 " * 128], 1, lambda *_: None)


@pytest.mark.parametrize(("ends", "said"), [(2, False), ([5, 2], False), (None, False),
                                            (5, True), ([5, 6], True)])  # fmt: skip
def test_another_end_than_the_tokenizers_is_noted(model, ends, said):
    """The official script generates past the tokenizer's; lm-eval stops there too."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ends
    try:
        note = gen.other_end(model, Words())
    finally:
        model.generation_config.eos_token_id = before
    assert bool(note) is said
    assert not said or ("token 2" in note and "5" in note and "lm-eval" in note)


def test_an_empty_prompt_is_refused(model):
    """It ended in a traceback, when all documents were measured: `input` may be empty."""
    with fails("eval.no-tokens") as fault:
        gen.generate_greedily(model, Words(), ["3 4", ""], max_new_tokens=3)
    assert "1 prompt has no tokens" in str(fault.value)
