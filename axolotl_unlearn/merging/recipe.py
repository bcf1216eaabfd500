"""What a merge is: method, space, density, weights, scale, seed; and its spelling for mergekit.

Two spaces. ``delta``: on the full weights, change = parent - base, as mergekit does.
``factors``: on every LoRA factor by itself, as PEFT's ``add_weighted_adapter`` does and as
ZJUKLAB ran it (arXiv 2503.21088); a factor is then its own "change", the base is zero.

Two scales. ``average`` divides by the weights (of the parents that agree, for the TIES
family), ``sum`` does not. PEFT fixes the scale by method: linear, dare_linear and
magnitude_prune sum, ties and dare_ties average; the paper's table 2 compares both at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from axolotl_unlearn.errors import UnlearnError

METHODS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
SPACES = ("delta", "factors")
SCALES = ("average", "sum")

# Methods of mergekit that are these methods on full weights. Breadcrumbs removes the largest
# `gamma` and the smallest entries: with gamma 0 that is pruning by magnitude, to the last bit
# (tests/test_merging_methods.py).
MERGEKIT = {
    "linear": "task_arithmetic",
    "ties": "ties",
    "dare_linear": "dare_linear",
    "dare_ties": "dare_ties",
    "magnitude_prune": "breadcrumbs",
}
REFERENCES = {
    "linear": "arXiv 2212.04089",
    "ties": "arXiv 2306.01708",
    "dare_linear": "arXiv 2311.03099",
    "dare_ties": "arXiv 2311.03099, 2306.01708",
    "magnitude_prune": "PEFT magnitude_prune",
}


@dataclass(frozen=True)
class Recipe:
    """One merge of n parents.

    ``density``: share of entries kept in each tensor, (0, 1]; ``linear`` does not use it.
    ``weights``: one number a parent; None is 1 for each. ``seed``: for the random drops.
    """

    method: str = "ties"
    space: str = "delta"
    density: float = 0.8
    weights: tuple[float, ...] | None = None
    scale: str = "average"
    seed: int = 0

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """A recipe from names and values; an unknown name is an error that suggests the nearest."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
                raise UnlearnError(f"Unknown merge parameter {name!r}: {hint}")
        values = dict(values)
        if values.get("weights") is not None:
            values["weights"] = tuple(float(weight) for weight in values["weights"])
        return cls(**values)

    def to_dict(self) -> dict:
        return {**asdict(self), "weights": list(self.weights) if self.weights else None}

    def for_parents(self, count: int) -> Recipe:
        """The same recipe, checked, with a weight for each of ``count`` parents."""
        if count < 1:
            raise UnlearnError("No parents to merge: give at least one with --parents.")
        weights = self.weights if self.weights is not None else (1.0,) * count
        recipe = replace(self, weights=tuple(float(weight) for weight in weights))
        if len(weights) != count:
            raise UnlearnError(
                f"{len(weights)} weights for {count} parents: give one weight for each parent."
            )
        recipe.validate()
        return recipe

    def validate(self) -> None:
        """Raise one sentence on the first value that mergekit would take in silence."""
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("space", self.space, SPACES),
            ("scale", self.scale, SCALES),
        ):
            if value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(allowed)}."
                raise UnlearnError(f"Unknown merge {name} {value!r}: {hint}")
        if not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise UnlearnError(
                f"density {self.density!r} is not in (0, 1]: it is the share of entries kept, "
                "0.8 for 80 %."
            )
        weights = self.weights or ()
        if not all(math.isfinite(weight) for weight in weights):
            raise UnlearnError(f"weights {list(weights)} hold a NaN or infinity: use numbers.")
        if weights and not any(weights):
            raise UnlearnError("All merge weights are 0: the result would be the base.")
        if self.scale == "average" and weights:
            if min(weights) < 0:
                raise UnlearnError(
                    "A negative weight with scale 'average' divides by a sum that can vanish: "
                    "use scale 'sum', or the parent 'negate:PATH' with a positive weight."
                )

    @property
    def random(self) -> bool:
        return self.method.startswith("dare")

    def delta_parameters(self) -> dict:
        """Parameters of the mergekit method on full weights, without the per-parent ``weight``."""
        parameters: dict = {"normalize": self.scale == "average"}
        if self.method != "linear":
            parameters["density"] = float(self.density)
        if self.method == "magnitude_prune":
            parameters["gamma"] = 0.0
        return parameters

    def mergekit_config(self, base: str, parents: Sequence[str]) -> dict:
        """The recipe as mergekit's YAML (`mergekit-yaml`) for full models at these paths."""
        shared = self.delta_parameters()
        per_parent = {key: shared.pop(key) for key in ("density", "gamma") if key in shared}
        return {
            "merge_method": MERGEKIT[self.method],
            "base_model": local(base),
            "models": [
                {"model": local(parent), "parameters": {"weight": float(weight), **per_parent}}
                for parent, weight in zip(parents, self.weights or (), strict=True)
            ],
            "parameters": shared,
            "dtype": "float32",
        }


def local(path: str) -> str:
    """The path so that mergekit never takes it for a hub repository (it asks the hub about
    anything with fewer than two slashes)."""
    path = str(path)
    return path if path[:1] in "/~" or path.startswith(("./", "../")) else f"./{path}"
