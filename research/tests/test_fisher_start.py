"""LoKU's start: the arithmetic by hand, and the command: base and adapter add up to the model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from click.testing import CliRunner
from conftest import tiny_llama
from data_tokenizers import byte_tokenizer
from torch.testing import assert_close

from research.__main__ import research
from research.merging.fisher_start import (
    fisher_information,
    row_weights,
    weighted_factors,
)


def test_row_weights_by_hand():
    """Ratios (4, 0) and (0, 1): roots of the row sums 2 and 1. Without retain information a weight
    counts much, but finitely."""
    forget = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
    assert_close(row_weights(forget, torch.ones(2, 2)), torch.tensor([2.0, 1.0]))
    found = row_weights(forget, torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    assert torch.isfinite(found).all() and found[0] > 10
    assert (row_weights(torch.zeros(2, 2), torch.ones(2, 2)) > 0).all()


def test_the_nearest_product_by_hand():
    """diag(3, 2) with row weights (1, 2) is diag(3, 4): its larger entry is the second."""
    a, b = weighted_factors(torch.diag(torch.tensor([3.0, 2.0])), torch.tensor([1.0, 2.0]), 1)
    assert_close(b @ a, torch.diag(torch.tensor([0.0, 2.0])))


def test_equal_weights_give_the_truncated_svd_and_others_the_least_weighted_error():
    torch.manual_seed(0)
    weight, rows = torch.randn(5, 4).double(), torch.rand(5).double() + 0.1
    a, b = weighted_factors(weight, torch.full((5,), 3.0).double(), 2)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    assert_close(b @ a, u[:, :2] * s[:2] @ v[:2])
    a, b = weighted_factors(weight, rows, 2)

    def error(product):
        return float((rows[:, None] * (weight - product)).pow(2).sum())

    best = error(b @ a)
    for _ in range(50):
        other = (b + 0.05 * torch.randn_like(b)) @ (a + 0.05 * torch.randn_like(a))
        assert error(other) > best


def test_information_is_the_mean_square_of_the_rows_gradients():
    model = tiny_llama(vocabulary=23).double()
    weights = {"q": model.model.layers[0].self_attn.q_proj.weight}
    rows = [([3, 4, 5], [-100, 4, 5]), ([6, 7], [6, 7])]
    found = fisher_information(model, weights, rows)["q"]
    want = 0
    for ids, labels in rows:
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses = [-logp[t - 1, y] for t, y in enumerate(labels) if t and y != -100]
        (g,) = torch.autograd.grad(torch.stack(losses).mean(), weights["q"])
        want = want + g**2 / 2
    assert_close(found, want)


def test_base_and_adapter_add_up_to_the_model(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny_llama(vocabulary=259).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    sets = []
    for side in ("forget", "retain"):
        rows = [{"id": f"{side}{i}qa0", "input": f"{side} {i}?", "output": f"{i * 7}", "task": "1"}
                for i in range(3)]  # fmt: skip
        path = tmp_path / f"{side}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets.append({"path": str(path), "type": f"axolotl_unlearn.data.{side}"})
    config = {
        "base_model": str(tmp_path / "model"), "adapter": "lora", "lora_r": 3, "lora_alpha": 6,
        "lora_target_modules": ["q_proj", "down_proj"], "peft_layers_to_transform": [1],
        "datasets": sets, "sequence_len": 64,
        "unlearn": {"forget": {"objective": "ihl"}, "retain": {"objective": "nll"}},
    }  # fmt: skip
    (tmp_path / "my.yml").write_text(yaml.safe_dump(config))
    words = ["fisher-start", str(tmp_path / "my.yml"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(research, words)
    assert done.exit_code == 0, done.output
    assert "lora_model_dir: " in done.output
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out/base")
    names = {n for n, w in whole.named_parameters() if not torch.equal(w, base.get_parameter(n))}
    wanted = {f"model.layers.1.{n}.weight" for n in ("self_attn.q_proj", "mlp.down_proj")}
    assert names == wanted
    ids = torch.tensor([[5, 6, 7, 8]])
    expected, alone = whole(ids).logits, base(ids).logits
    both = PeftModel.from_pretrained(base, tmp_path / "out/adapter")
    assert_close(both(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (alone - expected).abs().max() > 1e-2
    plain = dict(config, adapter=None)
    (tmp_path / "my.yml").write_text(yaml.safe_dump(plain))
    assert "`adapter: lora`" in CliRunner().invoke(research, words).output
    assert Path(tmp_path / "out/base/tokenizer.json").exists()
