"""Rounding against hand arithmetic and an independent implementation; the attack end to end."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from attack_models import attacked, make_lab
from conftest import tiny_llama
from fault_codes import fails
from hypothesis import given, settings
from hypothesis import strategies as st

from axolotl_unlearn.attacks.quantise import SCHEMES, quantise_model, round_to_nearest


@pytest.fixture(scope="module")
def lab():
    return make_lab()


def rtn_int8(weight):
    """One scale a row, the largest magnitude onto 127.5 (torchao's symmetric grid). The product
    with 1 / scale, not a division: 127.5 is a tie that float32 noise decides."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight * (1 / scale)).round().clamp(-128, 127) * scale


def rtn_int4(weight, group):
    """16 levels between the smallest and the largest weight (and 0) of each group."""
    rows = []
    for row in weight.tolist():
        out = []
        for start in range(0, len(row), group):
            part = row[start : start + group]
            low, high = min(0.0, *part), max(0.0, *part)
            scale = (high - low) / 15 or 1.0
            zero = round(-low / scale)
            out += [(min(15, max(0, round(x / scale) + zero)) - zero) * scale for x in part]
        rows.append(out)
    return torch.tensor(rows)


def test_int4_by_hand():
    """Group [0, 1.5]: scale .1, so .74 -> .7 and 1.5 stays; group [-.7, .8]: scale .1, 0 kept."""
    weight = torch.tensor([[0.0, 0.74, 0.31, 1.5], [-0.7, 0.0, 0.26, 0.8]])
    rounded = round_to_nearest(weight, "int4", group=4)
    expected = torch.tensor([[0.0, 0.7, 0.3, 1.5], [-0.7, 0.0, 0.3, 0.8]])
    torch.testing.assert_close(rounded, expected, atol=1e-6, rtol=0)


def test_int8_by_hand():
    """Row maximum 127.5 -> scale 1: .4 -> 0, -3.6 -> -4; 127.5 is cut to 127."""
    weight = torch.tensor([[127.5, 0.4, -3.6, 100.0]])
    expected = torch.tensor([[127.0, 0.0, -4.0, 100.0]])
    torch.testing.assert_close(round_to_nearest(weight, "int8"), expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(3, 8), (5, 32), (4, 20)]))
