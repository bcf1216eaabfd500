"""Factor-wise merges: the merged adapter's tensors, and its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from axolotl_unlearn.merging.methods import factor_multipliers, merge_factor
from axolotl_unlearn.merging.recipe import MERGEKIT, Recipe, local
from axolotl_unlearn.merging.sources import Adapter


def merge_factors(
    recipe: Recipe, parents: Sequence[Adapter], progress: Callable[[str], None] = lambda name: None
) -> dict[str, Tensor]:
    """Every factor merged on its own in float32; the result has scaling 1 (alpha = r).

    Equals PEFT's ``add_weighted_adapter`` at weights w (scale: sum for linear, dare_linear and
    magnitude_prune, average for ties and dare_ties), bit for bit unless drops are random.
    """
    merged = {}
    for name, keys in parents[0].factors.items():
        scalings = [parent.scaling(name) for parent in parents]
        for key in keys:
            factors = [parent.tensors[key].float() for parent in parents]
            merged[key] = merge_factor(recipe, key, factors, scalings)
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
    """The recipe for `mergekit-pytorch`, or None where stock mergekit has no such merge.

    It has none for DARE (rescaled to the L1 norm there), unequal weights of TIES (signs elected
    after weighting there) and negative weights (A and B differ). Elsewhere the bits are PEFT's but
    for two cases: a multiplier of TIES that is no power of two (applied after the mean, so rounded
    elsewhere) and entries of equal magnitude, of which either sort trims others.
    """
    scalings = [parent.scaling(next(iter(parent.factors))) for parent in parents]
    a, b = (factor_multipliers(recipe, scalings, side) for side in "AB")
    own: dict = {} if recipe.method == "linear" else {"density": float(recipe.density)}
    shared: dict = {"normalize": False}
    if recipe.method == "magnitude_prune":
        own["gamma"] = 0.0
    elif recipe.method == "ties" and a == b and len(set(a)) == 1:
        shared = {"normalize": recipe.scale == "average", "lambda": b[0]}
        a = b = [1.0] * len(a)
    elif recipe.method != "linear":
        return None
    if a != b:
        return None
    return {
        "merge_method": MERGEKIT[recipe.method],
        "base_model": local(zeros),
        "models": [
            {
                "model": local(str(parent.path / "adapter_model.safetensors")),
                "parameters": {"weight": weight, **own},
            }
            for parent, weight in zip(parents, a, strict=True)
        ],
        "parameters": shared,
        "dtype": "float32",
    }


def zeros_like(parent: Adapter) -> dict[str, Tensor]:
    """The base that `mergekit-pytorch` needs for a factor merge."""
    return {key: torch.zeros(parent.tensors.shape(key)) for key in parent.tensors}
