"""Block-wise merges have the bits of mergekit's whole-tensor merges, and stay small."""

from __future__ import annotations

import pytest
import torch

from axolotl_unlearn.merging import stream
from axolotl_unlearn.merging.methods import merge_delta
from axolotl_unlearn.merging.recipe import SCALES, Recipe
from axolotl_unlearn.merging.sources import all_finite


def reader(tensor):
    return lambda rows: tensor[rows]


def both(recipe, base, parents, monkeypatch, block):
    monkeypatch.setattr(stream, "BLOCK", block)
    monkeypatch.setattr(stream, "blocks", lambda shape: cut(shape, block))
    merged = stream.merge_blocks(
        recipe, "x", base.shape, reader(base), [reader(parent) for parent in parents]
    )
    return merged, merge_delta(recipe, "x", base, parents)


cut = stream.blocks


@pytest.mark.parametrize("method", stream.STREAMED)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("density", [0.01, 0.33, 0.8, 1.0])
def test_blocks_equal_mergekit_bit_for_bit(method, scale, density, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(13, 17, generator=generator)
    parents = [base + 0.1 * torch.randn(13, 17, generator=generator) for _ in range(3)]
    recipe = Recipe(method=method, scale=scale, density=density, weights=(1.0, 0.5, 2.0))
    for block in (17, 40, 1000):
        merged, expected = both(recipe.for_parents(3), base, parents, monkeypatch, block)
        assert torch.equal(merged, expected)


def test_equal_magnitudes_keep_exactly_the_density(monkeypatch):
    """12 changes of one size, density .5: six survive, whatever the blocks."""
    base = torch.zeros(4, 3)
    parent = torch.ones(4, 3)
    recipe = Recipe(method="ties", density=0.5).for_parents(1)
    for block in (3, 6, 12):
        merged, _ = both(recipe, base, [parent], monkeypatch, block)
        assert int(merged.count_nonzero()) == 6


def test_density_that_keeps_nothing_prunes_everything_but_ties_keeps_one(monkeypatch):
    base = torch.zeros(2, 3)
    parent = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, -6.0]])
    prune = Recipe(method="magnitude_prune", density=0.1).for_parents(1)
    assert both(prune, base, [parent], monkeypatch, 3)[0].count_nonzero() == 0
    ties = Recipe(method="ties", density=0.1).for_parents(1)
    assert both(ties, base, [parent], monkeypatch, 3)[0].tolist() == [[0, 0, 0], [0, 0, -6]]


def test_blocks_cover_every_row_once():
    for shape, entries in (((10, 3), 7), ((1, 5), 2), ((4, 4), 100)):
        rows = [
            row for part in stream.blocks(shape, entries) for row in range(part.start, part.stop)
        ]
        assert rows == list(range(shape[0]))


def test_large_tensors_are_streamed_and_small_ones_are_not(monkeypatch):
    used = []
    real = stream.merge_blocks
    monkeypatch.setattr(stream, "merge_blocks", lambda *a, **k: used.append(a[1]) or real(*a, **k))
    base, parent = torch.zeros(8, 8), torch.ones(8, 8)
    for method, whole, expected in (("ties", 10, ["x"]), ("ties", 64, []), ("dare_ties", 10, [])):
        used.clear()
        stream.merge_tensor(
            Recipe(method=method).for_parents(1),
            "x",
            (8, 8),
            reader(base),
            [reader(parent)],
            whole=whole,
        )
        assert used == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_is_what_isfinite_says(dtype):
    plain = torch.linspace(-3, 3, 9, dtype=dtype)
    extreme = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    for numbers in (plain, extreme, plain[:0], torch.arange(3)):
        assert all_finite(numbers)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 4, 8):
            spoilt = plain.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt)


def test_all_finite_of_float8():
    plain = torch.ones(4).to(torch.float8_e4m3fn)
    assert all_finite(plain)
    assert not all_finite(torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn))
