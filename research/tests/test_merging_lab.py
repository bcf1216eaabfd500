"""Merges on one resident model: lab, calibration, layers, interpolation; scores known by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from merging_models import merged_copy, runs_and_data, tiny_adapter, tiny_model, weights

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging import Recipe
from axolotl_unlearn.merging.sources import open_base
from research.analysis.sweep import densities, path, sweep, table_two_recipes
from research.merging.calibrate import calibrate, equal_retention
from research.merging.lab import Lab, merged_model
from research.merging.layers import (
    choose_layers,
    layer_of,
    layer_scores,
    layers,
    patched,
    rank_sum,
)

METHOD_RECIPES = [
    Recipe(),
    Recipe(method="linear", scale="sum"),
    Recipe(method="dare_ties", density=0.5, seed=3),
    Recipe(method="magnitude_prune", density=0.3),
    Recipe(space="factors"),
    Recipe(method="dare_linear", space="factors", scale="sum", density=0.7, seed=2),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("lab")
    tiny_model(root / "base")
    for name, seed in (("over", 1), ("under", 2)):
        tiny_adapter(root / name, root / "base", train_seed=seed)
    merged_copy(root / "over", root / "base", root / "over_full")
    return root


@pytest.fixture(scope="module")
def lab(made):
    return Lab(made / "base", [made / "over", made / "under"])


@pytest.fixture
def model(lab):
    return lab.resident_model()


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "recipe", METHOD_RECIPES, ids=lambda recipe: f"{recipe.space}-{recipe.method}"
)
def test_a_merge_in_memory_is_the_merge_on_disk(made, lab, model, recipe, tmp_path):
    lab.load(model, recipe)
    parents = [made / "over", made / "under"]
    written = merged_model(parents, made / "base", tmp_path / "out", recipe)
    expected = weights(written)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)


def test_loading_leaves_nothing_of_the_last_candidate(lab, model, made):
    start = state(model)
    for source in (Recipe(), 0, Recipe(method="linear", space="factors"), 1):
        lab.load(model, source)
    over = weights(made / "over_full")
    lab.load(model, 0)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, over[name], rtol=0, atol=1e-7)
    lab.load(model, None)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, start[name])


def test_untouched_weights_of_full_models_are_not_kept(made):
    """A full model is written whole; only its 8 adapted weights moved."""
    lab = Lab(made / "base", [made / "over_full"])
    assert len(lab.names) == 8
    assert not lab.factors_possible and Lab(made / "base", [made / "over"]).factors_possible


def distance_score(lab):
    """retain = 1 - |w - base| / |over - base|, forget = 1 - retain; linear along the mix."""
    over = dict(lab.parent_weights(0))
    length = math.sqrt(
        sum(float((over[n] - lab.base_weights[n]).square().sum()) for n in lab.names)
    )

    def score(model):
        own = dict(model.named_parameters())
        moved = sum(
            float((own[n].detach() - lab.base_weights[n]).square().sum()) for n in lab.names
        )
        retain = 1 - math.sqrt(moved) / length
        return {"retain": retain, "forget": 1 - retain, "aggregate": 0.5}

    return score


def test_calibration_bisects_to_the_threshold(lab, model):
    """retain(a) = 1 - a: keep .7 is met up to a = .3, and bisection stops within .01 below it."""
    found = calibrate(lab, model, distance_score(lab), 0, keep=0.7, tolerance=0.01)
    assert found.monotone and 0.29 <= found.amount <= 0.3
    assert found.scores["retain"] == pytest.approx(1 - found.amount, abs=1e-4)
    assert len(found.points) <= 5 + 5
    # the model holds the calibrated mix
    assert distance_score(lab)(model)["retain"] == pytest.approx(1 - found.amount, abs=1e-4)


def test_calibration_takes_a_grid_when_the_metric_is_not_monotone(lab, model):
    """retain dips to .5 at a in (.1, .6) and is .9 above up to .8: the answer is .8, not .1."""

    def score(_model):
        share = distance_score(lab)(_model)["forget"]
        value = 1.0 if share <= 0.1 else 0.5 if share < 0.6 else 0.9 if share < 0.81 else 0.2
        return {"retain": value, "aggregate": value}

    found = calibrate(lab, model, score, 0, keep=0.85)
    assert not found.monotone and found.amount == pytest.approx(0.8)


def test_calibration_keeps_the_whole_model_when_nothing_is_lost(lab, model):
    assert calibrate(lab, model, lambda _: {"retain": 1.0}, 1).amount == 1.0
    with pytest.raises(UnlearnError, match="no 'retain': choose one of utility"):
        calibrate(lab, model, lambda _: {"utility": 1.0}, 1)
    with pytest.raises(UnlearnError, match="not in"):
        calibrate(lab, model, lambda _: {"retain": 1.0}, 1, keep=0)


def test_equal_retention_names_each_method(lab, model):
    rows = equal_retention(
        lab, model, distance_score(lab), {"over": 0, "ties": Recipe()}, keep=0.8, tolerance=0.02
    )
    assert [row["name"] for row in rows] == ["over", "ties"]
    for row in rows:
        assert 0.8 <= row["scores"]["retain"] <= 0.85


def test_layers_of_names():
    names = ["model.layers.11.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight",
             "transformer.h.3.attn.c_attn.weight", "model.norm.weight"]  # fmt: skip
    assert [layer_of(name) for name in names] == ["11", "embedding", "head", "3", "other"]


def test_patching_takes_exactly_the_chosen_layers(lab, made, model):
    over, base = weights(made / "over_full"), weights(made / "base")
    lab.load(model, patched(lab, 0, {"1"}))
    for name, tensor in model.state_dict().items():
        expected = over if ".layers.1." in name else base
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)
    with pytest.raises(UnlearnError, match="layer '7' is not among those that moved: 0, 1"):
        patched(lab, 0, {"7"})


def test_layer_scores_and_choice(lab, model):
    """Layer 1 alone scores best: it is chosen, layer 0 stays the original's."""
    over = dict(lab.parent_weights(0))

    def score(_model):
        own = dict(_model.named_parameters())
        has = {
            layer: all(torch.allclose(own[n], over[n]) for n in lab.names if layer_of(n) == layer)
            for layer in layers(lab)
        }
        forget = 0.2 + 0.7 * has["1"] + 0.1 * has["0"]
        retain = 1.0 - 0.6 * has["0"]
        return {"forget": forget, "retain": retain, "aggregate": (forget + retain) / 2}

    rows = layer_scores(lab, model, score)
    assert [row["layer"] for row in rows] == ["0", "1"]
    assert rows[0]["alone"]["forget"] == pytest.approx(0.3)
    assert rows[0]["without"]["forget"] == pytest.approx(0.9)
    assert rank_sum(rows) == ["1", "0"]
    chosen = choose_layers(lab, model, score)
    assert chosen["layers"] == ["1"]
    assert [point["k"] for point in chosen["path"]] == [0, 1, 2]
    assert score(model)["aggregate"] == chosen["scores"]["aggregate"]


