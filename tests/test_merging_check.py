"""A recipe of mergekit on tiny models: what mergekit would merge without a word is a fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from fault_codes import fails
from merging_models import (
    edit_json,
    merged_copy,
    run_mergekit,
    tiny_adapter,
    tiny_model,
    weights,
)
from safetensors.torch import save_file

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.merging.check import check, tokenizer_difference
from axolotl_unlearn.merging.weights import Model, all_finite, record_base


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """memorised; over and under, adapters with merged/ copies."""
    root = tmp_path_factory.mktemp("made")
    tiny_model(root / "memorised")
    for number, name in enumerate(("over", "under")):
        tiny_adapter(root / name, root / "memorised", train_seed=number, alpha=8)
        merged_copy(root / name, root / "memorised", root / name / "merged")
    return root


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy that a test may spoil, and where we are."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for name in ("over", "under"):
        edit_json(tmp_path / name / "adapter_config.json", base_model_name_or_path="./memorised")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(*parents: str, base: str = "./memorised", **more) -> dict:
    given = parents or ("./over/merged", "./under/merged")
    models = [{"model": one, "parameters": {"weight": 1.0, "density": 0.8}} for one in given]
    made = {"merge_method": "ties", "base_model": base, "models": models, "dtype": "float32"}
    return made | {"parameters": {"normalize": True}} | more


def test_the_command_and_mergekit_on_a_recipe_without_fault(project):
    path = project / "ties.yml"
    path.write_text(yaml.safe_dump(recipe()))
    said = CliRunner().invoke(unlearn, ["check", str(path)])
    assert said.exit_code == 0 and f"ready; run `mergekit-yaml {path} OUT`" in said.output
    run_mergekit("mergekit-yaml", path, project / "out")
    assert weights(project / "out").keys() == weights(project / "memorised").keys()
    path.write_text(yaml.safe_dump(recipe("./nowhere/a")))
    said = CliRunner().invoke(unlearn, ["check", str(path), "--json"])
    assert said.exit_code == 2 and "./nowhere/a does not exist" in said.stdout
    assert check(recipe("./memorised+./over", "./under/merged")) == []


def other_base(project: Path) -> dict:
    tiny_model(project / "second", seed=3)
    merged_copy(project / "over", project / "memorised", project / "over/merged")
    record_base(project / "over/merged", project / "second")
    return recipe()


def trained_again(project: Path) -> dict:
    for name in ("over", "under"):
        record_base(project / name, project / "memorised")
    assert check(recipe()) == []
    tiny_model(project / "memorised", seed=9)
    return recipe()


def adapter_of_another(project: Path) -> dict:
    shutil.copytree(project / "memorised", project / "copy")
    return recipe("./copy+./over", "./under/merged")


def unrelated(project: Path) -> dict:
    tiny_model(project / "second", seed=3)
    return recipe("./second")


def architecture(project: Path) -> dict:
    tiny_model(project / "llama", kind="llama")
    return recipe("./llama")


def shape(project: Path) -> dict:
    tiny_model(project / "wide", intermediate_size=64)
    return recipe("./wide")


def tokens(project: Path) -> dict:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(project / "memorised")
    model.resize_token_embeddings(323)
    model.save_pretrained(project / "grown")
    return recipe("./grown")


def tokenizer(project: Path) -> dict:
    path = project / "over/merged/tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    path.write_text(json.dumps(content))
    return recipe()


def no_tokenizer(project: Path) -> dict:
    (project / "over/merged/tokenizer.json").write_text("{}")
    return recipe()


def not_finite(project: Path) -> dict:
    tensors = weights(project / "over/merged")
    next(iter(tensors.values()))[0] = torch.nan
    save_file(tensors, project / "over/merged/model.safetensors", metadata={"format": "pt"})
    return recipe()


#: What is done to the project, or a recipe -> the code of the one fault, and how often.
FAULTS = [
    ({"slices": []}, "merging.other-recipe"),
    (recipe(merge_method="tie"), "merging.unknown-method"),
    (recipe(parameters={"normalise": True}), "merging.unknown-parameter"),
    (recipe(dtype="bfloat16"), "merging.not-float32"),
    (recipe("./nowhere/a"), "merging.no-model"),
    (recipe("over/merged"), "merging.looks-like-the-hub"),
    (recipe("./over"), "merging.no-config"),
    (adapter_of_another, "merging.other-base"),
    (other_base, "merging.other-base"),
    (trained_again, "merging.other-base"),
    (unrelated, "merging.unrelated"),
    (architecture, "merging.other-architecture"),
    (shape, "merging.other-shapes"),
    (tokens, "merging.other-shapes"),
    (tokenizer, "merging.other-tokenizer"),
    (no_tokenizer, "merging.other-tokenizer"),
    (not_finite, "merging.not-finite"),
]


@pytest.mark.parametrize(("given", "code"), FAULTS)
def test_faults(project, given, code):
    found = check(given(project) if callable(given) else given)
    assert {one.code for one in found} == {code}
    assert all(";" in str(one) or ":" in str(one) for one in found)  # and the cure


@pytest.mark.parametrize("form", ["merges as pairs", "files beside it", "pad token"])
def test_one_tokenizer_written_differently(project, form):
    """Hub bases have merges as "a b" or vocab.json beside tokenizer.json; training writes pairs."""
    base = project / "memorised"
    path = base / "tokenizer.json"
    content = json.loads(path.read_text())
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    if form == "files beside it":
        (base / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
        (base / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    elif form == "pad token":
        settings = json.loads((base / "tokenizer_config.json").read_text())
        del settings["pad_token"]
        (base / "tokenizer_config.json").write_text(json.dumps(settings))
    content["model"]["merges"] = merges
    path.write_text(json.dumps(content))
    assert check(recipe()) == []


@pytest.mark.parametrize("change", ["vocabulary", "special tokens", "text"])
def test_tokenizers_differ_in_what_they_do(project, change):
    from transformers import AutoTokenizer

    first, second = (AutoTokenizer.from_pretrained(project / "memorised") for _ in range(2))
    assert tokenizer_difference(first, second) is None
    if change == "vocabulary":
        second.add_tokens(["<new>"])
    elif change == "special tokens":
        second.add_special_tokens({"bos_token": "a"})
    else:
        from tokenizers import pre_tokenizers

        second.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert change in tokenizer_difference(first, second)


@pytest.mark.parametrize(
    ("damage", "says"),
    [("cut", "is cut off or no safetensors file"), ("index", "says that .* holds .*, which it do")],
)
def test_damaged_weights_are_one_sentence(project, damage, says):
    from transformers import AutoModelForCausalLM

    base = project / "memorised"
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="60KB")
    first, second, *_ = sorted(base.glob("*.safetensors"))
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-1000])
    else:
        index = base / "model.safetensors.index.json"
        files = json.loads(index.read_text())["weight_map"]
        moved = next(name for name, file in files.items() if file == first.name)
        edit_json(index, weight_map=files | {moved: second.name})
    with fails(f"merging.{damage}"):
        _ = Model(base).tensors
    assert {one.code for one in check(recipe())} == {f"merging.{damage}"}


def test_a_tied_model_that_stores_its_head_is_the_same_model(tmp_path):
    tiny_model(tmp_path / "base", kind="llama", tied=True)
    one = Model(tmp_path / "base").fingerprint
    tensors = weights(tmp_path / "base")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    assert Model(tmp_path / "base").fingerprint == one
    tensors["lm_head.weight"] *= 2
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    with fails("merging.tied-head"):
        _ = Model(tmp_path / "base").tensors


def test_fingerprint_does_not_depend_on_the_files(tmp_path):
    model = tiny_model(tmp_path / "one")
    model.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    assert Model(tmp_path / "one").fingerprint == Model(tmp_path / "two").fingerprint
    tiny_model(tmp_path / "three", seed=1)
    assert Model(tmp_path / "one").fingerprint != Model(tmp_path / "three").fingerprint


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_is_what_isfinite_says(dtype):
    plain = torch.linspace(-3, 3, 9, dtype=dtype)
    extreme = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    for numbers in (plain, extreme, plain[:0], torch.arange(3)):
        assert all_finite(numbers)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 4, 8):
            spoilt = plain.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt)


def test_all_finite_of_float8():
    plain = torch.ones(4).to(torch.float8_e4m3fn)
    assert all_finite(plain)
    assert not all_finite(torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn))
