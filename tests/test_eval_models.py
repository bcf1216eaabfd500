"""Which models a text names, and one sentence for each that cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama, with_lora
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from axolotl_unlearn.engine.token_scoring import Query, score_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation import generate
from axolotl_unlearn.models import (
    ModelSpec,
    check_finite,
    load_model,
    load_tokenizer,
    parse_models,
    weights_digest,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A full model, an adapter on it, and an adapter whose base is gone."""
    home = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(home / "base")
    with_lora(tiny_llama()).save_pretrained(home / "over")
    with_lora(tiny_llama()).save_pretrained(home / "lost")
    for name, base in (("over", str(home / "base")), ("lost", str(home / "gone" / "base"))):
        path = home / name / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return home


def test_names_and_forms(home):
    base, over = str(home / "base"), str(home / "over")
    specs = parse_models([base, over, f"pair={base}+{over}", f"again={base}"])
    assert specs == [
        ModelSpec("base", base),
        ModelSpec("over", base, over),
        ModelSpec("pair", base, over),
        ModelSpec("again", base),
    ]
    assert specs[1].source == f"{base}+{over}"


def test_a_path_may_hold_a_plus(home, tmp_path):
    """Base and adapter are two folders that are there; a base of the hub holds none."""
    base = str(shutil.copytree(home / "base", tmp_path / "c++" / "base"))
    over = str(shutil.copytree(home / "over", tmp_path / "c++" / "over+1"))
    for one in (base, "org/base"):
        assert parse_models([f"x={one}+{over}"]) == [ModelSpec("x", one, over)]
    for wrong in (f"{base}+", f"+{over}"):
        with fails("models.base-and-adapter"):
            parse_models([wrong])


def test_the_output_folder_of_an_axolotl_run_is_an_adapter(home, tmp_path):
    """Axolotl saves the base's config.json (and a tokenizer) beside the adapter."""
    run = tmp_path / "over"
    shutil.copytree(home / "over", run)
    shutil.copy(home / "base" / "config.json", run)
    assert parse_models([str(run)]) == [ModelSpec("over", str(home / "base"), str(run))]
    with fails("models.adapter-as-base"):
        parse_models([f"{run}+{home / 'over'}"])
    # transformers adds an adapter to the full model that it lies beside, merged already or not.
    shutil.copy(home / "base" / "model.safetensors", run)
    for entry in (run, f"{run}+{home / 'over'}"):
        with fails("models.two-models"):
            parse_models([str(entry)])


def test_merged_of_a_run_is_called_after_the_run(home, tmp_path):
    run = tmp_path / "under"
    run.mkdir()
    (run / "adapter_config.json").write_text("{}")
    tiny_llama().save_pretrained(run / "merged")
    assert parse_models([str(run / "merged")])[0].name == "under"


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ("{home}/missing", "models.missing"),
        ("x={home}/missing", "models.missing"),
        ("{home}/base+", "models.base-and-adapter"),
        ("{home}/base+{home}/base", "models.no-adapter"),
        ("{home}/over+{home}/over", "models.adapter-as-base"),
        ("{home}/lost", "models.base-missing"),
        ("{home}", "models.no-config"),
        ("{home}/base/config.json", "models.is-a-file"),
    ],
)
def test_models_that_cannot_be_used(home, entry, code):
    with fails(code):
        parse_models([entry.format(home=home)])


def test_a_folder_without_weights_and_two_models_of_one_name(home, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with fails("models.no-weights"):
        parse_models([str(tmp_path)])
    with fails("models.same-name"):
        parse_models([str(home / "base")] * 2)


SAVED = ({"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens", "lm_head"]})


