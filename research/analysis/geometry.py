"""Task vectors (parent - base): how long, how alike, where they disagree; angles along a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.sources import Adapter, open_base, open_parent
from axolotl_unlearn.merging.weights import Model
from research.merging.layers import layer_of


def changes(base: str | Path, parents: Sequence[str | Path]) -> Iterator[tuple[str, list[Tensor]]]:
    """(weight name, change of each parent) for every weight that a parent touches, float32."""
    model = open_base(base)
    opened = [open_parent(parent) for parent in parents]
    for name in model.tensors:
        if not any(parent.touches(name) for parent in opened):
            continue
        own = model.tensors[name].float()
        yield name, [parent.weight(name, own) - own for parent in opened]


def task_vectors(base: str | Path, parents: Sequence[str | Path], *, density: float = 1.0) -> dict:
    """How the parents' changes relate, on the whole and per layer.

    Returns ``{"norm": [one a parent], "cosine": {"0,1": value}, "overlap", "sign_conflict",
    "layers": [the same per layer, with "layer"]}``. Norms and cosines are of the whole changes. Of
    the changes trimmed to ``density``, overlap is the share of entries in which at least two
    parents are not zero, sign_conflict the share of those with opposite signs (arXiv 2306.01708).
    """
    if len(parents) < 2:
        raise UnlearnError("Comparing task vectors needs at least two parents.")
    pairs = [(i, j) for i in range(len(parents)) for j in range(i + 1, len(parents))]
    total = _Sums(len(parents), pairs)
    layers: dict[str, _Sums] = defaultdict(lambda: _Sums(len(parents), pairs))
    for name, moved in changes(base, parents):
        kept = [_trimmed(change, density) for change in moved]
        for sums in (total, layers[layer_of(name)]):
            sums.add(moved, kept)
    return {
        **total.result(),
        "density": density,
        "layers": [{"layer": layer, **sums.result()} for layer, sums in layers.items()],
    }


def _trimmed(change: Tensor, density: float) -> Tensor:
    if density >= 1 or change.ndim < 2:
        return change
    from peft.utils.merge_utils import prune

    return prune(change, density, method="magnitude")


class _Sums:
    """Running sums over tensors in float64."""

    def __init__(self, count: int, pairs: Sequence[tuple[int, int]]):
        self.pairs, self.squares = pairs, [0.0] * count
        self.products = dict.fromkeys(pairs, 0.0)
        self.entries = self.shared = self.conflicts = 0

    def add(self, moved: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        flat = [change.flatten().double() for change in moved]
        for index, change in enumerate(flat):
            self.squares[index] += float(change @ change)
        for i, j in self.pairs:
            self.products[i, j] += float(flat[i] @ flat[j])
        signs = torch.stack([change.sign() for change in kept])
        positive, negative = (signs > 0).sum(0), (signs < 0).sum(0)
        self.entries += signs[0].numel()
        self.shared += int((positive + negative >= 2).sum())
        self.conflicts += int(((positive > 0) & (negative > 0)).sum())

    def result(self) -> dict:
        norms = [math.sqrt(square) for square in self.squares]
        return {
            "norm": norms,
            "cosine": {
                f"{i},{j}": product / (norms[i] * norms[j]) if norms[i] * norms[j] else None
                for (i, j), product in self.products.items()
            },
            "overlap": self.shared / self.entries if self.entries else None,
            "sign_conflict": self.conflicts / self.shared if self.shared else None,
        }


def angle(first: Iterable[Tensor], second: Iterable[Tensor]) -> float | None:
    """Degrees between two vectors given as lists of tensors; None when one has no length."""
    product = one = two = 0.0
    for a, b in zip(first, second, strict=True):
        a, b = a.flatten().double(), b.flatten().double()
        product += float(a @ b)
        one += float(a @ a)
        two += float(b @ b)
    if one == 0 or two == 0:
        return None
    return math.degrees(math.acos(max(-1.0, min(1.0, product / math.sqrt(one * two)))))


def update_angles(
    base: str | Path, checkpoints: Mapping[int, str | Path], *, space: str = "delta"
) -> list[dict]:
    """Figure 4 of arXiv 2503.21088 for every checkpoint as the turning point.

    With P_s the weights at step s, a = P_t - P_0 and b = P_final - P_t: the angles (a, b) and
    (a, a + b) in degrees, one row a checkpoint t. The second can never be larger than the first
    (a + b lies between a and b), which the paper's 70-85 and about 90 degrees contradict.
    ``delta``: full weights, P_0 the base; ``factors``: the LoRA factors flattened, P_0 unknown on
    disk and so the first checkpoint given.
    """
    steps = sorted(checkpoints)
    if len(steps) < 2:
        raise UnlearnError("Update angles need at least two checkpoints of one run.")
    opened = {step: open_parent(checkpoints[step]) for step in steps}
    rows = []
    if space == "factors":
        adapters = [opened[step] for step in steps]
        if not all(isinstance(adapter, Adapter) for adapter in adapters):
            raise UnlearnError("Angles in factor space need adapter checkpoints.")
        keys = list(adapters[0].tensors)

        def vector(step: int) -> list[Tensor]:
            return [opened[step].tensors[key].float() for key in keys]

        start, turning = vector(steps[0]), steps[1:-1]
    else:
        model: Model = open_base(base)
        names = [name for name in model.tensors if opened[steps[-1]].touches(name)]
        start = [model.tensors[name].float() for name in names]

        def vector(step: int) -> list[Tensor]:
            return [opened[step].weight(name, own) for name, own in zip(names, start, strict=True)]

        turning = steps[:-1]
    final = vector(steps[-1])
    for step in turning:
        here = vector(step)
        first = [h - s for h, s in zip(here, start, strict=True)]
        second = [f - h for f, h in zip(final, here, strict=True)]
        whole = [f - s for f, s in zip(final, start, strict=True)]
        rows.append(
            {
                "step": step,
                "first_to_rest": angle(first, second),
                "first_to_whole": angle(first, whole),
            }
        )
    return rows
