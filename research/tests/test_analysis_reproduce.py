"""The paper's tables and figures from two tiny runs, one with checkpoints and one without."""

from __future__ import annotations

import json

import pytest
import torch
from merging_models import runs_and_data, tiny_adapter

from axolotl_unlearn.merging.recipe import METHODS
from axolotl_unlearn.store import Store
from research.analysis.paper import TABLE_2
from research.analysis.reproduce import main, page
from research.merging.remembered import remembered


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("reproduce")
    runs_and_data(root, {"over": 0, "under": 0})
    for step, size in ((5, 0.005), (10, 0.02)):
        tiny_adapter(root / "over" / f"checkpoint-{step}", root / "base", train_seed=1, step=size)
    log = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "retain/nll": 1.0}]
    (root / "over/trainer_state.json").write_text(json.dumps({"log_history": log}))
    return root


def test_everything_that_the_runs_allow(made):
    main([f"--{name}={made / name}" for name in ("base", "over", "under", "data", "out")])
    result = json.loads((made / "out/results.json").read_text())
    assert set(result["figures"]) == {
        "figure_5_density", "path", "layers", "figure_3_losses", "figure_2_over", "figure_4_over",
    }  # fmt: skip
    for name in result["figures"]:
        assert (made / f"out/{name}.png").stat().st_size > 2000
    merges = {(r["recipe"]["method"], r["recipe"]["space"]) for r in result["table_2"]}
    assert merges == {(m, s) for m in METHODS for s in ("delta", "factors")}
    assert len(result["table_2"]) == 20
    assert [row["step"] for row in result["figure_2"]] == [0, 5, 10]
    assert [row["step"] for row in result["figure_4"]["over"]] == [5]
    assert sum("under" in line for line in result["left_out"]) == 2
    kept = result["equal_retention"]
    assert [row["name"] for row in kept["rows"]] == ["over", "under", "TIES"]
    original = result["parents"]["original"]["utility"]
    for row in kept["rows"]:
        assert row["scores"]["utility"] >= kept["keep"] * original and 0 <= row["amount"] <= 1
    text = (made / "out/reproduction.md").read_text()
    assert "| TIES | " in text
    assert "| ties | factors | average |" in text and "0.806" in text
    # the paper's value stands only beside PEFT's scale in factor space
    assert text.count("0.244") == 1 and page(result) == text


def test_faults_end_with_a_sentence(made, capsys):
    arguments = [f"--{name}={made / name}" for name in ("base", "over", "data", "out")]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, f"--under={made / 'nothing'}"])
    assert stop.value.code == 2 and "axolotl train" in capsys.readouterr().err


def test_short_has_the_merges_of_the_paper_alone(made, tmp_path):
    words = [f"--{name}={made / name}" for name in ("base", "over", "under", "data")]
    main([*words, f"--out={tmp_path}", "--short", "--limit=30"])
    result = json.loads((tmp_path / "results.json").read_text())
    assert {row["recipe"]["method"] for row in result["table_2"]} == set(TABLE_2)
    assert len(result["table_2"]) == 5
    assert {row["recipe"]["space"] for row in result["table_2"]} == {"factors"}
    assert [row["recipe"]["density"] for row in result["figure_5"]] == [0.6, 0.8, 1.0]
    assert "path" not in result and "equal_retention" not in result
    assert "figure_2" in result  # the run with checkpoints has it all the same


def test_scores_follow_the_weights_and_not_the_order_of_calls(tmp_path):
    """They were kept by position: in another order of recipes old scores went to new merges."""
    calls = []

    def model(value):
        layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(layer.weight, value)
        torch.nn.init.zeros_(layer.bias)
        return layer

    def score(layer):
        calls.append(layer.weight.item())
        return {"aggregate": layer.weight.item() / 10}

    first = remembered(score, Store(tmp_path), "data", 1)
    assert [first(model(v))["aggregate"] for v in (1, 2)] == pytest.approx([0.1, 0.2])
    again = remembered(score, Store(tmp_path), "data", 1)
    assert [again(model(v))["aggregate"] for v in (2, 3, 1)] == pytest.approx([0.2, 0.3, 0.1])
    assert calls == [1, 2, 3]
    path = max(tmp_path.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    path.write_text('{"aggregate": 0.')  # killed while writing
    assert again(model(3))["aggregate"] == pytest.approx(0.3) and calls == [1, 2, 3, 3]
    remembered(score, Store(tmp_path), "other data", 1)(model(1))
    assert calls == [1, 2, 3, 3, 1]
