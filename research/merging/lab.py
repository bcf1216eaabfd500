"""Many merges on one resident model: base and adapters are read once, weights swapped in place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.checks import check, initialisation_cosines
from axolotl_unlearn.merging.methods import merge_delta, merge_factors
from axolotl_unlearn.merging.recipe import Recipe
from axolotl_unlearn.merging.run import merge
from axolotl_unlearn.merging.sources import Adapter, Parent, open_base, open_parent
from axolotl_unlearn.merging.weights import Model

CACHE_LIMIT = 8_000_000_000  # bytes of parents' weights kept in memory; above it they are re-read


def merged_model(
    parents: Sequence[str | Path], base: str | Path, out: Path, recipe: Recipe, **how: Any
) -> Path:
    """A merge on disk as a full model; a factor merge's adapter is put into the base."""
    if recipe.space != "factors":
        return merge(parents, base, out, **recipe.to_dict(), **how)
    adapter = merge(parents, base, out.with_name(f"{out.name}-adapter"), **recipe.to_dict(), **how)
    model = merge([adapter], base, out, method="linear", **how)
    (adapter / "merge.json").replace(model / "merge.json")
    shutil.rmtree(adapter)
    return model


class Lab:
    """Base, parents and the weights that any parent moves.

    Only weights that some parent touches are ever replaced; ``restore`` brings the base back.
    """

    def __init__(
        self,
        base: str | Path | Model,
        parents: Sequence[str | Path | Parent],
        *,
        force: bool = False,
    ):
        self.base = base if isinstance(base, Model) else open_base(base)
        self.parents = [
            parent if isinstance(parent, Model | Adapter) else open_parent(parent)
            for parent in parents
        ]
        self.force = force
        self.warnings = check(
            Recipe(method="linear").for_parents(len(self.parents)),
            self.base,
            self.parents,
            force=force,
        )
        self.names = [
            name
            for name in self.base.tensors
            if any(parent.touches(name) for parent in self.parents)
            and self.base.tensors.layout[name][1].startswith(("F", "BF"))
        ]
        self.base_weights = {name: self.base.tensors[name].float() for name in self.names}
        self._cache: dict[tuple[int, str], Tensor] | None = {}
        size = 4 * sum(tensor.numel() for tensor in self.base_weights.values())
        if size * len(self.parents) > CACHE_LIMIT:
            self._cache = None
        # Full models are written whole: weights that no run changed need no merging.
        self.names = [name for name in self.names if self._moved(name)]
        self.base_weights = {name: self.base_weights[name] for name in self.names}

    def _weight(self, index: int, name: str) -> Tensor:
        if self._cache is None:
            return self.parents[index].weight(name, self.base_weights[name])
        if (index, name) not in self._cache:
            self._cache[index, name] = self.parents[index].weight(name, self.base_weights[name])
        return self._cache[index, name]

    def _moved(self, name: str) -> bool:
        own = self.base_weights[name]
        return any(
            not torch.equal(self._weight(index, name), own) for index in range(len(self.parents))
        )

    @property
    def factors_possible(self) -> bool:
        """Whether factor merges make sense: adapters of one rank, modules and draw."""
        try:
            check(
                Recipe(method="linear", space="factors").for_parents(len(self.parents)),
                self.base,
                self.parents,
                force=self.force,
            )
        except UnlearnError:
            return False
        return True

    def weights(self, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
        """(name, merged float32 weight) of every weight that moves."""
        recipe = recipe.for_parents(len(self.parents))
        if recipe.space == "factors":
            yield from self._factor_weights(recipe)
            return
        for name in self.names:
            own = self.base_weights[name]
            parents = [self._weight(index, name) for index in range(len(self.parents))]
            yield name, merge_delta(recipe, name, own, parents)

    def _factor_weights(self, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
        if not self.factors_possible:
            check(recipe, self.base, self.parents, force=self.force)
        adapters = [parent for parent in self.parents if isinstance(parent, Adapter)]
        merged = merge_factors(recipe, adapters)
        first = adapters[0]
        for name, (key_a, key_b) in first.factors.items():
            product = merged[key_b] @ merged[key_a]
            if "lora_embedding" in key_a or first.config.get("fan_in_fan_out"):
                product = (merged[key_b] @ merged[key_a]).T
            if name in self.base_weights:
                yield name, self.base_weights[name] + product

    def parent_weights(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """The moved weights of one parent."""
        for name in self.names:
            yield name, self._weight(index, name)

    def load(
        self, model: nn.Module, source: Recipe | Mapping[str, Tensor] | int | None
    ) -> nn.Module:
        """Put a merge, a parent (by its number), given weights, or the base (None) into ``model``.

        ``model`` must be the base's architecture; weights are copied in place.
        """
        if source is None:
            weights = iter(self.base_weights.items())
        elif isinstance(source, Recipe):
            weights = self.weights(source)
        elif isinstance(source, int):
            weights = self.parent_weights(source)
        else:
            weights = iter({**self.base_weights, **source}.items())
        own = dict(model.named_parameters())
        own.update(model.named_buffers())
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise UnlearnError(f"{self.base.path}: the model has no weight {name}.")
                own[name].copy_(tensor)
        return model

    def initialisation_cosines(self) -> list[float]:
        adapters = [parent for parent in self.parents if isinstance(parent, Adapter)]
        return initialisation_cosines(adapters) if len(adapters) == len(self.parents) else []

    def resident_model(self, device: str = "cpu") -> nn.Module:
        """The base as a transformers model in float32, ready for ``load``."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base.path, dtype=torch.float32)
        return model.to(device).eval()


Scores = Mapping[str, float]
Score = Callable[[nn.Module], Scores]
