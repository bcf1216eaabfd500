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
from typing import Any

from axolotl_unlearn.errors import UnlearnError

#: Our name -> mergekit's on full weights. Breadcrumbs removes the largest `gamma` and the smallest
#: entries: with gamma 0 that is pruning by magnitude, to the last bit.
MERGEKIT = {
    "linear": "task_arithmetic",
    "ties": "ties",
    "dare_linear": "dare_linear",
    "dare_ties": "dare_ties",
    "magnitude_prune": "breadcrumbs",
}
METHODS = tuple(MERGEKIT)
SPACES = ("delta", "factors")
SCALES = ("average", "sum")


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
        for name in values:
            _known("parameter", name, [field.name for field in fields(cls)])
        weights = values.get("weights")
        return cls(**{**values, "weights": None if weights is None else tuple(map(float, weights))})

    def to_dict(self) -> dict:
        return {**asdict(self), "weights": list(self.weights) if self.weights else None}

    def for_parents(self, count: int) -> Recipe:
        """The same recipe, checked for what mergekit would take in silence, with a weight for each
        of ``count`` parents."""
        if count < 1:
            raise UnlearnError("No parents to merge: give at least one with --parents.")
        weights = tuple(map(float, self.weights if self.weights is not None else (1.0,) * count))
        if len(weights) != count:
            raise UnlearnError(
                f"{len(weights)} weights for {count} parents: give one weight for each parent."
            )
        for name, allowed in (("method", METHODS), ("space", SPACES), ("scale", SCALES)):
            _known(name, getattr(self, name), allowed)
        if not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise UnlearnError(
                f"density {self.density!r} is not in (0, 1]: it is the share of entries kept, "
                "0.8 for 80 %."
            )
        if not all(map(math.isfinite, weights)):
            raise UnlearnError(f"weights {list(weights)} hold a NaN or infinity: use numbers.")
        if not any(weights):
            raise UnlearnError("All merge weights are 0: the result would be the base.")
        if self.scale == "average" and min(weights) < 0:
            raise UnlearnError(
                "A negative weight with scale 'average' divides by a sum that can vanish: use "
                "scale 'sum', or the parent 'negate:PATH' with a positive weight."
            )
        return replace(self, weights=weights)

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
        own = self.delta_parameters()
        shared = {"normalize": own.pop("normalize")}
        return {
            "merge_method": MERGEKIT[self.method],
            "base_model": local(base),
            "models": [
                {"model": local(parent), "parameters": {"weight": float(weight), **own}}
                for parent, weight in zip(parents, self.weights or (), strict=True)
            ],
            "parameters": shared,
            "dtype": "float32",
        }


def _known(what: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(allowed)}."
        raise UnlearnError(f"Unknown merge {what} {value!r}: {hint}")


def local(path: str) -> str:
    """The path so that mergekit never takes it for a hub repository (it asks the hub about
    anything with fewer than two slashes)."""
    return path if path[:1] in "/~" or path.startswith(("./", "../")) else f"./{path}"