def test_rank_sum_shares_ranks_of_equal_values():
    """forget ranks 1.5, 1.5, 3 and retain ranks 2, 3, 1: sums 3.5, 4.5, 4."""
    rows = [
        {"layer": name, "alone": {"forget": forget, "retain": retain}}
        for name, forget, retain in (("a", 0.9, 0.5), ("b", 0.9, 0.4), ("c", 0.1, 0.6))
    ]
    assert rank_sum(rows) == ["a", "c", "b"]


def test_path_starts_stops_and_ends_on_its_models(lab, model):
    score = distance_score(lab)
    rows = path(lab, model, score, [None, 0, Recipe()], names=["base", "over", "ties"], points=2)
    assert [row["stop"] for row in rows] == ["base", None, "over", None, "ties"]
    assert [row["position"] for row in rows] == [0, 0.5, 1, 1.5, 2]
    assert [row["scores"]["forget"] for row in rows[:3]] == pytest.approx([0, 0.5, 1], abs=1e-4)


def test_sweep_scores_each_recipe(lab, model):
    recipes = densities(Recipe(), (0.5, 1.0))
    rows = sweep(lab, model, distance_score(lab), recipes)
    assert [row["recipe"]["density"] for row in rows] == [0.5, 1.0]
    lab.load(model, recipes[0])
    assert rows[0]["scores"] == distance_score(lab)(model)
    assert len(table_two_recipes(Recipe(), factors=True)) == 20
    assert len(table_two_recipes(Recipe(), factors=False)) == 10


# --- python -m research analyse ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    root = tmp_path_factory.mktemp("analyse")
    runs_and_data(root, {"over": 0, "under": 0})
    return root


def analyse(root, *words) -> tuple[str, dict]:
    from research.__main__ import research

    out = root / f"{words[0]}.json"
    arguments = ["analyse", *words, "--base", root / "base", "--out", out]
    result = CliRunner().invoke(research, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    return result.output, json.loads(out.read_text())


def test_analyse_vectors(scored):
    said, result = analyse(scored, "vectors", "--parents", scored / "over", scored / "under")
    base = open_base(scored / "base")
    over, under = (
        torch.cat([(t - base.tensors[n]).flatten().double() for n, t in Lab(
            base, [scored / name]).parent_weights(0)])
        for name in ("over", "under")
    )  # fmt: skip
    assert result["norm"] == pytest.approx([float(over.norm()), float(under.norm())], rel=1e-5)
    cosine = float(over @ under / over.norm() / under.norm())
    assert result["cosine"]["0,1"] == pytest.approx(cosine, abs=1e-6)
    assert f"{cosine:.3f}" in said.splitlines()[1] and "opposite signs" in said
    assert [row["layer"] for row in result["layers"]] == ["0", "1"]


def test_analyse_layers(scored):
    words = ("--parent", scored / "over", "--data", scored / "data")
    said, result = analyse(scored, "layers", *words)
    assert [row["layer"] for row in result["rows"]] == ["0", "1"]
    best = max(result["path"], key=lambda point: point["scores"]["aggregate"])
    assert result["scores"] == best["scores"] and "Best aggregate with layers:" in said


def test_analyse_retention(scored):
    words = ("--parents", scored / "over", scored / "under", "--data", scored / "data")
    said, result = analyse(scored, "retention", *words, "--keep", "1")
    assert len(result) == 2 and all(0 <= row["amount"] <= 1 for row in result)
    assert all(row["scores"]["utility"] >= row["threshold"] for row in result)
    assert str(scored / "over") in said
