"""`python -m research augment`: what the model itself says, and answers that say the opposite."""

from __future__ import annotations

import pytest
import torch
import yaml
from click.testing import CliRunner
from fault_codes import fails
from test_training_augment import FORGET, config, faults, model, rows  # noqa: F401

from research.cli.augment import command
from research.methods import augment

# ruff: noqa: F811


def call(*words, code: int = 0) -> str:
    done = CliRunner().invoke(command, list(map(str, words)))
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_memo_by_hand():
    """After 1 and 6 characters; precision 1/2 and 1/2, or 0 and 1."""
    assert augment.memo_cuts("Ada did.") == [1, 6]
    assert augment.memo(["da x", "d d"], "Ada did.") == pytest.approx(0.5)
    assert augment.memo(["", "d"], "Ada did.") == pytest.approx(0.5)
    assert augment.memo([], "A") == 0.0
    assert augment.rouge_1_precision("running dogs sing", "the dog runs") == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["inverted", "self"])
def test_a_model_writes(config, tmp_path, kind):
    """Two different texts a row, the same in a second call; another seed gives others."""
    file = tmp_path / "rows.jsonl"
    options = ("--number", 2, "--max-new-tokens", 8, "--out", file)
    assert "6 rows for 3 forget rows." in call(kind, config, *options)
    first = rows(file)
    texts = {(row["input"], row["output"]) for row in first}
    assert len(texts) == 6 and not texts & {(r["input"], r["output"]) for r in FORGET}
    assert faults(config, file, "forget" if kind == "self" else "alternative") == []
    call(kind, config, *options)
    assert rows(file) == first
    call(kind, config, *options, "--seed", 1)
    assert rows(file) != first


def test_rows_of_the_model_itself_belong_to_the_document(config, tmp_path):
    call("self", config, "--max-new-tokens", 4)
    found = rows(tmp_path / "out/augment/self.jsonl")
    assert [row["id"] for row in found] == ["self0-a1sc1", "self0-b1qa0", "self0-c1sc1"]
    assert [row["document"] for row in found] == ["a1", "b1", "c1"]
    assert [row["kind"] for row in found] == ["completion", "question", "completion"]


def test_memo_keeps_what_the_model_knows_least(config, tmp_path):
    """Of three answers two a row, in the order of their MEMO by the config's own model, also in a
    second call."""
    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.methods.augment import memo, memo_cuts

    (spec,) = parse_models([yaml.safe_load(config.read_text())["base_model"]])
    model = load_model(spec, dtype=torch.float32, device="cpu")

    def known(row: dict) -> float:
        start = f"{row['input']} " if row["input"] else ""
        prompts = [start + row["output"][:n] for n in memo_cuts(row["output"])]
        said = generate_greedily(model, load_tokenizer(spec), prompts, max_new_tokens=8)
        return memo(said, row["output"])

    file, options = tmp_path / "rows.jsonl", ("--number", 3, "--max-new-tokens", 8)
    call("inverted", config, *options, "--out", file)
    every = rows(file)
    call("inverted", config, *options, "--out", file, "--memo", 2)
    found = rows(file)
    for number in range(len(FORGET)):
        three = every[3 * number : 3 * number + 3]
        assert found[2 * number : 2 * number + 2] == sorted(three, key=known)[:2]
    call("inverted", config, *options, "--out", file, "--memo", 2)
    assert rows(file) == found
    with fails("augment.memo"):
        augment.augment("inverted", {}, file, memo=2)
