"""Weights of a model and of runs from it, in memory, put into one resident model in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError

Scores = Mapping[str, float]
Score = Callable[[nn.Module], Scores]


def resident(path: Path, base: Path | None = None) -> nn.Module:
    """A model in float32; an adapter folder is merged into its base."""
    from transformers import AutoModelForCausalLM

    adapter = path / "adapter_config.json"
    if not adapter.is_file():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    from peft import PeftModel

    named = base or Path(json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"])
    return PeftModel.from_pretrained(resident(named), path).merge_and_unload().eval()


class Lab:
    """The base's weights and those of each parent that moved.

    Attributes:
        base_weights: Name -> weight of the base, of those that some parent moved.
    """

    def __init__(self, base: str | Path, parents: Sequence[str | Path]) -> None:
        self.path = Path(base)
        own = resident(self.path).state_dict()
        self._parents: list[dict[str, Tensor]] = []
        for parent in parents:
            moved = resident(Path(parent), self.path).state_dict()
            if moved.keys() != own.keys() or any(moved[n].shape != own[n].shape for n in own):
                raise UnlearnError(
                    f"{parent} has other weights than {base}.", code="lab.other-weights"
                )
            self._parents.append({n: w for n, w in moved.items() if not torch.equal(w, own[n])})
        self.names = [name for name in own if any(name in moved for moved in self._parents)]
        self.base_weights = {name: own[name] for name in self.names}

    def parent_weights(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Name and weight of what some parent moved, as this parent has it."""
        for name in self.names:
            yield name, self._parents[index].get(name, self.base_weights[name])

    def load(self, model: nn.Module, source: Mapping[str, Tensor] | int | None) -> nn.Module:
        """Put a parent (by its number), given weights, or the base (None) into ``model``."""
        given = dict(self.parent_weights(source)) if isinstance(source, int) else source or {}
        model.load_state_dict(self.base_weights | dict(given), strict=False)
        return model

    def resident_model(self) -> nn.Module:
        """The base, ready for `load`."""
        return resident(self.path)
