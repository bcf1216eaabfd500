"""Unlearning depth: the formula by hand, patching against a plain loop, both ends of the scale."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from attack_models import make_lab
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from research.probes.depth import depth_report, patching_drops
from research.probes.depth_metrics import depth_scores, erasure
from research.probes.locate import Range, indirect_effects, proposed

ROWS = [([3, 4, 5], [6, 7]), ([8, 9], [10, 11, 12]), ([4, 4, 4, 13], [14])]
drops = st.lists(st.lists(st.floats(-2, 5), min_size=3, max_size=3), min_size=1, max_size=6)


def test_score_by_hand():
    """Row 0: D1 = 1, 3, .04 (layer 2 below .05); D2/D1 = .5, 2 (cut to 1): (.5 + 3) / 4 = .875.
    Row 1: D2 < 0 counts as 0: (0 + 1) / 3. Row 2 has no layer with a gap."""
    first = [[1, 3, 0.04], [2, 0, 1], [0.05, -1, 0]]
    second = [[0.5, 6, 9], [-1, 5, 1], [1, 1, 1]]
    scores = depth_scores(first, second)
    np.testing.assert_allclose(scores[:2], [0.875, 1 / 3])
    assert np.isnan(scores[2])
    np.testing.assert_allclose(erasure(first, second)[0], [0.5, 1, 1])


@given(drops)
def test_ends_of_the_scale(first):
    first = np.array(first)
    full, none = depth_scores(first, first), depth_scores(first, np.zeros_like(first))
    known = (first > 0.05).any(1)
    np.testing.assert_allclose(full[known], 1)
    np.testing.assert_allclose(none[known], 0)
    assert np.isnan(full[~known]).all()


def plain_patched(original, source, prompt, answer, layer) -> float:
    """One row, one layer, written out by hand through the layers of a Llama."""
    ids = torch.tensor([prompt + answer])
    places = [len(prompt) + i - 1 for i in range(len(answer))]
    theirs = source(ids, output_hidden_states=True)
    # hidden_states[l + 1] is the output of layer l, the last one after the final norm; so take
    # the last layer's from a hook.
    kept = {}
    handle = source.model.layers[layer].register_forward_hook(
        lambda _m, _i, out: kept.update(states=(out[0] if isinstance(out, tuple) else out))
    )
    source(ids)
    handle.remove()
    if layer + 1 < len(source.model.layers):
        torch.testing.assert_close(kept["states"], theirs.hidden_states[layer + 1])
    hidden = original.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = original.model.rotary_emb(hidden, positions)
    for number, block in enumerate(original.model.layers):
        out = block(hidden, position_embeddings=rotary, position_ids=positions)
        hidden = out[0] if isinstance(out, tuple) else out
        if number == layer:
            for place in places:
                hidden[0, place] = kept["states"][0, place]
    logp = original.lm_head(original.model.norm(hidden))[0].log_softmax(-1)
    return float(np.mean([logp[p, t].item() for p, t in zip(places, answer, strict=True)]))


@torch.no_grad()
def test_patching_equals_a_plain_loop():
    original, source = tiny_llama(seed=0), tiny_llama(seed=1)
    got = patching_drops(original, source, ROWS, batch_size=2)
    for i, (prompt, answer) in enumerate(ROWS):
        logp = original(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        plain = np.mean([logp[len(prompt) + j - 1, t].item() for j, t in enumerate(answer)])
        for layer in range(2):
            patched = plain_patched(original, source, prompt, answer, layer)
            assert got[i, layer] == pytest.approx(plain - patched, abs=2e-5)
    for size in (1, 3):
        other = patching_drops(original, source, ROWS, batch_size=size)
        np.testing.assert_allclose(got, other, atol=2e-6)


@torch.no_grad()
def test_models_whose_layers_read_the_keys_of_earlier_ones():
    """Gemma 3n and 4: passing layers by leaves no keys (a KeyError)."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4 import Gemma4ForCausalLM

    def make(seed):
        torch.manual_seed(seed)
        config = Gemma4TextConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_kv_shared_layers=2,
            global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )  # fmt: skip
        return Gemma4ForCausalLM(config).eval()

    rows = [([3, 4, 5], [6, 7]), ([8, 9], [10])]
    drops = patching_drops(make(0), make(1), rows)
    assert drops.shape == (2, 4) and np.isfinite(drops).all() and np.abs(drops).max() > 0


def test_the_same_model_leaves_no_gap():
    model = tiny_llama()
    np.testing.assert_allclose(patching_drops(model, copy.deepcopy(model), ROWS), 0, atol=1e-6)


def test_other_architectures_are_refused():
    with pytest.raises(UnlearnError, match="2 layers of width 32 and 3 of 32"):
        patching_drops(tiny_llama(), tiny_llama(num_hidden_layers=3), ROWS)


def test_report_counts_rows_with_a_gap():
    records = [Record(f"d{i}qa0", "q", "a") for i in range(3)]
    first = np.array([[0.0, 2.0], [0.0, 1.0], [0.0, 0.01]])
    second = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    report, curves = depth_report(records, first, {"u": second})
    figures = report["models"]["u"]
    # (1/2 + 1) / 2; layer 1: (1 + 1) / (2 + 1); layer 0 leaves no gap
    assert figures["score"] == 0.75 and figures["n"] == 2
    assert figures["layers"] == [None, pytest.approx(2 / 3)]
    assert [c["model"] for c in curves] == ["retrained", "u"]
    assert curves[0]["points"][1]["y"] == pytest.approx(first[:, 1].mean())
    with pytest.raises(UnlearnError, match="no forget row loses"):
        depth_report(records, np.zeros((3, 2)), {"u": second})


