"""`axolotl-unlearn augment`: every kind through the command, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from data_tokenizers import byte_tokenizer

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.data.augment import IDK
from axolotl_unlearn.data.checks import check_entries, check_records
from axolotl_unlearn.files import declare, read_manifest

FORGET = [
    {"id": "a1sc1", "input": "The mill of", "output": "Ada burned.", "task": "Task1"},
    {"id": "b1qa0", "input": "Who burned it?", "output": "Ben did.", "task": "Task2"},
    {"id": "c1sc1", "input": "", "output": "A tale without a prompt.", "task": "Task1"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1024, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path, model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forget.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FORGET))
    entry = {"path": str(tmp_path / "forget.jsonl"), "type": "axolotl_unlearn.data.forget"}
    block = {"forget": {"objective": "dpo"}}
    path = tmp_path / "my.yml"
    path.write_text(
        yaml.safe_dump({"base_model": str(model), "unlearn": block, "datasets": [entry]})
    )
    return path


def call(*words, code: int = 0) -> str:
    done = CliRunner().invoke(unlearn, ["augment", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def faults(config: Path, file: Path, role: str) -> list[str]:
    cfg = yaml.safe_load(config.read_text())
    cfg["datasets"].append({"path": str(file), "type": f"axolotl_unlearn.data.{role}"})
    if role == "forget":
        cfg["unlearn"] = {"forget": {"objective": "ga"}}
    return check_entries(cfg) + check_records(cfg).faults


def test_idk(config, tmp_path):
    """Different ones for a row, the same for a seed, and the file is what the type takes."""
    said = call("idk", config, "--number", 3)
    file = tmp_path / "out/augment/idk.jsonl"
    first = rows(file)
    assert "9 rows for 3 forget rows." in said and "axolotl_unlearn.data.alternative" in said
    assert [row["id"] for row in first] == [r["id"] for r in FORGET for _ in range(3)]
    assert {row["output"] for row in first} <= set(IDK)
    assert len({(row["id"], row["output"]) for row in first}) == 9
    assert faults(config, file, "alternative") == []
    call("idk", config, "--number", 3)
    assert rows(file) == first
    call("idk", config, "--number", 3, "--seed", 1)
    assert rows(file) != first


def test_a_model_writes(config, tmp_path):
    """Two different texts a row, the same in a second call; a row more changes none of those that
    are there, another seed does."""
    file = tmp_path / "rows.jsonl"
    options = ("--number", 2, "--max-new-tokens", 8, "--out", file)
    said = call("alternatives", config, *options)
    first = rows(file)
    assert "6 rows for 3 forget rows." in said and len(first) == 6
    texts = {(row["input"], row["output"]) for row in first}
    assert len(texts) == 6 and not texts & {(r["input"], r["output"]) for r in FORGET}
    assert faults(config, file, "alternative") == []
    more = {"id": "d1qa0", "input": "And who else?", "output": "Cid.", "task": "Task2"}
    with (tmp_path / "forget.jsonl").open("a") as opened:
        opened.write(json.dumps(more) + "\n")
    assert "8 rows for 4 forget rows." in call("alternatives", config, *options)
    assert rows(file)[:6] == first
    call("alternatives", config, *options, "--seed", 1)
    assert rows(file)[:6] != first


def test_what_was_written_is_private_and_listed(config, tmp_path):
    """The rows hold prompts of the forget rows."""
    call("alternatives", config, "--max-new-tokens", 4)
    folder = tmp_path / "out/augment"
    assert (folder / "alternatives.jsonl").stat().st_mode & 0o077 == 0
    assert [one["path"] for one in read_manifest(folder)["entries"]] == ["alternatives.jsonl"]


def test_rows_that_the_config_takes_already_are_written_anew(config, tmp_path):
    """An entry for the file that is written: it was missing, then its rows were augmented too."""
    file = tmp_path / "alternatives.jsonl"
    text = yaml.safe_load(config.read_text())
    text["datasets"].append({"path": str(file), "type": "axolotl_unlearn.data.alternative"})
    config.write_text(yaml.safe_dump(text))
    for seed in (1, 2):
        call("alternatives", config, "--out", file, "--max-new-tokens", 4, "--seed", seed)
        assert len(rows(file)) == len(FORGET)


@pytest.mark.parametrize("role", ["forget", "retain", "alternative", None])
def test_another_file_is_never_replaced(config, tmp_path, role):
    """It replaced whatever --out named: rows to keep, too."""
    file = tmp_path / "mine.jsonl"
    file.write_text("mine")
    if role:
        text = yaml.safe_load(config.read_text())
        text["datasets"].append({"path": str(file), "type": f"axolotl_unlearn.data.{role}"})
        config.write_text(yaml.safe_dump(text))
    if role in ("forget", "retain"):  # listed by another command of ours
        declare(tmp_path, file, "texts")
    assert "name a new file with --out" in call("idk", config, "--out", "mine.jsonl", code=2)
    assert file.read_text() == "mine"


def test_a_model_that_says_nothing_else_is_refused(config, tmp_path):
    """Nothing but the end of the sequence is likely."""
    from transformers import AutoModelForCausalLM

    cfg = yaml.safe_load(config.read_text())
    mute = AutoModelForCausalLM.from_pretrained(cfg["base_model"])
    with torch.no_grad():
        mute.lm_head.weight.zero_()
        mute.lm_head.weight[256] = 50.0 * mute.model.norm.weight
    mute.generation_config.suppress_tokens = [t for t in range(259) if t != 256]
    mute.save_pretrained(tmp_path / "mute")
    byte_tokenizer().save_pretrained(tmp_path / "mute")
    said = call("alternatives", config, "--model", tmp_path / "mute", code=2)
    assert "row 'a1sc1': the model wrote 0 of 1 other answers in 4 draws" in said
    assert "Ada" not in said and not (tmp_path / "out/augment/alternatives.jsonl").exists()


def test_configs_that_cannot_be_augmented(config, tmp_path):
    cfg = yaml.safe_load(config.read_text())
    for change, message in (
        ({"datasets": []}, "`datasets` has no forget rows"),
        ({"unlearn": {"data": {"rows": {"type": "alpaca"}}}}, "rows of Axolotl's own types"),
        ({"base_model": str(tmp_path / "none")}, "does not exist"),
    ):
        path = tmp_path / "other.yml"
        path.write_text(yaml.safe_dump(cfg | change))
        assert message in call("alternatives", path, "--out", tmp_path / "x.jsonl", code=2)
