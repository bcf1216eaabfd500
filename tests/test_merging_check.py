"""A recipe of mergekit on tiny models: what mergekit would merge without a word is a fault."""

from __future__ import annotations

import json
import shutil
from functools import partial
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
from axolotl_unlearn.merging import Model, check, record_base, unread


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


def second(project: Path, **how) -> None:
    tiny_model(project / "second", **how)


def other_base(project: Path) -> None:
    second(project, seed=3)
    record_base(project / "over/merged", project / "second")


def trained_again(project: Path) -> None:
    for name in ("over", "under"):
        record_base(project / name, project / "memorised")
    assert check(recipe()) == []
    tiny_model(project / "memorised", seed=9)


def grown(project: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(project / "memorised")
    model.resize_token_embeddings(323)
    model.save_pretrained(project / "second")


def plus_adapter(project: Path) -> None:
    """Both runs are over; then their base was trained again in its place."""
    record_base(project / "over", project / "memorised")
    assert check(recipe("./memorised+./over")) == []
    tiny_model(project / "memorised", seed=9)


def broken_adapter(project: Path) -> None:
    tensors = weights(project / "over")
    next(iter(tensors.values()))[0] = torch.nan
    save_file(tensors, project / "over/adapter_model.safetensors", metadata={"format": "pt"})


def one_with(**more) -> dict:
    """A recipe of one model, with an entry like this."""
    return recipe() | {"models": [{"model": "./over/merged"} | more]}


def base_with(**more) -> dict:
    """A recipe whose models hold the base, too."""
    return recipe() | {"models": [*recipe()["models"], {"model": "./memorised"} | more]}


def tokenizer(change) -> object:
    """A change of what tokenizer.json of a parent says."""

    def changed(project: Path) -> None:
        path = project / "over/merged/tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return changed


def not_finite(project: Path, dtype=torch.float32, bad=torch.nan) -> None:
    tensors = {name: one.to(dtype) for name, one in weights(project / "over/merged").items()}
    next(iter(tensors.values()))[0] = bad
    save_file(tensors, project / "over/merged/model.safetensors", metadata={"format": "pt"})


NEW = {"id": 320, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False}
NEW |= {"normalized": False, "special": False}
SECOND = recipe("./second")
#: A recipe, what is done to the project -> the code of the one fault.
FAULTS = [
    ({"slices": []}, None, "other-recipe"),
    (recipe() | {"models": []}, None, "other-recipe"),
    *((recipe() | {"models": [one]}, None, "not-read") for one in ("./over/merged", None, {})),
    (one_with(parameters=[{"weight": 1.0}]), None, "not-read"),
    (recipe(slices=[{"sources": []}]), None, "not-read"),
    (recipe(density=0.5), None, "unknown-key"),
    (one_with(parameters={"weight": 1.0}, density=0.5), None, "unknown-key"),
    (one_with(), None, "no-parameter"),
    *(
        (one_with(parameters={"weight": 1.0, "density": one}), None, "no-value")
        for one in (-3, 7, 0, [1.0, 0.0], [{"filter": "mlp", "value": 7}, {"value": 1}], "half")
    ),
    (recipe(parameters={"normalize": "perhaps"}), None, "no-value"),
    # mergekit left out the half of each change that is asked for; took the filter for no tensor's.
    (
        one_with(parameters={"weight": 1.0, "density": 0.5, "gamma": 2})
        | {"merge_method": "breadcrumbs"},
        None,
        "no-value",
    ),
    (
        one_with(parameters={"weight": [{"filter": "mlpp", "value": 0}, {"value": 1}]}),
        None,
        "no-value",
    ),
    # The first that fits is taken, and the others are never read.
    (
        one_with(parameters={"weight": [{"value": 1}, {"filter": "mlp", "value": 0}]}),
        None,
        "no-value",
    ),
    (
        recipe(parameters={"lambda": [{"filter": "*", "value": 1}, {"value": 2}]}),
        None,
        "no-value",
    ),
    (one_with(parameters={"weight": float("nan"), "density": 1.0}), None, "no-value"),
    (recipe(parameters={"lambda": float("inf")}), None, "no-value"),
    # mergekit reads the recipe's own alone, and of the base nothing.
    (
        one_with(parameters={"weight": 1.0, "density": 1.0, "lambda": 2.0}),
        None,
        "unknown-parameter",
    ),
    (base_with(parameters={"weight": 2.0}), None, "unknown-parameter"),
    (recipe(merge_method="tie"), None, "unknown-method"),
    # mergekit counts the base as one of the models, which it needs a number for or cannot take.
    (
        recipe(merge_method="model_stock", parameters={})
        | {"models": [{"model": "./over/merged"}]},
        None,
        "not-read",
    ),
    (
        recipe(merge_method="slerp", parameters={"t": 0.5})
        | {"models": [{"model": "./over/merged"}, {"model": "./under/merged"}]},
        None,
        "not-read",
    ),
    (recipe() | {"models": [recipe()["models"][0]] * 2}, None, "not-read"),
    (one_with(parameters={"weight": 1.0}) | {"merge_method": "linear"}, None, "no-parameter"),
    (recipe(parameters={"normalise": True}), None, "unknown-parameter"),
    (recipe(dtype="bfloat16"), None, "not-float32"),
    (recipe(out_dtype="bfloat16"), None, "not-float32"),
    (recipe("./nowhere/a"), None, "no-model"),
    (recipe("over/merged"), None, "looks-like-the-hub"),
    (recipe("./over"), None, "no-config"),
    (recipe(""), None, "no-config"),
    (recipe("./second+./over"), second, "other-base"),
    (recipe("~/memorised"), None, "no-model"),
    (recipe("./memorised+./over"), plus_adapter, "other-base"),
    (recipe("./memorised+./over"), broken_adapter, "not-finite"),
    (recipe(), other_base, "other-base"),
    (recipe(), trained_again, "other-base"),
    (SECOND, partial(second, seed=3), "unrelated"),
    (SECOND, partial(second, kind="llama"), "other-architecture"),
    (SECOND, partial(second, intermediate_size=64), "other-shapes"),
    (SECOND, grown, "other-shapes"),
    (recipe(), tokenizer(lambda c: c["model"]["merges"].pop()), "other-tokenizer"),
    (recipe(), tokenizer(lambda c: c["added_tokens"].append(NEW)), "other-tokenizer"),
    (recipe(), tokenizer(lambda c: c["pre_tokenizer"].clear()), "other-tokenizer"),
    (recipe(), tokenizer(dict.clear), "other-tokenizer"),
    (recipe(), not_finite, "not-finite"),
    (recipe(), partial(not_finite, dtype=torch.bfloat16, bad=-torch.inf), "not-finite"),
    (recipe(), partial(not_finite, dtype=torch.float8_e4m3fn), "not-finite"),
]


@pytest.mark.parametrize(("given", "change", "code"), FAULTS)
def test_faults(project, given, change, code):
    if change:
        change(project)
    found = check(given)
    assert {one.code for one in found} == {f"merging.{code}"}
    assert all(";" in str(one) or ":" in str(one) for one in found)  # and the cure


def test_beside_a_base_on_the_hub_the_models_here_are_read(project):
    """One full of NaN was ready to merge: nothing was read where the base is no folder here."""
    given = recipe(base="allenai/OLMo-7B")
    assert check(given) == []
    path = project / "ties.yml"
    path.write_text(yaml.safe_dump(given))
    said = CliRunner().invoke(unlearn, ["check", str(path)])
    assert said.exit_code == 0 and "allenai/OLMo-7B was not read" in said.output
    not_finite(project)
    assert [one.code for one in check(given)] == ["merging.not-finite"]
    # Faults of the recipe, of one model and of another are listed at once.
    both = check(recipe("./over/merged", "./nowhere/a", base="allenai/OLMo-7B", density=0.5))
    assert {one.code for one in both} == {
        "merging.not-finite", "merging.no-model", "merging.unknown-key"
    }  # fmt: skip
    # Of an adapter of a base on the hub nobody looks at a number either.
    assert unread(recipe("allenai/OLMo-7B+./over")) == ["allenai/OLMo-7B+./over"]
    (project / "over/adapter_model.safetensors").rename(project / "over/adapter_model.bin")
    codes = [one.code for one in check(recipe("./memorised+./over"))]
    assert codes == ["merging.no-weights"]  # of which nobody looked at a number


def test_what_mergekit_takes_is_no_fault(project):
    """Gradients, filters, numbers as text, parameters of all models at once."""
    some = {"weight": [0, 1], "density": [{"filter": "mlp", "value": 0.5}, {"value": "1e-1"}]}
    assert check(one_with(parameters=some)) == []
    models = [{"model": one} for one in ("./memorised", "./over/merged")]
    both = recipe(parameters={"weight": 1.0, "density": [1, 0.7]}, out_dtype="float32")
    assert check(both | {"models": models}) == []


def test_a_model_may_be_given_as_a_block(project):
    """As mergekit writes it: it was a path of that name, and never the base."""
    parents = [
        {"model": {"model": {"path": path}, "lora": {"path": "./over"} if lora else None}}
        for path, lora in (("./memorised", True), ("./under/merged", False), ("./memorised", False))
    ]
    common = {"weight": 1.0, "density": 0.8}
    given = recipe(parameters=common) | {"models": parents}
    assert check(given) == []
    parents[2]["parameters"] = {"weight": 2.0}  # of the base, which mergekit does not read
    assert [one.code for one in check(given)] == ["merging.unknown-parameter"]
    parents[1]["model"]["model"]["path"] = "./nowhere"
    assert "merging.no-model" in [one.code for one in check(given)]


def test_an_adapter_that_is_merged_into_another_base_is_no_model(project):
    """`axolotl merge-lora` after the base was trained again in its place: what it wrote was ready
    to merge with that base, of which the adapter knew nothing."""
    merged, base = project / "over/merged", project / "memorised"
    record_base(project / "over", base)
    record_base(merged, base, project / "over")
    assert check(recipe()) == []
    old = shutil.copytree(base, project / "old")
    tiny_model(base, seed=9)
    with fails("merging.other-base"):
        record_base(merged, base, project / "over")
    for one in (base, old):
        assert [x.code for x in check(recipe("./over/merged", base=f"./{one.name}"))] == [
            "merging.other-base"
        ]


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


@pytest.mark.parametrize("damage", ["cut", "no-weights"])
def test_damaged_weights_are_one_sentence(project, damage):
    from transformers import AutoModelForCausalLM

    base = project / "memorised"
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="60KB")
    first = min(base.glob("*.safetensors"))
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-1000])
    else:
        first.unlink()
    with fails(f"merging.{damage}"):
        _ = Model(base).tensors
    assert {one.code for one in check(recipe())} == {f"merging.{damage}"}


def test_a_tied_model_that_stores_its_head_is_the_same_model(tmp_path):
    tiny_model(tmp_path / "base", kind="llama", tied=True)
    one = Model(tmp_path / "base").tensors.scan[0]
    tensors = weights(tmp_path / "base")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    assert Model(tmp_path / "base").tensors.scan[0] == one


def test_fingerprint_does_not_depend_on_the_files(tmp_path):
    model = tiny_model(tmp_path / "one")
    model.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    assert Model(tmp_path / "one").tensors.scan[0] == Model(tmp_path / "two").tensors.scan[0]
    tiny_model(tmp_path / "three", seed=1)
    assert Model(tmp_path / "one").tensors.scan[0] != Model(tmp_path / "three").tensors.scan[0]
