"""Interventions: each by hand, the folder that Transformers loads, the merge, and what they do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from attack_models import OTHERS, PEOPLE, PLACES, TOWNS, make_lab, rows, tokenizer
from conftest import tiny_llama
from torch.testing import assert_close

from axolotl_unlearn.errors import UnlearnError
from research.inference import folder, guard_it, mrp
from research.inference.modeling_intervened import intervene, turned

BLOCK = "model.layers.0"


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_a_rotation_by_hand():
    """h = (3, 4), length 5; s = (3, 0), amount 1: (0, 4) scaled to (0, 5). Similarity of (3, 4) to
    the centroid (1, 0) is .6: above .5, below .7."""
    h, s, c = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    found, chosen = turned(h, s, c, torch.tensor([0.5, 1.0]))
    assert_close(found, torch.tensor([[[0.0, 5.0]]]))
    assert_close(chosen, s)
    assert_close(turned(h, s, c, torch.tensor([0.7, 1.0]))[0], h)
    # Of two centroids that are near the mean of the vectors: (3, 0) and (0, 4).
    both = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert_close(turned(h, *both, torch.tensor([0.5, 1.0]))[1], torch.tensor([[1.5, 2.0]]))
    # A token of padding does not count: without it the mean is (3, 4) as before.
    padded = torch.cat([h, torch.tensor([[[0.0, -90.0]]])], 1)
    assert_close(turned(padded, s, c, torch.tensor([0.5, 1.0]), torch.tensor([[1, 0]]))[1], s)


def test_a_steering_vector_by_hand():
    """Means (2, 2) and (0, 2): orthogonal part (2, 0), length (2 sqrt 2 + 2) / 2."""
    forget, retain = torch.tensor([[2.0, 2.0]] * 3), torch.tensor([[0.0, 2.0]] * 2)
    expected = torch.tensor([2**0.5 + 1, 0.0])
    assert_close(guard_it.steering_vector(forget, retain), expected)
    cut = guard_it.threshold(np.array([0.8, 0.9]), np.array([0.1, 0.7]))
    assert 0.7 <= cut < 0.8


def test_directions_by_hand():
    """Second moments diag(4, 1) and diag(1, 4): the first axis; a basis keeps what was before."""
    assert_close(
        mrp.begun(torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 4.0])), 1)
        .abs(),
        torch.tensor([[1.0, 0.0]]), atol=1e-5, rtol=0,
    )  # fmt: skip
    found = mrp.basis(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.0]]))
    assert_close(found.abs(), torch.eye(3)[:2])


def test_a_projection_is_merged_where_it_is_linear():
    model, ids = tiny_llama(), torch.arange(3, 13)[None]
    plain = logits(model, ids)
    names = mrp.places(model, [1], "written")
    assert names == ["model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    tensors = {f"project:{name}": mrp.basis(torch.randn(2, 32)) for name in names}
    handles = intervene(model, tensors)
    hooked = logits(model, ids)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(hooked, plain)
    assert_close(logits(model, ids), plain)
    folder.merge(model, tensors)
    assert_close(logits(model, ids), hooked, atol=1e-5, rtol=1e-4)
    (block,) = mrp.places(model, [0], "block")
    with pytest.raises(UnlearnError, match="keep the hook"):
        folder.merge(model, {f"project:{block}": torch.eye(32)[:1]})


def test_transformers_loads_the_folder(tmp_path):
    """Generation with a cache says what a forward of the whole says, and only with the hooks; the
    next model of the same kind is itself."""
    from transformers import AutoModelForCausalLM

    model, ids = tiny_llama(), torch.arange(3, 11)[None]
    model.generation_config.use_cache = False  # as training leaves it
    model.save_pretrained(tmp_path / "plain")
    plain = logits(model, ids)
    tensors = {
        f"project:{BLOCK}": torch.eye(32)[:1],
        f"rotate:{BLOCK}": torch.randn(2, 32) * 5,
        f"centroids:{BLOCK}": torch.randn(2, 32),
        f"gate:{BLOCK}": torch.tensor([-1.0, 0.5]),
    }
    out = folder.write(tmp_path / "plain", tensors, tmp_path / "out")
    load = AutoModelForCausalLM.from_pretrained
    loaded = load(out, trust_remote_code=True, dtype=torch.float32).eval()
    intervene(model, tensors)
    assert_close(logits(loaded, ids), logits(model, ids))
    assert not torch.allclose(logits(loaded, ids), plain)
    said = loaded.generate(input_ids=ids, max_new_tokens=1, do_sample=False)[0, -1]
    assert said == logits(model, ids)[0, -1].argmax()
    assert_close(logits(load(tmp_path / "plain").eval(), ids), plain)
    # A server that left the hooks out would give the original: it finds no architecture it knows.
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["auto_map"] and config["architectures"] == ["IntervenedForCausalLM"]
    assert loaded.generation_config.use_cache


@pytest.mark.parametrize("kind", ["project", "rotate"])
def test_the_layout_of_vllm(kind):
    """There a layer gives ``[T, D]``, and beside it the stream that it is added to: their sum is
    turned as ``[1, T, D]`` is elsewhere."""

    class Layer(torch.nn.Module):
        def forward(self, h):
            return h if h.dim() == 3 else (h - 1, torch.ones_like(h))

    model = torch.nn.Sequential(Layer())
    gate = {"centroids:0": torch.ones(1, 4), "gate:0": torch.tensor([-1.0, 0.5])}
    intervene(model, {f"{kind}:0": torch.eye(4)[:1]} | gate)
    h = torch.randn(1, 3, 4)
    states, stream = model(h[0])
    assert_close(states + stream, model(h)[0])
    assert not torch.allclose(model(h), h)


@pytest.fixture(scope="module")
def lab():
    from transformers import AutoModelForCausalLM

    made, tok = make_lab(), tokenizer()

    def encode(some):
        found = []
        for row in some:
            start = tok(row["input"])["input_ids"]
            answer = tok(" " + row["output"])["input_ids"]
            found.append((start + answer, [-100] * len(start) + answer))
        return found

    sides = [rows(PEOPLE, PLACES, "f"), rows(OTHERS, TOWNS, "r")]
    return AutoModelForCausalLM.from_pretrained(made.memorised), [encode(s) for s in sides], sides


def nll(model, side):
    with torch.no_grad():
        return float(
            np.mean([model(input_ids=torch.tensor([i]), labels=torch.tensor([y])).loss.item()
                     for i, y in side])
        )  # fmt: skip


@pytest.mark.parametrize("where", ["block", "written"])
def test_mrp_forgets_and_retains_and_takes_nothing_away(lab, where):
    model, (forget, retain), _ = lab
    before = nll(model, forget), nll(model, retain)
    paths = mrp.places(model, [0, 1], where)
    handles = intervene(model, mrp.mrp(model, forget, retain, paths, k=3, steps=40, rate=0.05))
    after = nll(model, forget), nll(model, retain)
    for handle in handles:
        handle.remove()
    assert after[0] - before[0] > 1.5 * max(after[1] - before[1], 0.2)
    assert (nll(model, forget), nll(model, retain)) == pytest.approx(before)


def test_guard_it_turns_forget_prompts_alone(lab):
    """Prompts of another form are below the gate and get the very same logits."""
    model, (forget, _), sides = lab
    others = [f"Two and {n} of the {w} make" for n in "three four five".split() for w in PLACES]
    texts = [row["input"] for row in sides[0]]
    tensors = guard_it.guard_it(model, tokenizer(), texts, others, layer=0, amount=2.0)
    asked = [torch.tensor([tokenizer()(text)["input_ids"]]) for text in others]
    before, same = nll(model, forget), [logits(model, ids) for ids in asked]
    handles = intervene(model, tensors)
    after, now = nll(model, forget), [logits(model, ids) for ids in asked]
    for handle in handles:
        handle.remove()
    assert after - before > 0.5
    assert np.mean([torch.equal(a, b) for a, b in zip(same, now, strict=True)]) > 0.9
