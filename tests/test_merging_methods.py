"""Merge arithmetic against PEFT's own adapters and against formulas written out in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_models import tiny_adapter, tiny_model

from axolotl_unlearn.merging.methods import (
    merge_delta,
    merge_factor,
    merge_factors,
    seeded,
    tensor_seed,
)
from axolotl_unlearn.merging.recipe import METHODS, SCALES, Recipe
from axolotl_unlearn.merging.sources import open_parent

SHAPE = (7, 11)


def tensors(count=2, shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    return base, [base + 0.1 * torch.randn(shape, generator=generator) for _ in range(count)]


def recipe(method="ties", **changes):
    return Recipe(method=method, **changes).for_parents(len(changes.get("weights", (1, 1))))


# --- full weights -----------------------------------------------------------------------------


def trimmed(change, density, least=0):
    """The int(density * n) entries of largest magnitude, the rest zero."""
    count = max(least, int(density * change.numel()))
    order = change.abs().flatten().argsort(descending=True)[:count]
    kept = torch.zeros_like(change).flatten()
    kept[order] = change.flatten()[order]
    return kept.reshape(change.shape)


def by_hand(method, base, parents, density, weights, average, seed, name):
    """Each method in float64, without mergekit."""
    changes = [(parent - base).double() for parent in parents]
    if method in ("ties", "magnitude_prune"):
        changes = [trimmed(change, density, least=int(method == "ties")) for change in changes]
    if method.startswith("dare") and density < 1:
        kept = []
        with seeded(seed, name):
            for change in changes:
                mask = torch.bernoulli(torch.full(base.shape, density)).double()
                # mergekit restores the L1 norm where DARE's paper divides by the density
                kept.append(change * mask * change.abs().sum() / (change * mask).abs().sum())
        changes = kept
    changes = [weight * change for weight, change in zip(weights, changes, strict=True)]
    if method in ("ties", "dare_ties"):
        elected = torch.where(sum(changes) >= 0, 1.0, -1.0)
        agree = [(change.sign() == elected).double() for change in changes]
        merged = sum(change * mask for change, mask in zip(changes, agree, strict=True))
        share = sum(weight * mask for weight, mask in zip(weights, agree, strict=True))
        share = torch.where(share == 0, 1.0, share)
    else:
        merged, share = sum(changes), sum(weights)
    return base.double() + (merged / share if average else merged)


@pytest.mark.parametrize(
    ("method", "scale", "weights"),
    itertools.product(METHODS, SCALES, [(1.0, 1.0), (0.3, 1.2), (1.0, 0.5, 2.0)]),
)
def test_delta_merges_equal_the_formula(method, scale, weights):
    base, parents = tensors(len(weights))
    chosen = recipe(method, scale=scale, density=0.6, weights=weights, seed=3)
    merged = merge_delta(chosen, "layer.weight", base, parents)
    expected = by_hand(method, base, parents, 0.6, weights, scale == "average", 3, "layer.weight")
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=2e-6)


def test_breadcrumbs_without_outliers_is_magnitude_pruning():
    """Two readings of mergekit's code disagree whether gamma 0 keeps everything or nothing."""
    from mergekit.sparsify import magnitude_outliers
    from peft.utils.merge_utils import magnitude_based_pruning

    tensor = tensors()[1][0]
    for density in (0.01, 0.3, 0.5, 0.8, 0.99):
        assert torch.equal(
            magnitude_outliers(tensor, density, gamma=0.0), magnitude_based_pruning(tensor, density)
        )


def test_drops_depend_on_seed_and_tensor_only():
    base, parents = tensors()
    first = recipe("dare_linear", density=0.5, seed=1)
    merged = merge_delta(first, "a", base, parents)
    torch.manual_seed(99)
    assert torch.equal(merged, merge_delta(first, "a", base, parents))
    assert not torch.equal(merged, merge_delta(replace(first, seed=2), "a", base, parents))
    assert not torch.equal(merged, merge_delta(first, "b", base, parents))
    before = torch.random.get_rng_state()
    merge_delta(first, "a", base, parents)
    assert torch.equal(before, torch.random.get_rng_state())


# --- properties ---------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@settings(max_examples=25, deadline=None)
@given(SIZES, st.sampled_from(["linear", "ties"]), st.integers(1, 4), st.integers(0, 99))
def test_identical_parents_give_the_parent_back(shape, method, count, seed):
    base, (parent,) = tensors(1, shape, seed)
    chosen = Recipe(method=method, density=1.0).for_parents(count)
    merged = merge_delta(chosen, "x", base, [parent] * count)
    torch.testing.assert_close(merged, parent, rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(0, 99))