def test_grids_equal_an_independent_implementation(seed, shape):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(round_to_nearest(weight, "int8"), rtn_int8(weight), **close)
    torch.testing.assert_close(
        round_to_nearest(weight, "int4", group=8), rtn_int4(weight, 8), **close
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_stays_what_it_is(scheme):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    half = round_to_nearest(weight.bfloat16(), scheme)
    expected = round_to_nearest(weight.bfloat16().float(), scheme).bfloat16()
    assert half.dtype == torch.bfloat16 and torch.equal(half, expected)


def test_a_weight_with_a_scale_of_its_own_is_exact():
    """One column, as of a factor of rank 1: torchao ended in a RuntimeError."""
    weight = torch.randn(5, 1)
    assert torch.equal(round_to_nearest(weight, "int8"), weight)


@pytest.mark.parametrize("shape", [(1, 64), (6, 64), (64, 48), (5, 8)])
def test_nf4_levels_are_those_of_qlora(shape):
    """The 16 values of arXiv 2305.14314, appendix E, times the largest magnitude of a group. On a
    CPU, bitsandbytes takes the scale of another group where a row is no multiple of it."""
    levels = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    levels += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0]
    weight, levels = torch.linspace(-2, 2, math.prod(shape)), torch.tensor(levels)
    expected = [
        part.abs().max() * levels[(part[:, None] / part.abs().max() - levels).abs().argmin(1)]
        for part in weight.split(64)
    ]
    rounded = round_to_nearest(weight.reshape(shape), "nf4", group=64)
    torch.testing.assert_close(rounded.flatten(), torch.cat(expected), atol=2e-4, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_model_keeps_head_embeddings_and_norms(scheme):
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantise_model(model, scheme, group=32)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    linear = {n for n in before if n.endswith("_proj.weight")}
    assert changed == linear and len(linear) == 14


def test_gpt2_layers_are_rounded_along_their_inputs():
    """Conv1D stores [in, out]; its rounding is that of the transposed linear layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2))
    layer = model.transformer.h[0].mlp.c_fc
    expected = round_to_nearest(layer.weight.t(), "int4", group=8).t()
    quantise_model(model, "int4", group=8)
    torch.testing.assert_close(layer.weight, expected)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "GptOss", "Llama4"])
def test_each_expert_is_a_matrix(kind):
    """transformers 5 keeps experts in one tensor, most of a model, which stayed as it was."""
    import transformers

    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    sizes |= {"moe_intermediate_size": 24, "num_local_experts": 3, "num_experts": 3}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    named = {"Llama4": "Llama4TextConfig"}.get(kind, f"{kind}Config")
    config = getattr(transformers, named)(**sizes, num_experts_per_tok=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for stack in (one for one in model.parameters() if one.dim() == 3):
        torch.nn.init.normal_(stack)  # Llama 4 begins with zeros
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantise_model(model, "int4", group=8)
    experts = [name for name in before if before[name].dim() == 3]
    assert len(experts) == 2
    for name, number in itertools.product(experts, range(3)):
        old, new = (kept[name][number] for kept in (before, model.state_dict()))
        old, new = (old.t(), new.t()) if kind in ("GptOss", "Llama4") else (old, new)
        torch.testing.assert_close(new, round_to_nearest(old, "int4", group=8))
        assert not torch.equal(old, new)


def fused_experts():
    """All experts are one matrix each, in no linear layer: they stayed as they were, unsaid."""
    from transformers import DbrxConfig, DbrxForCausalLM

    attention = {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 17, "max_seq_len": 8}
    experts = {"ffn_hidden_size": 24, "moe_num_experts": 3, "moe_top_k": 1}
    return DbrxForCausalLM(DbrxConfig(**sizes, ffn_config=experts, attn_config=attention))


@pytest.mark.parametrize("model", [
    lambda: torch.nn.Embedding(3, 3), fused_experts,
])  # fmt: skip
def test_what_has_no_linear_layer_is_refused(model):
    with fails("attack.nothing-to-quantise"):
        quantise_model(model(), "int8")


def test_command_line_from_model_to_file(lab, tmp_path):
    common = ["--data", lab.data, "--out", tmp_path, "--max-new-tokens", 16]
    result = attacked("quantise", lab.memorised, "--schemes", "int8,int4", *common)
    assert result.exit_code == 0, result.output
    assert "Quantisation" in result.output and "Written:" in result.output
    report = json.loads((tmp_path / "quantise-memorised.json").read_text())
    plain, int8, int4 = report["rows"]
    assert plain["recalled"]["value"] > 0.95 and plain["gain"]["recalled"]["value"] == 0
    # 8 bits change nothing to speak of, 4 bits more.
    assert abs(int8["gain"]["probability"]["value"]) < 0.05
    assert int4["gain"]["probability"]["value"] < int8["gain"]["probability"]["value"] + 0.01
    assert plain["n"] == 16 and plain["documents"] == 8

    # The second run reads what is stored: it does not even need the weights again.
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / ".scores").iterdir()}
    assert len(stored) == 3
    again = attacked("quantise", lab.memorised, "--schemes", "int8,int4", *common)
    assert again.exit_code == 0
    assert stored == {path: path.stat().st_mtime_ns for path in (tmp_path / ".scores").iterdir()}
    assert json.loads((tmp_path / "quantise-memorised.json").read_text()) == report
    # Fewer tokens recall less; their file takes the place of none.
    fewer = [*common[:-1], 1]
    attacked("quantise", lab.memorised, "--schemes", "int8,int4", *fewer)
    assert len([*tmp_path.glob("quantise-*.json")]) == 2
    assert json.loads((tmp_path / "quantise-memorised.json").read_text()) == report
    # No text of the forget set is written.
    for path in (one for one in tmp_path.rglob("*") if one.is_file()):
        assert "two dogs" not in path.read_text()


@pytest.mark.parametrize("model, option", [
    ("none", []), ("memorised", ["--data", "none"]), ("memorised", ["--schemes", "int3"]),
    ("memorised", ["--limit", 0]), ("memorised", ["--max-new-tokens", -1]),
])  # fmt: skip
def test_faults_end_the_command_at_once(lab, tmp_path, monkeypatch, model, option):
    monkeypatch.chdir(tmp_path)
    words = ["quantise", getattr(lab, model, model), "--data", lab.data, "--out", tmp_path]
    assert attacked(*words, *option).exit_code == 2
    assert not any(one.is_dir() and any(one.iterdir()) for one in tmp_path.iterdir())