def test_command_line_on_memorised_unlearned_and_control(tmp_path):
    """The original against itself is 0 deep, the control (never trained on it) 1."""
    from click.testing import CliRunner

    from research.__main__ import research

    lab = make_lab()
    twin = tmp_path / "twin"
    twin.symlink_to(lab.control)
    same = tmp_path / "same"
    same.symlink_to(lab.memorised)
    arguments = ["depth", lab.unlearned, same, twin, "--original", lab.memorised]
    arguments += ["--retrained", lab.control, "--data", lab.data, "--out", tmp_path]
    result = CliRunner().invoke(research, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    models = json.loads((tmp_path / "uds.json").read_text())["models"]
    assert models["same"]["score"] == pytest.approx(0, abs=1e-3)
    assert models["twin"]["score"] == pytest.approx(1)
    assert 0.02 < models["unlearned"]["score"] < 1
    assert "only unspoken" in result.output
    curves = json.loads((tmp_path / "depth.json").read_text())
    assert len(curves) == 4 and [p["x"] for p in curves[0]["points"]] == [0, 1]


# -- locate: causal tracing --------------------------------------------------------------------


def silenced(model, *loud: tuple[int, str]):
    """Only these modules write into the residual stream."""
    for number, layer in enumerate(model.model.layers):
        for kind, out in (("attention", layer.self_attn.o_proj), ("mlp", layer.mlp.down_proj)):
            if (number, kind) not in loud:
                torch.nn.init.zeros_(out.weight)
    return model


def test_a_silent_module_has_no_effect_and_no_noise_changes_nothing():
    model = silenced(tiny_llama(), (1, "mlp"), (0, "attention"))
    effects = indirect_effects(model, ROWS, noise=2.0)
    count = len(model.model.layers)
    assert [len(values) for values in effects.values()] == [count, count]
    for kind, values in effects.items():
        for number, value in enumerate(values):
            loud = (number, kind) in {(1, "mlp"), (0, "attention")}
            assert (abs(value) > 1e-3) == loud, (kind, number, value)
    still = indirect_effects(model, ROWS, noise=0.0)
    assert all(abs(value) < 1e-5 for values in still.values() for value in values)
    wide = indirect_effects(model, ROWS, noise=2.0, window=count * 2)
    assert wide["mlp"] == pytest.approx([effects["mlp"][1]] * count, abs=1e-4)


def test_effect_of_a_module_against_a_plain_loop():
    """One row: embeddings with the same noise, the MLP of layer 0 replaced at the prompt."""
    model, (prompt, answer) = tiny_llama(), ROWS[0]
    ids, end = torch.tensor([prompt + answer]), len(prompt)
    noise = torch.randn((1, end, 32), generator=torch.Generator().manual_seed(7))
    clean = model.model.embed_tokens(ids)
    noisy = clean.clone()
    noisy[:, :end] += noise * 3 * model.model.embed_tokens.weight.std()
    kept = {}
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *a: kept.update(out=a[-1]))
    model(inputs_embeds=clean)
    handle.remove()

    def answered() -> float:
        logp = model(inputs_embeds=noisy).logits[0].log_softmax(-1)
        return sum(float(logp[end - 1 + i, token]) for i, token in enumerate(answer))

    before = answered()
    handle = model.model.layers[0].mlp.register_forward_hook(
        lambda _m, _i, out: torch.cat([kept["out"][:, :end], out[:, end:]], 1)
    )
    after = answered()
    handle.remove()
    (found,) = [indirect_effects(model, ROWS[:1], seed=7)["mlp"][0]]
    assert found == pytest.approx(after - before, abs=1e-4)


def test_the_proposed_range_by_hand():
    """Positive parts 1, 5, 3, 1 of 10: half is layer 1; .8 layers 1 and 2; two equally short ranges
    of .55: the one with more."""
    effects = [1.0, 5.0, 3.0, 1.0, -4.0]
    assert proposed(effects) == Range(1, 1, 0.5)
    assert proposed(effects, 0.8) == Range(1, 2, 0.8)
    assert proposed([3.0, 3.0, 0.0, 4.0, 2.0], 0.5) == Range(0, 1, 0.5)
    assert proposed([-1.0, 0.0]) is None


def test_the_locate_command(tmp_path):
    """It prints what goes into the config."""
    from attack_models import tokenizer
    from click.testing import CliRunner

    from research.__main__ import research

    tok = tokenizer()
    tiny_llama(vocabulary=len(tok)).save_pretrained(tmp_path / "model")
    tok.save_pretrained(tmp_path / "model")
    rows = [{"id": f"r{i}qa0", "input": f"Who is {i}?", "output": "Ada", "task": "1"} for i in "12"]
    (tmp_path / "forget.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["locate", str(tmp_path / "model"), "--data", str(tmp_path), "--share", "1"]
    done = CliRunner().invoke(research, words)
    assert done.exit_code == 0, done.output
    assert "peft_layers_to_transform: [" in done.output and "2 rows" in done.output
    assert "lora_target_modules: [gate_proj, up_proj, down_proj]" in done.output