def test_ties_at_density_one_with_equal_signs_is_the_mean(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    base = torch.zeros(shape)
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    parents = [sign * (0.1 + torch.rand(shape, generator=generator)) for _ in range(3)]
    chosen = Recipe(density=1.0).for_parents(3)
    merged = merge_delta(chosen, "x", base, parents)
    torch.testing.assert_close(merged, torch.stack(parents).mean(0), rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    SIZES,
    st.sampled_from(["linear", "ties", "magnitude_prune"]),
    st.sampled_from(SCALES),
    st.floats(0.1, 1.0),
    st.integers(0, 99),
)
def test_the_order_of_parents_does_not_matter(shape, method, scale, density, seed):
    base, parents = tensors(3, shape, seed)
    chosen = Recipe(method=method, scale=scale, density=density, weights=(1.0, 0.5, 0.25))
    merged = merge_delta(chosen.for_parents(3), "x", base, parents)
    turned = replace(chosen, weights=(0.25, 1.0, 0.5)).for_parents(3)
    other = merge_delta(turned, "x", base, [parents[2], parents[0], parents[1]])
    torch.testing.assert_close(merged, other, rtol=0, atol=2e-6)


# --- LoRA factors -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """base, and adapters (alpha = r: scaling 1) and (alpha = 3 r), two each."""
    root = tmp_path_factory.mktemp("adapters")
    tiny_model(root / "base", kind="llama")
    for alpha in (4, 12):
        for number in (1, 2):
            tiny_adapter(
                root / f"a{alpha}_{number}", root / "base", train_seed=number, rank=4, alpha=alpha
            )
    return root


def peft_merge(root, names, weights, method, density, seed=None, monkeypatch=None):
    """The merged factors of a real ``add_weighted_adapter``."""
    from peft import PeftModel
    from peft.tuners.lora import model as lora_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, root / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(root / name, adapter_name=name)
    if seed is not None:
        # PEFT draws from the global generator: give it our seed of each tensor as it comes to it.
        keys = {
            tensor: key
            for key, tensor in (
                (key, tuple(open_parent(root / names[0]).tensors[key].flatten()[:4].tolist()))
                for key in open_parent(root / names[0]).tensors
            )
        }
        real = getattr(lora_model, method)

        def drawn(factors, *arguments):
            torch.manual_seed(tensor_seed(seed, keys[tuple(factors[0].flatten()[:4].tolist())]))
            return real(factors, *arguments)

        monkeypatch.setattr(lora_model, method, drawn)
    model.add_weighted_adapter(
        names, list(weights), "merged", combination_type=method, density=density
    )
    return {
        name.replace(".merged.weight", ".weight"): tensor
        for name, tensor in model.state_dict().items()
        if ".merged.weight" in name
    }


PEFT_SCALE = {
    "linear": "sum",
    "dare_linear": "sum",
    "magnitude_prune": "sum",
    "ties": "average",
    "dare_ties": "average",
}


@pytest.mark.parametrize("alpha", [4, 12])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 1.7), (1.0, -0.5)])
@pytest.mark.parametrize("method", METHODS)
def test_factor_merges_equal_peft(adapters, method, weights, alpha, monkeypatch):
    names = [f"a{alpha}_1", f"a{alpha}_2"]
    if min(weights) < 0 and PEFT_SCALE[method] == "average":
        pytest.skip("refused: a mean with negative weights")
    chosen = Recipe(
        method=method,
        space="factors",
        density=0.8,
        weights=weights,
        scale=PEFT_SCALE[method],
        seed=5,
    ).for_parents(2)
    merged = merge_factors(chosen, [open_parent(adapters / name) for name in names])
    random = method.startswith("dare")
    expected = peft_merge(adapters, names, weights, method, 0.8, 5 if random else None, monkeypatch)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name


def test_average_of_equal_factors_is_the_parent():
    """(A + A)/2 and (B + B)/2: B A is the parent's change again; the sum gives four times it."""
    a, b = torch.randn(2, 6), torch.randn(5, 2)
    for scale, times in (("average", 1), ("sum", 4)):
        for method in ("linear", "magnitude_prune"):
            chosen = recipe(method, space="factors", scale=scale, density=1.0)
            merged_a = merge_factor(chosen, "x.lora_A.weight", [a, a], [1.0, 1.0])
            merged_b = merge_factor(chosen, "x.lora_B.weight", [b, b], [1.0, 1.0])
            torch.testing.assert_close(merged_b @ merged_a, times * (b @ a))


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0)])
def test_sum_of_the_ties_family_is_count_times_the_mean(method, weights):
    """Sum = mean times the number of agreeing parents; signs elected on unweighted factors."""
    factors = [torch.randn(4, 6) for _ in weights]
    names = dict(space="factors", density=0.7, weights=weights, seed=4)
    mean = merge_factor(recipe(method, **names), "x.lora_B.weight", factors, [1.0, 1.0])
    total = merge_factor(
        recipe(method, scale="sum", **names), "x.lora_B.weight", factors, [1.0, 1.0]
    )
    if method == "ties":
        kept = [trimmed(factor, 0.7) for factor in factors]
    else:
        with seeded(4, "x.lora_B.weight"):
            kept = [factor * torch.bernoulli(torch.full((4, 6), 0.7)) / 0.7 for factor in factors]
    elected = torch.where(sum(kept) >= 0, 1.0, -1.0)
    count = sum((factor.sign() == elected).float() for factor in kept)
    torch.testing.assert_close(total, mean * count.clamp(min=1))


def test_half_precision_factors_still_equal_peft(tmp_path):
    """bfloat16 has many equal magnitudes: which one is trimmed depends on the sort."""
    from safetensors.torch import load_file, save_file

    tiny_model(tmp_path / "base", kind="llama")
    for number in (1, 2):
        folder = tmp_path / f"h_{number}"
        tiny_adapter(folder, tmp_path / "base", train_seed=number)
        file = folder / "adapter_model.safetensors"
        save_file({k: t.bfloat16() for k, t in load_file(file).items()}, file)
    names = ["h_1", "h_2"]
    for method in ("ties", "magnitude_prune"):
        chosen = Recipe(
            method=method, space="factors", density=0.5, scale=PEFT_SCALE[method]
        ).for_parents(2)
        merged = merge_factors(chosen, [open_parent(tmp_path / name) for name in names])
        expected = peft_merge(tmp_path, names, (1.0, 1.0), method, 0.5)
        for name, tensor in merged.items():
            assert torch.equal(tensor, expected[name].float()), (method, name)
