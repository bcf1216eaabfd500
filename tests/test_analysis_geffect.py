"""G-effect on a model whose gradients are known, and as a forecast of a real step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from axolotl_unlearn.analysis.geffect import g_effect, smoothed
from axolotl_unlearn.errors import UnlearnError


class Two(nn.Module):
    """Two scalars, in layers 0 and 1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        with torch.no_grad():
            self.layers[0].weight.fill_(2.0)
            self.layers[1].weight.fill_(-1.0)


def test_inner_products_by_hand():
    """x = 2, y = -1. L = x^2 + y: gradient (4, 1). Retain x y: (-1, 2): e = -4 + 2 = -2, by layer
    -4 and 2; cosine -2 / sqrt(17 * 5). Forget -x: (-1, 0): e = -4."""

    def x(model):
        return model.layers[0].weight[0, 0]

    def y(model):
        return model.layers[1].weight[0, 0]

    result = g_effect(
        Two(),
        {"l": lambda m: x(m) ** 2 + y(m)},
        {"retain": lambda m: x(m) * y(m), "forget": lambda m: -x(m)},
    )["l"]
    assert result["retain"]["all"] == pytest.approx(-2)
    assert result["retain"]["layers"] == {"0": pytest.approx(-4), "1": pytest.approx(2)}
    assert result["retain"]["cosine"] == pytest.approx(-2 / 85**0.5)
    assert result["forget"]["all"] == pytest.approx(-4)


def test_it_forecasts_the_change_of_a_small_step():
    """After one step of size 1e-4 along -grad L, the risk has changed by about -1e-4 e."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    inputs, targets = torch.randn(2, 9, 5).double(), torch.randn(2, 9, 1).double()

    def loss(side):
        return lambda m: (m(inputs[side]) - targets[side]).square().mean()

    effect = g_effect(model, {"l": loss(0)}, {"r": loss(1)})["l"]["r"]["all"]
    before = float(loss(1)(model))
    loss(0)(model).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-4 * parameter.grad
    assert float(loss(1)(model)) - before == pytest.approx(-1e-4 * effect, rel=5e-3)


def test_smoothing_and_faults():
    assert smoothed([1.0, 0.0, 1.0]) == pytest.approx([1.0, 0.6, 0.76])
    with pytest.raises(UnlearnError, match="finite number"):
        g_effect(Two(), {"l": lambda m: m.layers[0].weight[0, 0] * float("nan")}, {})
