"""Calibration (UWC) and choice of layers (CRU): by hand, then as commands."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from attack_models import make_lab
from click.testing import CliRunner
from conftest import tiny_llama
from fault_codes import fails

from research.__main__ import research
from research.merging.calibrate import calibrate
from research.merging.lab import Lab
from research.merging.layers import choose_layers, layer_of, layer_scores, layers, patched, rank_sum

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base and a run that moved both layers; one that moved the first alone."""
    root = tmp_path_factory.mktemp("lab")
    base = tiny_llama()
    base.save_pretrained(root / "base")
    for name, moved in (("over", ("0", "1")), ("first", ("0",))):
        with torch.no_grad():
            for key, weight in base.named_parameters():
                if layer_of(key) in moved:
                    weight.add_(torch.randn_like(weight))
        base.save_pretrained(root / name)
        base = tiny_llama()
    return root


@pytest.fixture(scope="module")
def lab(made):
    return Lab(made / "base", [made / "over", made / "first"])


@pytest.fixture
def model(lab):
    return lab.resident_model()


def distance_score(lab):
    """retain = 1 - |w - base| / |over - base|, forget = 1 - retain; linear along the mix."""
    over = dict(lab.parent_weights(0))

    def length(weights) -> float:
        gaps = (weights[n].detach() - lab.base_weights[n] for n in lab.names)
        return math.sqrt(sum(float(gap.square().sum()) for gap in gaps))

    def score(model):
        retain = 1 - length(dict(model.named_parameters())) / length(over)
        return {"retain": retain, "forget": 1 - retain, "aggregate": 0.5}

    return score


def test_the_lab_holds_what_moved_and_leaves_nothing_of_the_last(lab, model):
    assert {layer_of(name) for name in lab.names} == {"0", "1"}
    first = dict(lab.parent_weights(1))
    assert all(torch.equal(first[n], lab.base_weights[n]) == (layer_of(n) == "1") for n in first)
    lab.load(lab.load(model, 0), None)
    assert all(torch.equal(model.state_dict()[n], w) for n, w in lab.base_weights.items())


def test_other_shapes_are_refused(made, tmp_path):
    tiny_llama(vocabulary=29).save_pretrained(tmp_path)
    with fails("lab.other-weights"):
        Lab(made / "base", [tmp_path])


def test_calibration_bisects_to_the_threshold(lab, model):
    """retain(a) = 1 - a: keep .7 is met up to a = .3, and bisection stops within .01 below it."""
    found = calibrate(lab, model, distance_score(lab), 0, keep=0.7, tolerance=0.01)
    assert found["monotone"] and 0.29 <= found["amount"] <= 0.3
    assert found["scores"]["retain"] == pytest.approx(1 - found["amount"], abs=1e-4)
    assert len(found["points"]) <= 5 + 5
    # the model holds the calibrated mix
    assert distance_score(lab)(model)["retain"] == pytest.approx(1 - found["amount"], abs=1e-4)


def test_calibration_takes_a_grid_when_the_metric_is_not_monotone(lab, model):
    """retain dips to .5 at a in (.1, .6) and is .9 above up to .8: the answer is .8, not .1."""

    def score(_model):
        share = distance_score(lab)(_model)["forget"]
        value = 1.0 if share <= 0.1 else 0.5 if share < 0.6 else 0.9 if share < 0.81 else 0.2
        return {"retain": value, "aggregate": value}

    found = calibrate(lab, model, score, 0, keep=0.85)
    assert not found["monotone"] and found["amount"] == pytest.approx(0.8)


def test_layers_of_names():
    names = ["model.layers.11.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight",
             "transformer.h.3.attn.c_attn.weight", "model.norm.weight"]  # fmt: skip
    assert [layer_of(name) for name in names] == ["11", "embedding", "head", "3", "other"]


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
    assert chosen["layers"] == ["1"] and [point["k"] for point in chosen["path"]] == [0, 1, 2]
    taken = patched(lab, 0, {"1"})
    assert all(torch.equal(w, taken[n]) for n, w in model.named_parameters() if n in lab.names)


def test_rank_sum_shares_ranks_of_equal_values():
    """forget ranks 1.5, 1.5, 3 and retain ranks 2, 3, 1: sums 3.5, 4.5, 4."""
    rows = [
        {"layer": name, "alone": {"forget": forget, "retain": retain}}
        for name, forget, retain in (("a", 0.9, 0.5), ("b", 0.9, 0.4), ("c", 0.1, 0.6))
    ]
    assert rank_sum(rows) == ["a", "c", "b"]


def test_the_commands(tmp_path):
    made = make_lab()
    data = shutil.copytree(made.data, tmp_path / "data")
    for part, side in (("member", "forget"), ("nonmember", "retain")):
        rows = [json.loads(line) for line in (data / f"{side}.jsonl").read_text().splitlines()]
        texts = [
            {"id": f"{row['id']}-{n}", "document": row["input"] + row["output"]}
            for row in rows
            for n in range(2)
        ]
        (data / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    shutil.copy(ROOT / "examples/demo/general.jsonl", data)
    words = ["--base", made.memorised, "--data", data, "--out", tmp_path / "a.json"]

    def analyse(*more) -> tuple[str, dict | list]:
        found = CliRunner().invoke(research, list(map(str, ["analyse", *more, *words])))
        assert found.exit_code == 0, found.output
        return found.output, json.loads((tmp_path / "a.json").read_text("utf-8"))

    said, found = analyse("layers", "--parent", made.unlearned)
    best = max(found["path"], key=lambda point: point["scores"]["aggregate"])
    assert found["scores"] == best["scores"] and "Best aggregate with layers:" in said
    said, found = analyse("retention", made.unlearned, "--metric", "retain")
    assert 0 <= found[0]["amount"] <= 1 and "share" in said
