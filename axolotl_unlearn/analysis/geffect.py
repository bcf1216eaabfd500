"""G-effect (arXiv 2502.19301): does a step of an objective help or hurt what we want to keep?

e = <grad L, grad R> with L the objective that training descends and R the risk (mean NLL) on the
rows in question. To first order a step of size lr changes R by -lr e: on retain rows e > 0 is
wanted (their NLL falls), on forget rows e < 0 (it rises). Per group of layers, because conflicts
sit in some layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.layers import layer_of

Loss = Callable[[nn.Module], Tensor]


def gradients(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    """Gradient of ``loss(model)`` for every trainable weight, on the CPU in float32."""
    model.zero_grad(set_to_none=True)
    value = loss(model)
    if value.ndim or not torch.isfinite(value):
        raise UnlearnError("G-effect needs losses that are one finite number.")
    value.backward()
    found = {
        name: parameter.grad.detach().float().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def g_effect(model: nn.Module, objectives: Mapping[str, Loss], risks: Mapping[str, Loss]) -> dict:
    """``{objective: {risk: {"all": e, "cosine": e / (|L| |R|), "layers": {layer: e}}}}``.

    ``objectives``: the parts of the training loss (weighted as trained), ``risks``: mean NLL of
    retain and forget rows. One backward each; gradients of all risks are kept at once.
    """
    kept = {name: gradients(model, risk) for name, risk in risks.items()}
    result: dict = {}
    for name, objective in objectives.items():
        own = gradients(model, objective)
        result[name] = {risk: _product(own, other) for risk, other in kept.items()}
    return result


def _product(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict:
    layers: dict[str, float] = {}
    for name in first.keys() & second.keys():
        value = float(first[name].double().flatten() @ second[name].double().flatten())
        layer = layer_of(name)
        layers[layer] = layers.get(layer, 0.0) + value
    total = sum(layers.values())
    norms = [
        sum(float(tensor.double().square().sum()) for tensor in side.values()) ** 0.5
        for side in (first, second)
    ]
    scale = norms[0] * norms[1]
    order = sorted(
        layers, key=lambda layer: (not layer.isdigit(), int(layer) if layer.isdigit() else 0, layer)
    )
    return {
        "all": total,
        "cosine": total / scale if scale else None,
        "layers": {layer: layers[layer] for layer in order},
    }


def smoothed(values: list[float], keep: float = 0.6) -> list[float]:
    """Exponential mean along training: keep * old + (1 - keep) * new (the paper's plots: .6)."""
    means: list[float] = []
    for value in values:
        means.append(value if not means else keep * means[-1] + (1 - keep) * value)
    return means
