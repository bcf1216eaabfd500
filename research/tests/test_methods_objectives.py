"""Objectives of research.methods against arithmetic written plainly, and at the extremes."""

from __future__ import annotations

import math

import plain
import pytest
import torch
from conftest import entries_for, random_batch, tiny_llama, with_lora
from torch.testing import assert_close

from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.objectives import OBJECTIVES
from research.methods import objectives  # noqa: F401  registers them


def clamped_entropy(logp, label, tau):
    p = logp.exp()
    return torch.relu(tau * math.log(len(p)) + (p * p.log()).sum())


def ihl(logp, label):
    return torch.relu(1 + logp[label].exp() - plain.others(logp, label).exp().max())


def unilogit(logp, label):
    p, size = logp.exp(), len(logp)
    target = p.detach().clone()
    # the label at 1/V, the others share the rest in their present proportion
    target = target / (1 - target[label]) * (1 - 1 / size)
    target[label] = 1 / size
    return (p * (p / target).log()).sum()


def flat_logits(logp, label):
    return (logp.max() - logp.sum() / len(logp)) ** 2


CASES = {
    "clamped_entropy": ({"tau": 0.99}, lambda logp, y: clamped_entropy(logp, y, 0.99)),
    "ihl": ({}, ihl),
    "unilogit": ({}, unilogit),
    "flat_logits": ({}, flat_logits),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_plain_implementation(name):
    given, value = CASES[name]
    model, batch = with_lora(tiny_llama(seed=1)), random_batch(seed=3)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = step_loss(model, batch, entries_for(("forget", {"objective": name, **given}))).total
    expected = plain.over_labels(model, batch, [0, 1, 2], value)
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(x, trained) for x in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("certain", [0, 1])
def test_they_are_finite_at_the_extremes(name, certain):
    """p_y = 1 (certain = label) and p_y = 0 to float32."""
    logits = torch.zeros(1, 5).scatter(1, torch.tensor([[certain]]), 200.0).requires_grad_()
    value = OBJECTIVES[name].function(logits.log_softmax(-1), None, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
