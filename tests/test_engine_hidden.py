"""Objectives on hidden states: RMU and adaptive RMU, stopped at their layer."""

from __future__ import annotations

import copy

import plain
import pytest
import torch
from conftest import assert_oracle, entries_for, moved, random_batch, tiny_llama, with_lora
from torch.testing import assert_close

from axolotl_unlearn.engine import packing
from axolotl_unlearn.engine.head import learn_after_head
from axolotl_unlearn.engine.layers import freeze_after
from axolotl_unlearn.engine.packing import can_pack
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.start import make_reference

FORGET, RETAIN = [0, 1, 2, 3], [4, 5, 6, 7]
RMU = (
    ("forget", {"objective": "rmu", "layer": 1, "coefficient": 3.0, "positions": "all"}),
    ("retain", {"objective": "hidden_mse", "layer": 1, "weight": 7.0, "positions": "all"}),
)


def model_and_batch(**config):
    """Three layers in training mode, adapter as after some steps, rows of unequal length."""
    model = with_lora(tiny_llama(seed=1, num_hidden_layers=3, **config).double()).double().train()
    return model, random_batch(seed=3, forget=4, retain=4, time=24)


def reference_for(model, mode="auto"):
    return make_reference(mode, model, starting_adapter=False)


def expected_rmu(model, batch):
    base = tiny_llama(seed=1, num_hidden_layers=3).double()
    u = 3 * plain.control_vector(32, 0)
    return plain.representation(
        model, base, batch, FORGET, 1, lambda h: u, "all"
    ) + 7 * plain.representation(model, base, batch, RETAIN, 1, lambda h: h, "all")


def gradients(loss, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


@pytest.mark.parametrize("way", ["packed", "padded", "checkpointing"])
def test_rmu_with_its_retain_term_equals_the_plain_implementation(way):
    """float64, value and gradient to 1e-10; the layers after the seen one do not run."""
    model, batch = model_and_batch()
    if way == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if way == "padded":
        packing._PACKING[model] = None
    assert (can_pack(model, model, batch) is None) == (way == "padded")
    learn_after_head(model, model, "cpu")  # as `can_pack`, a few tokens once a model
    ran: list[int] = []
    layers = model.get_base_model().model.layers
    for number, layer in enumerate(layers):
        layer.self_attn.register_forward_hook(lambda *a, n=number: ran.append(n))
    result = step_loss(model, batch, entries_for(*RMU), reference=reference_for(model))
    assert ran == [0, 1, 0, 1]  # reference, policy
    assert model.get_base_model().model.layers is layers and len(layers) == 3
    got = gradients(result.total, model)
    expected = expected_rmu(model, batch)
    assert_close(result.total, expected, rtol=1e-10, atol=1e-10)
    for g, w in zip(got, gradients(expected, model), strict=True):
        assert_close(g, w, rtol=1e-8, atol=1e-10)
    assert max(g.abs().max() for g in got) > 1e-3
    assert set(result.parts) == {"forget/rmu", "retain/hidden_mse"}


def test_rmu_beside_objectives_at_the_head():
    """With NLL and KL on the retain rows the forward goes on, and all gradients are there."""
    model, batch = model_and_batch()
    base = tiny_llama(seed=1, num_hidden_layers=3).double()
    entries = entries_for(
        RMU[0], ("retain", {"objective": "nll"}), ("retain", {"objective": "kl", "weight": 0.5})
    )
    result = step_loss(model, batch, entries, reference=reference_for(model))
    u = 3 * plain.control_vector(32, 0)
    expected = (
        plain.representation(model, base, batch, FORGET, 1, lambda h: u, "all")
        + plain.nll(model, batch, RETAIN)
        + 0.5 * plain.kl(model, base, batch, RETAIN, "reverse", "answer")
    )
    assert_oracle(result.total, expected, model, 1e-6)
    assert {"forget_nll", "retain_nll", "kl"} <= set(result.parts)


def test_full_fine_tuning_against_a_cached_reference():
    """The reference's states are those of the start, asked for once."""
    model = tiny_llama(seed=1, num_hidden_layers=3).double().train()
    batch, start = random_batch(seed=3, forget=4, retain=4, time=24), copy.deepcopy(model)
    reference = reference_for(model, "cached")
    entries = entries_for(
        ("forget", {"objective": "adaptive_rmu", "layer": 0, "scale": 2.0}),
        ("retain", {"objective": "hidden_mse", "layer": 1}),
    )
    step_loss(model, batch, entries, reference=reference)
    result = step_loss(moved(model), batch, entries, reference=reference)
    assert reference.forwards == 1
    u = 2 * plain.control_vector(32, 0)
    expected = plain.representation(
        model, start, batch, FORGET, 0, lambda h: h.norm() * u
    ) + plain.representation(model, start, batch, RETAIN, 1, lambda h: h)
    assert_close(result.total, expected, rtol=1e-10, atol=1e-10)
    for g, w in zip(gradients(result.total, model), gradients(expected, model), strict=True):
        assert_close(g, w, rtol=1e-8, atol=1e-10)


def test_a_layer_that_the_model_lacks_is_named():
    model, batch = model_and_batch()
    entries = entries_for(("forget", {"objective": "rmu"}))
    with pytest.raises(UnlearnError, match="layer: 7.*layers 0 to 2"):
        step_loss(model, batch, entries)


def test_an_evaluation_knows_the_nll_although_training_stops_early():
    model, batch = model_and_batch()
    entries = entries_for(*RMU)
    parts = step_loss(model.eval(), batch, entries, reference=reference_for(model)).parts
    with torch.no_grad():
        want = plain.nll(model, batch, FORGET)
    value, count = parts["forget_nll"]
    assert_close((value / count).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_forward_leaves_out_is_not_trained(tied):
    """DDP waits for the gradient of whatever is trained."""
    model = tiny_llama(seed=1, num_hidden_layers=3, tie=tied)
    freeze_after(model, 1)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.startswith("model.layers.2.") or name == "lm_head.weight" for name in frozen)
    assert ("lm_head.weight" in frozen) == (not tied)
    assert any(name.startswith("model.layers.2.") for name in frozen)
