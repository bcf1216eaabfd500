"""Factor-wise merges: the merged adapter's tensors, and its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axolotl_unlearn.merging.checks import check_finite
from axolotl_unlearn.merging.methods import factor_call, merge_factor
from axolotl_unlearn.merging.recipe import Recipe, local
from axolotl_unlearn.merging.sources import Adapter

HALF = ("F16", "BF16")


def merge_factors(
    recipe: Recipe, parents: Sequence[Adapter], progress: Callable[[str], None] = lambda name: None
) -> dict[str, Tensor]:
    """Every factor merged on its own in float32; the result has scaling 1 (alpha = r).

    Equals PEFT's ``add_weighted_adapter`` at weights w (scale: sum for linear, dare_linear and
    magnitude_prune, average for ties and dare_ties), bit for bit unless drops are random.
    """
    half = any(dtype in HALF for parent in parents for _, dtype in parent.tensors.layout.values())
    merged = {}
    for name, keys in parents[0].factors.items():
        scalings = [parent.scaling(name) for parent in parents]
        for key in keys:
            factors = [parent.tensors[key].float() for parent in parents]
            for factor, parent in zip(factors, parents, strict=True):
                check_finite(factor, key, parent.path)
            merged[key] = merge_factor(recipe, key, factors, scalings, half=half)
        progress(name)
    return merged


def adapter_config(template: dict, rank: int) -> dict:
    """A parent's config at this rank with scaling 1."""
    return {
        **template,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def mergekit_config(recipe: Recipe, parents: Sequence[Adapter], zeros: str) -> dict | None:
    """The recipe for `mergekit-pytorch`, or None when sides A and B need different parameters
    (a negative weight) or a method that only we register."""
    scalings = [parent.scaling(next(iter(parent.factors))) for parent in parents]
    method, parameters = factor_call(recipe, scalings, "A")
    if method.startswith("peft_") or (method, parameters) != factor_call(recipe, scalings, "B"):
        return None
    weights = parameters.pop("weight")
    own = {key: parameters.pop(key) for key in ("density", "gamma") if key in parameters}
    return {
        "merge_method": method,
        "base_model": local(zeros),
        "models": [
            {
                "model": local(str(parent.path / "adapter_model.safetensors")),
                "parameters": {"weight": weight, **own},
            }
            for parent, weight in zip(parents, weights, strict=True)
        ],
        "parameters": parameters,
        "dtype": "float32",
    }


def zeros_like(parent: Adapter) -> dict[str, Tensor]:
    """The base that `mergekit-pytorch` needs for a factor merge."""
    return {key: torch.zeros(parent.tensors.shape(key)) for key in parent.tensors}
