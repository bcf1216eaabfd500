"""The paper's tables and figures from two tiny runs, one with checkpoints and one without."""

from __future__ import annotations

import json
import shutil

import pytest
from eval_model import TOKENIZER, made_up_rows, write_folder
from merging_models import tiny_adapter, tiny_model

from axolotl_unlearn.analysis.reproduce import main, page
from axolotl_unlearn.merging.recipe import METHODS


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("reproduce")
    tiny_model(root / "base", vocab_size=1536, max_position_embeddings=128)
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, root / "base" / file.name)
    for name, seed in (("over", 1), ("under", 2)):
        tiny_adapter(root / name, root / "base", train_seed=seed)
    for step, size in ((5, 0.005), (10, 0.02)):
        tiny_adapter(root / "over" / f"checkpoint-{step}", root / "base", train_seed=1, step=size)
    log = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "retain/nll": 1.0}]
    (root / "over/trainer_state.json").write_text(json.dumps({"log_history": log}))
    rows = {side: given[:8] for side, given in made_up_rows(4).items()}
    texts = {
        name: [f"{name} text number {number} of this test" for number in range(20)]
        for name in ("member", "nonmember")
    }
    write_folder(root / "data", rows, texts, general=2)
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
    text = (made / "out/reproduction.md").read_text()
    assert "| ties | factors | average |" in text and "0.806" in text
    # the paper's value stands only beside PEFT's scale in factor space
    assert text.count("0.244") == 1 and page(result) == text


def test_faults_end_with_a_sentence(made, capsys):
    arguments = [f"--{name}={made / name}" for name in ("base", "over", "data", "out")]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, f"--under={made / 'nothing'}"])
    assert stop.value.code == 2 and "axolotl train" in capsys.readouterr().err
