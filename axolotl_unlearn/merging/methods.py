"""The arithmetic: mergekit's methods, and PEFT's where mergekit has none that is equal.

All functions work on one tensor of all parents, in float32, and never touch a model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from axolotl_unlearn.merging.recipe import MERGEKIT, Recipe


def tensor_seed(seed: int, name: str) -> int:
    """A seed for the drops of one tensor: independent of the order in which tensors come."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


@contextmanager
def seeded(seed: int, name: str):
    """The global CPU generator set for this tensor, and put back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tensor_seed(seed, name))
        yield


def register_methods() -> None:
    """Add PEFT's factor-wise methods to mergekit's registry (once a process).

    ``peft_ties``, ``peft_dare_linear``, ``peft_dare_ties``, ``peft_magnitude_prune``: each calls
    PEFT's own function. They differ from mergekit's namesakes in that the sign is elected on
    the unweighted tensors, the mean divides by the count, and DARE rescales by 1/density
    (mergekit: to the same L1 norm). ``normalize: false`` leaves the mean of the TIES family a sum.
    """
    from mergekit import merge_methods
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import BasePolicy, InputContract
    from mergekit.merge_methods.easy_define import merge_method

    known = {method.spec.name for method in merge_methods.registered_methods()}
    for name in ("ties", "dare_linear", "dare_ties", "magnitude_prune"):
        if f"peft_{name}" not in known:
            registry.register(
                merge_method(
                    _peft_kernel(name),
                    name=f"peft_{name}",
                    pretty_name=f"PEFT {name} on LoRA factors",
                    reference_url="https://arxiv.org/abs/2503.21088",
                    contract=InputContract(base=BasePolicy.REQUIRED),
                )
            )


def _peft_kernel(method: str):
    """A mergekit kernel around ``peft.utils.merge_utils.<method>``."""
    from mergekit.merge_methods.base import PerNonBase, TensorGroup

    def kernel(group, weight, density=1.0, seed=0, normalize=True):
        from peft.utils import merge_utils

        base = group.base.tensor
        factors = [entry.tensor - base for entry in group.non_base]
        weights = torch.tensor([weight[entry.id] for entry in group.non_base])
        with seeded(seed, group.metadata.name or ""):
            if normalize or not method.endswith("ties"):
                return base + getattr(merge_utils, method)(factors, weights, density)
            drop = {"ties": "magnitude", "dare_ties": "random"}[method]
            factors = [
                merge_utils.prune(factor, density, method=drop, rescale=drop == "random")
                for factor in factors
            ]
        stacked = torch.stack(factors)
        agree = merge_utils.calculate_majority_sign_mask(stacked)
        weighted = stacked * merge_utils.reshape_weight_task_tensors(stacked, weights)
        return base + (weighted * agree).sum(dim=0)

    # Written out because mergekit resolves them by name and this file postpones annotations.
    kernel.__annotations__ = {
        "group": TensorGroup,
        "weight": PerNonBase[float],
        "density": float,
        "seed": int,
        "normalize": bool,
        "return": Tensor,
    }
    return kernel


def _call(method: str, base: Tensor, tensors: Sequence[Tensor], parameters: dict, name: str):
    from mergekit.merge_methods.api import merge_tensors

    register_methods()
    return merge_tensors([base, *tensors], method, parameters=parameters, base_index=0, name=name)


def merge_delta(recipe: Recipe, name: str, base: Tensor, parents: Sequence[Tensor]) -> Tensor:
    """One full-weight tensor of the merged model, by mergekit. All tensors of one shape."""
    parameters = {**recipe.delta_parameters(), "weight": list(recipe.weights or ())}
    with seeded(recipe.seed, name):
        return _call(MERGEKIT[recipe.method], base, parents, parameters, name)


def factor_multipliers(
    weights: Sequence[float], scalings: Sequence[float], side: str
) -> list[float]:
    """PEFT's multiplier of each parent's factor: sqrt(|weight * alpha / r|), sign on A only."""
    products = [weight * scaling for weight, scaling in zip(weights, scalings, strict=True)]
    return [
        math.sqrt(abs(product)) * (-1.0 if side == "A" and product < 0 else 1.0)
        for product in products
    ]


def factor_call(
    recipe: Recipe, scalings: Sequence[float], side: str, *, half: bool = False
) -> tuple[str, dict]:
    """The mergekit method and its parameters that merge factor ``side`` (A or B) as PEFT would.

    ``scalings``: alpha / r of each parent; the merged adapter has scaling 1. Stock methods
    of mergekit are used where they give PEFT's bits: sums always; ties when all multipliers are
    one power of two. ``half``: the factors were stored in 16 bits, so equal magnitudes are
    common and which of them is trimmed depends on the sort: PEFT's own function is used.

    With ``average`` the sums (linear, dare_linear, magnitude_prune) divide by
    sum_j sqrt(|w_j|), so that equal parents give the parent back in both factors.
    """
    weights = recipe.weights or ()
    multipliers = factor_multipliers(weights, scalings, side)
    average = recipe.scale == "average"
    density = float(recipe.density)
    total = sum(math.sqrt(abs(weight)) for weight in weights)
    if recipe.method in ("linear", "dare_linear", "magnitude_prune") and average:
        multipliers = [multiplier / total for multiplier in multipliers]
    if recipe.method == "linear":
        return "task_arithmetic", {"weight": multipliers, "normalize": False}
    if recipe.method == "magnitude_prune":
        if half:
            return "peft_magnitude_prune", {"weight": multipliers, "density": density}
        return "breadcrumbs", {
            "weight": multipliers,
            "density": density,
            "gamma": 0.0,
            "normalize": False,
        }
    if recipe.method == "dare_linear":
        return "peft_dare_linear", {
            "weight": multipliers,
            "density": density,
            "seed": recipe.seed,
        }
    # The TIES family: stock where the multipliers can be applied after the mean without rounding.
    exact = multipliers[0] > 0 and math.frexp(multipliers[0])[0] == 0.5
    if recipe.method == "ties" and len(set(multipliers)) == 1 and exact and not half:
        return "ties", {
            "weight": [1.0] * len(multipliers),
            "density": density,
            "normalize": average,
            "lambda": multipliers[0],
        }
    parameters = {"weight": multipliers, "density": density, "normalize": average}
    if recipe.random:
        parameters["seed"] = recipe.seed
    return f"peft_{recipe.method}", parameters


def merge_factor(
    recipe: Recipe,
    name: str,
    factors: Sequence[Tensor],
    scalings: Sequence[float],
    *,
    half: bool = False,
) -> Tensor:
    """One LoRA factor of the merged adapter (whose alpha is its rank)."""
    side = "A" if "lora_A" in name or "lora_embedding_A" in name else "B"
    method, parameters = factor_call(recipe, scalings, side, half=half)
    return _call(method, torch.zeros_like(factors[0]), factors, parameters, name)