@pytest.mark.parametrize(
    "adapted",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"trainable_token_indices": [3, 4]},  # two rows are no vocabulary of two
        {"tokens": 26},
        *SAVED,
        *({**saved, "ensure_weight_tying": True} for saved in SAVED),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_the_model_that_was_trained(tmp_path, adapted, tied):
    """Also where it changes embeddings that are the head too, or has more tokens than its base."""
    options = {"target_modules": ["q_proj"], **adapted}
    tokens = options.pop("tokens", None)
    model = tiny_llama(tie=tied)
    model.save_pretrained(tmp_path / "base")
    if tokens:
        model.resize_token_embeddings(tokens)
    torch.manual_seed(1)
    policy = get_peft_model(model, LoraConfig(r=2, **options))
    policy.base_model.model.name_or_path = str(tmp_path / "base")
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    policy.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    policy.save_pretrained(tmp_path / "over")
    (spec,) = parse_models([str(tmp_path / "over")])
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = policy.eval()(input_ids=ids).logits
        merged = load_model(spec, dtype=torch.float32, device="cpu")
        loaded = merged(input_ids=ids).logits
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert loaded.shape == expected.shape and torch.allclose(loaded, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("missing", "lacks 1 weights .the first is model.layers.0.self_attn.q_proj.weight., which"),
        ("cut", "cannot be loaded"),
        ("own code", "cannot be loaded"),
    ],
)
def test_a_damaged_model_is_not_evaluated(home, tmp_path, monkeypatch, damage, says):
    """transformers draws missing weights at random and only warns; it asks on the terminal whether
    code of a model's own may run."""
    folder = tmp_path / "m"
    shutil.copytree(home / "base", folder)
    path = folder / "model.safetensors"
    if damage == "missing":
        weights = load_file(path)
        del weights["model.layers.0.self_attn.q_proj.weight"]
        save_file(weights, path, {"format": "pt"})
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    with pytest.raises(UnlearnError, match=says):
        load_model(ModelSpec("m", str(folder)), dtype=torch.float32, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_of_another_model_is_one_sentence():
    with pytest.raises(UnlearnError, match="has token 40 but the model has embeddings of 23"):
        score_queries(tiny_llama(), [Query.of([3, 40, 5])])


def test_an_adapter_with_added_tokens_has_its_own_tokenizer(home, tmp_path):
    tokenizer = byte_tokenizer()
    shutil.copytree(home / "base", tmp_path / "base")
    shutil.copytree(home / "over", tmp_path / "over")
    tokenizer.save_pretrained(tmp_path / "base")
    for added in ([], ["<new>"]):
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(tmp_path / "over")
        spec = ModelSpec("over", str(tmp_path / "base"), str(tmp_path / "over"))
        assert len(load_tokenizer(spec)) == len(tokenizer)


def test_an_adapter_may_have_the_chat_template_that_its_base_lacks(home, tmp_path):
    """Axolotl writes `chat_template: chatml` beside the adapter: "the tokenizer has none"."""
    tokenizer = byte_tokenizer()
    for name, template in (("base", None), ("over", "{{ messages[0]['content'] }}")):
        shutil.copytree(home / name, tmp_path / name)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
    spec = ModelSpec("over", str(tmp_path / "base"), str(tmp_path / "over"))
    assert load_tokenizer(spec).chat_template == template


def test_an_adapter_of_another_model_is_one_sentence(home, tmp_path):
    tiny_llama(hidden_size=64).save_pretrained(tmp_path / "wide")
    spec = ModelSpec("over", str(tmp_path / "wide"), str(home / "over"))
    with fails("models.adapter-misfit"):
        load_model(spec, dtype=torch.float32, device="cpu")


def test_a_spread_model_says_the_same(tmp_path):
    """Layers that do not fit into memory (here: a limit of half the model) lie on disk and are
    fetched when they are used; scores and generated tokens stay the same."""
    plain = tiny_llama()
    plain.save_pretrained(tmp_path / "model")
    size = sum(p.numel() * p.element_size() for p in plain.parameters())
    spread = load_model(
        ModelSpec("m", str(tmp_path / "model")),
        dtype=torch.float32,
        device="cpu",
        device_map="auto",
        max_memory={"cpu": size // 2},
        offload_folder=str(tmp_path / "disk"),
    )
    assert {"disk", "cpu"} == set(map(str, spread.hf_device_map.values()))
    queries = [Query.of([5, 9, 3, 7, 1]), Query.of([2, 4, 8])]
    for one, two in zip(score_queries(plain, queries), score_queries(spread, queries), strict=True):
        assert np.allclose(one.logp, two.logp, atol=1e-6)
        assert np.allclose(one.sd, two.sd, atol=1e-6)
    said = [generate._decode(model, [[5, 9, 3], [7]], 6, {1}, None) for model in (plain, spread)]
    assert said[0] == said[1]


@pytest.mark.parametrize("emulated", [True, False])
def test_bfloat16_that_a_processor_only_emulates_is_said(home, monkeypatch, caplog, emulated):
    monkeypatch.setattr("axolotl_unlearn.models.emulates_bfloat16", lambda: emulated)
    spec, *_ = parse_models([str(home / "base")])
    for dtype, said in ((torch.float32, False), (torch.bfloat16, emulated)):
        caplog.clear()
        load_model(spec, dtype=dtype, device="cpu")
        assert ("only emulates bfloat16" in caplog.text) == said


def test_nan_weights_are_refused():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[1, 2] = float("nan")
    with fails("models.not-finite"):
        check_finite(model, "m")


def test_digest_follows_content_not_path(home, tmp_path):
    shutil.copytree(home / "base", tmp_path / "copy")
    one, two = ModelSpec("a", str(home / "base")), ModelSpec("b", str(tmp_path / "copy"))
    assert weights_digest(one) == weights_digest(two)
    with open(tmp_path / "copy" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert weights_digest(two) != weights_digest(one)
    assert weights_digest(ModelSpec("c", one.model, str(home / "over"))) not in (
        weights_digest(one),
    )


def test_a_model_of_the_hub_is_known_by_its_files(home, tmp_path, monkeypatch):
    """By its name alone a newer revision had the scores of the one before, from the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo, spec = tmp_path / "models--org--m", ModelSpec("m", "org/m")
    for revision, folder in (("a" * 40, home / "base"), ("b" * 40, home / "over")):
        shutil.copytree(folder, repo / "snapshots" / revision)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(revision)
        assert weights_digest(spec) == weights_digest(ModelSpec("m", str(folder)))
    (repo / "snapshots" / revision / "adapter_model.safetensors").unlink()
    with fails("models.cannot-load") as caught:
        weights_digest(spec)
    assert str(caught.value).startswith("org/m of the hub has no weights")
    shutil.rmtree(repo)
    with fails("models.cannot-load") as caught:
        weights_digest(spec)
    assert str(caught.value).startswith("org/m of the hub cannot be fetched")


def test_weights_that_are_a_program_are_not_run(home, tmp_path):
    """A pickle of the old format may call anything."""
    import pickle

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was here",))

    model = tmp_path / "evil"
    shutil.copytree(home / "base", model, ignore=shutil.ignore_patterns("*.safetensors"))
    with (model / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"model.embed_tokens.weight": Evil()}, file)
    with pytest.raises(Exception, match="(?i)weights.only|unsupported|safetensors|unpickl"):
        load_model(parse_models([str(model)])[0], dtype=torch.float32, device="cpu")
    assert not (tmp_path / "was here").exists()
