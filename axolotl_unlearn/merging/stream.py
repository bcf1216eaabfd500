"""Merges of one tensor with bounded memory: ties and linear in blocks of rows.

mergekit's own kernel holds about nine copies of a tensor at once and sorts it whole. Here trimming
finds the k-th largest magnitude by partition (O(n), one copy), and mergekit's kernel then merges
blocks of rows of already trimmed changes. The result has the same bits
(tests/test_merging_stream.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from axolotl_unlearn.merging.methods import merge_delta
from axolotl_unlearn.merging.recipe import Recipe

BLOCK = 4_000_000  # entries a block: 16 MB in float32
WHOLE = 1_000_000  # tensors below this go to mergekit whole

STREAMED = ("ties", "linear", "magnitude_prune")

Rows = Callable[[slice], Tensor]  # rows of one tensor in float32


@dataclass(frozen=True)
class Threshold:
    """What trimming keeps: magnitudes above ``limit`` and the first ``spare`` equal to it."""

    limit: float
    spare: int


def blocks(shape: Sequence[int], entries: int = BLOCK) -> list[slice]:
    """Row ranges of at most ``entries`` entries (at least one row)."""
    rows = shape[0]
    step = max(1, entries * rows // max(1, int(np.prod(shape))))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def threshold(change: Rows, shape: Sequence[int], density: float, least: int) -> Threshold | None:
    """The limit that keeps int(density * n) entries of largest magnitude (at least ``least``).

    None: everything is kept. Holds one float32 copy of the tensor.
    """
    if density >= 1:
        return None
    count = int(np.prod(shape))
    keep = max(least, int(density * count))
    if keep == 0:
        return Threshold(float("inf"), 0)
    magnitudes = np.empty(count, dtype=np.float32)
    position = 0
    for rows in blocks(shape):
        part = change(rows).abs().flatten().numpy()
        magnitudes[position : position + part.size] = part
        position += part.size
    magnitudes.partition(count - keep)
    limit = magnitudes[count - keep]
    # Everything right of the pivot is >= limit, so only that side holds larger entries.
    above = int(np.count_nonzero(magnitudes[count - keep :] > limit))
    return Threshold(float(limit), keep - above)


def trim(change: Tensor, limit: Threshold | None, seen: int) -> tuple[Tensor, int]:
    """Zero what the threshold drops. ``seen``: entries equal to the limit in earlier blocks."""
    if limit is None:
        return change, seen
    magnitude = change.abs()
    keep = magnitude > limit.limit
    equal = magnitude == limit.limit
    ties = int(equal.sum())
    if ties and seen < limit.spare:
        order = equal.flatten().cumsum(0).reshape(equal.shape) + seen
        keep |= equal & (order <= limit.spare)
    return torch.where(keep, change, 0.0), seen + ties


def merge_blocks(
    recipe: Recipe, name: str, shape: Sequence[int], base: Rows, parents: Sequence[Rows]
) -> Tensor:
    """One merged full-weight tensor [shape], float32, for the methods in STREAMED."""

    def change(parent: Rows) -> Rows:
        return lambda rows: parent(rows) - base(rows)

    limits: list[Threshold | None] = [None] * len(parents)
    if recipe.method != "linear":
        # mergekit's ties keeps at least one entry; pruning by magnitude may keep none.
        least = 1 if recipe.method == "ties" else 0
        limits = [threshold(change(parent), shape, recipe.density, least) for parent in parents]
    # What is left after trimming is the method at density 1 (for pruning: a plain sum).
    rest = replace(recipe, density=1.0)
    if recipe.method == "magnitude_prune":
        rest = replace(rest, method="linear")
    seen = [0] * len(parents)
    merged = torch.empty(*shape)
    for rows in blocks(shape):
        own = base(rows)
        changes = []
        for index, parent in enumerate(parents):
            kept, seen[index] = trim(parent(rows) - own, limits[index], seen[index])
            changes.append(kept)
        merged[rows] = own + merge_delta(rest, name, torch.zeros_like(own), changes)
    return merged


def merge_tensor(
    recipe: Recipe,
    name: str,
    shape: Sequence[int],
    base: Rows,
    parents: Sequence[Rows],
    *,
    whole: int = WHOLE,
) -> Tensor:
    """One merged full-weight tensor, by mergekit at once when small, else in blocks."""
    count = int(np.prod(shape)) if shape else 1
    if recipe.method in STREAMED and count > whole and len(shape) > 1:
        return merge_blocks(recipe, name, shape, base, parents)
    everything = slice(0, shape[0]) if shape else slice(None)
    return merge_delta(recipe, name, base(everything), [parent(everything) for parent in parents])


def peak_bytes(recipe: Recipe, count: int, parents: int) -> int:
    """Estimate of the memory to merge one tensor of ``count`` entries, in bytes."""
    if recipe.method in STREAMED and count > WHOLE:
        return 4 * (2 * count + (4 + 3 * parents) * BLOCK)
    return 4 * count * (3 + 4 * parents)
