"""The cures of docs/faults.md: with the fault a run ends in a sentence, with the cure it trains."""

from __future__ import annotations

import pytest
from fault_codes import fails
from huggingface_hub import ModelCard
from test_train_axolotl import assert_same, config, stage, train  # noqa: F401 (a fixture)

from axolotl_unlearn.checks.config import config_faults

SHORT = {"max_steps": 2, "optimizer": "sgd", "learning_rate": 1e-2}


@pytest.mark.parametrize(
    "cure",
    [
        {"micro_batch_size": 1, "gradient_accumulation_steps": 4},
        {"gradient_checkpointing": True},
        {"unlearn": {"chunk_mib": 1}},
    ],
    ids=str,
)
def test_what_saves_memory_keeps_the_result(stage, cure):  # noqa: F811
    whole = train(stage, "memory-plain", **SHORT)
    block = config(stage, "x")["unlearn"] | cure.get("unlearn", {})
    saved = train(stage, "memory-cured", **SHORT | cure | {"unlearn": block})
    assert_same(whole, saved, atol=1e-6)


def test_a_loss_that_is_not_finite_is_cured_by_a_lower_rate(stage):  # noqa: F811
    high = {"optimizer": "sgd", "learning_rate": 1e30, "max_grad_norm": 0.0, "max_steps": 4}
    with fails("training.not-finite"):
        train(stage, "nan", **high)
    out = train(stage, "cured", **high | {"learning_rate": 1e-3, "max_grad_norm": 1.0})
    assert (out / "adapter_model.safetensors").is_file()


def test_a_model_without_a_chat_template(stage):  # noqa: F811
    cfg = config(stage, "x")
    cfg["unlearn"]["data"] = {"chat_template": True}
    assert any("has no chat template" in fault for fault in config_faults(cfg))
    assert config_faults(cfg | {"chat_template": "chatml"}) == []


def test_the_model_card_names_no_row_and_no_file_of_rows(stage, tmp_path, monkeypatch):  # noqa: F811
    """It held the whole config: the name of a person may stand in the name of a file."""
    named = {"unlearn": config(stage, "x")["unlearn"]}
    for side in ("forget", "retain"):
        (stage / f"{side}-of-ada-lund.jsonl").write_bytes((stage / f"{side}.jsonl").read_bytes())
    data = config(stage, "x")["datasets"]
    data = [one | {"path": one["path"].replace(".jsonl", "-of-ada-lund.jsonl")} for one in data]
    out = train(stage, "card", max_steps=1, datasets=data, **named)
    card = (out / "README.md").read_text("utf-8")
    assert "ada-lund" not in card and str(stage) not in card  # its base lies in a folder, too
    assert "made from its base model by axolotl-unlearn" in card
    facts = ModelCard.load(out / "README.md").data
    assert (facts.library_name, facts.base_model) == ("peft", None) and "axolotl" in facts.tags
    published = [path for path in out.glob("*") if path.suffix in (".json", ".md", ".jinja")]
    told = {path.name for path in published if b"ada-lund" in path.read_bytes()}
    assert not told


def test_a_folder_with_the_list_of_forget_rows_is_not_pushed(stage):  # noqa: F811
    (fault,) = config_faults(config(stage, "x", hub_model_id="me/model"))
    assert "hub_model_id" in fault and "run_manifest.json" in fault
