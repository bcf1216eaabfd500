"""The arithmetic: mergekit's methods on full weights, PEFT's on LoRA factors.

All works on one tensor of all parents, in float32, and never touches a model.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from axolotl_unlearn.merging.recipe import MERGEKIT, Recipe
from axolotl_unlearn.merging.sources import Adapter


def tensor_seed(seed: int, name: str) -> int:
    """A seed for the drops of one tensor: independent of the order in which tensors come."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


@contextmanager
def seeded(seed: int, name: str):
    """The global CPU generator set for this tensor, and put back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tensor_seed(seed, name))
        yield


def merge_delta(recipe: Recipe, name: str, base: Tensor, parents: Sequence[Tensor]) -> Tensor:
    """One full-weight tensor of the merged model, by mergekit. All tensors of one shape."""
    from mergekit.merge_methods.api import merge_tensors

    how = {"parameters": {**recipe.delta_parameters(), "weight": list(recipe.weights or ())}}
    with seeded(recipe.seed, name):
        tensors, method = [base, *parents], MERGEKIT[recipe.method]
        return merge_tensors(tensors, method, base_index=0, name=name, **how)


def _multipliers(recipe: Recipe, scalings: Sequence[float], side: str) -> list[float]:
    """PEFT's multiplier of each parent's factor: sqrt(|weight * scaling|), the sign on A only.

    With ``average`` the sums (linear, dare_linear, magnitude_prune) divide by sum_j sqrt(|w_j|),
    so that equal parents give the parent back in both factors.
    """
    weights = recipe.weights or ()
    averaged = recipe.scale == "average" and not recipe.method.endswith("ties")
    share = sum(math.sqrt(abs(w)) for w in weights) if averaged else 1.0
    products = [weight * scaling for weight, scaling in zip(weights, scalings, strict=True)]
    return [math.sqrt(abs(p)) * (-1 if side == "A" and p < 0 else 1) / share for p in products]


def merge_factor(
    recipe: Recipe, name: str, factors: Sequence[Tensor], scalings: Sequence[float]
) -> Tensor:
    """One LoRA factor of the merged adapter (whose scaling is 1), by PEFT's own function.

    ``scalings``: alpha / r of each parent (alpha / sqrt(r) with rsLoRA).
    """
    from peft.utils import merge_utils

    side = "A" if "lora_A" in name or "lora_embedding_A" in name else "B"
    weights = torch.tensor(_multipliers(recipe, scalings, side))
    density = float(recipe.density)
    with seeded(recipe.seed, name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that density 1 prunes nothing
        if recipe.method == "linear":
            return merge_utils.task_arithmetic(list(factors), weights)
        if recipe.scale == "average" or not recipe.method.endswith("ties"):
            return getattr(merge_utils, recipe.method)(list(factors), weights, density)
        # The TIES family as a sum: PEFT's steps without the division by the count.
        drop = "random" if recipe.random else "magnitude"
        kept = torch.stack(
            [merge_utils.prune(f, density, method=drop, rescale=recipe.random) for f in factors]
        )
    agree = merge_utils.calculate_majority_sign_mask(kept)
    return (kept * merge_utils.reshape_weight_task_tensors(kept, weights) * agree).sum(dim=0)


def merge_factors(
    recipe: Recipe, parents: Sequence[Adapter], progress: bool = False
) -> dict[str, Tensor]:
    """Every factor merged on its own in float32; the result has scaling 1 (alpha = r).

    Equals PEFT's ``add_weighted_adapter`` at weights w (scale: sum for linear, dare_linear and
    magnitude_prune, average for ties and dare_ties), bit for bit unless drops are random.
    """
    from rich.progress import track

    pairs, merged = parents[0].factors, {}
    for name in track(pairs, "merging", transient=True, disable=not progress):
        scalings = [parent.scaling(name) for parent in parents]
        for key in pairs[name]:
            factors = [parent.tensors[key].float() for parent in parents]
            merged[key] = merge_factor(recipe, key, factors, scalings)
    return merged
