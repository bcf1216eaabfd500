"""The benchmarks measure what they say: the other ways' formulas, ratios, memory counting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.insert(0, str(Path(__file__).parents[2]))
from research.benchmarks import gpu, models, step

SHAPE = models.Shape(32, 2, 48, 4, 97)


@pytest.fixture
def small(monkeypatch):
    """A tiny OLMo with a trained LoRA; its base is what the other ways' second model is."""
    model = models.with_lora(models.olmo(SHAPE), rank=4)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    rows = [(0, [5, 6, 7], [8, 9, 0]), (0, [9], [10, 0]), (1, [11, 12], [13, 14, 15, 0])]
    return model, models.collate([*rows, (1, [20] * 6, [21, 0])], "answer")


def logps(model, batch, row):
    """Log-softmax of one row run alone, and its (position, label) pairs."""
    length = int(batch["attention_mask"][row].sum())
    logits = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0]
    labels = batch["labels"][row, :length].tolist()
    pairs = [(t - 1, labels[t]) for t in range(1, length) if labels[t] != -100]
    return logits.log_softmax(-1), pairs


def test_second_model_is_the_base(small):
    model, batch = small
    with model.disable_adapter():
        expected = model(input_ids=batch["input_ids"]).logits
    assert_close(step._second_model(model)(input_ids=batch["input_ids"]).logits, expected)


def test_framework_way_is_its_formula(small):
    """2/beta log(1 + (p/q)^beta) of sequence sums, NLL over tokens, KL(q || p) per position of the
    padded batch, all positions of the retain rows (8 wide) counted by rows x positions."""
    model, batch = small
    base = step._second_model(model)
    ratios = []
    for row in (0, 1):
        p, pairs = logps(model, batch, row)
        q, _ = logps(base, batch, row)
        ratios.append(sum(p[t, y] - q[t, y] for t, y in pairs))
    npo = sum(20 * torch.log(1 + torch.exp(0.1 * r)) for r in ratios) / 2
    retained = [logps(model, batch, row) for row in (2, 3)]
    picked = [p[t, y] for p, pairs in retained for t, y in pairs]
    nll = -sum(picked) / len(picked)
    rows = batch["role"] == 1
    keys = {k: batch[k][rows] for k in ("input_ids", "attention_mask")}
    p, q = (m(**keys).logits.log_softmax(-1) for m in (model, base))
    kl = (q.exp() * (q - p)).sum() / p.shape[:2].numel()
    loss = step.framework(model, [])(batch)
    assert_close(loss, 0.4 * npo + 0.4 * nll + 0.2 * kl, rtol=1e-4, atol=1e-5)


def test_zjuklab_way_is_its_formula(small, monkeypatch):
    """NPO from the two mean losses of the batch; width 16 instead of 256 here."""
    monkeypatch.setattr(models, "MAX_LENGTH", 16)
    model, batch = small
    base = step._second_model(model)

    def mean_nll(which, rows):
        picked = [p[t, y] for p, pairs in (logps(which, batch, r) for r in rows) for t, y in pairs]
        return -sum(picked) / len(picked)

    gap = mean_nll(model, (0, 1)) - mean_nll(base, (0, 1))
    npo = 20 * torch.log(1 + torch.exp(-0.1 * gap))
    padded = step._left_padded(batch, batch["role"] == 1, 16)
    keys = {k: padded[k] for k in ("input_ids", "attention_mask")}
    p, q = (m(**keys).logits.log_softmax(-1) for m in (model, base))
    kl = (q.exp() * (q - p)).sum() / (2 * 16)
    loss = step.zjuklab(model, [])(batch)
    expected = 0.4 * npo + 0.4 * kl + 0.2 * mean_nll(model, (2, 3))
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [step.finetune_packed, step.trl])
def test_packed_fine_tuning_is_fine_tuning(small, way):
    model, batch = small
    assert_close(way(model, [])(batch), step.finetune(model, [])(batch), rtol=1e-5, atol=1e-6)


def test_ratios_are_medians_of_pairs():
    """Steps 2, 4, 9 against 1, 1, 3: ratios 2, 4, 3, median 3 (not 4 / 1). Memory 30 / 10."""
    row = {"cpu_steps": [1.0, 1.0, 1.0]}
    table = {
        "ours": {"steps": [2.0, 4.0, 9.0], "peak_mb": 30, **row},
        "zjuklab": {"steps": [1.0, 1.0, 3.0], "peak_mb": 10, **row},
    }
    found = step.ratios(table)
    assert found["ours / zjuklab"] == {"time": 3.0, "cpu_time": 1.0, "memory": 3.0}


def test_rows_without_the_data_have_the_lengths_of_lume(monkeypatch, tmp_path):
    monkeypatch.setenv("LUME_DIR", str(tmp_path))
    rows, source = models.lume_rows()
    assert "LUME_DIR has no data" in source and set(rows) == {"forget", "retain"}
    lengths = [len(p) + len(a) for side in rows.values() for p, a in side]
    assert len(lengths) == 64 and max(lengths) <= models.MAX_LENGTH
    assert 40 < sum(lengths) / 64 < 110


def test_gpu_benchmark_runs_on_a_tiny_shape_and_goes_on(monkeypatch, tmp_path, capsys):
    """`--smoke`: every figure is numbers, without Axolotl. Out of time nothing begins; started again
    only what is missing is measured."""
    import json

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--out", str(tmp_path), *words])
        gpu.main()
        return capsys.readouterr().out.splitlines()

    monkeypatch.setenv("LUME_DIR", str(tmp_path))
    assert all("left for the next run" in line for line in run("--minutes", "-1"))
    for name in [name for name in sys.modules if name.split(".")[0] == "axolotl"]:
        monkeypatch.setitem(sys.modules, name, None)
    run("--pairs", "2")
    file = tmp_path / "results-gpu.json"
    found = json.loads(file.read_text())
    figures = [name for name, one in found.items() if isinstance(one, dict) and "took" in one]
    assert figures == ["checkpointing", "no_checkpointing", "match", "documents_8_x_2048"]
    for name in figures:
        assert "error" not in found[name], (name, found[name])
        for way, numbers in found[name].items():
            if isinstance(numbers, dict) and "seconds" in numbers:
                assert numbers["seconds"] > 0 and numbers["tokens_per_second"] > 0, (name, way)
    assert found["commit"] and found["checkpointing"]["recipe_minutes"]["ours"] > 0
    kept = dict(found)
    del found["match"]
    file.write_text(json.dumps(found))
    run("--pairs", "2")
    again = json.loads(file.read_text())
    assert again["checkpointing"] == kept["checkpointing"] and again["match"] != kept["match"]
