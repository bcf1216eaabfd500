"""`axolotl-unlearn merge` on tiny OLMo and Llama models: results, recipes, every guard rail."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import kills
import pytest
import torch
from click.testing import CliRunner
from merging_models import (
    edit_json,
    merged_copy,
    run_mergekit,
    tiny_adapter,
    tiny_model,
    tiny_tokenizer,
    weights,
)
from safetensors.torch import save_file

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging import merge, run
from axolotl_unlearn.merging.checks import initialisation_cosines, tokenizer_difference
from axolotl_unlearn.merging.run import merge_from_recipe
from axolotl_unlearn.merging.sources import open_base, open_parent
from axolotl_unlearn.merging.weights import all_finite, record_base


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """memorised, over, under (adapters, with merged/ copies); other: another LoRA draw."""
    root = tmp_path_factory.mktemp("made")
    tiny_model(root / "memorised")
    for name, init, train in (("over", 0, 1), ("under", 0, 2), ("other", 5, 2)):
        tiny_adapter(root / name, root / "memorised", init_seed=init, train_seed=train, alpha=8)
    for name in ("over", "under"):
        merged_copy(root / name, root / "memorised", root / name / "merged")
    return root


@pytest.fixture
def project(made, tmp_path):
    """A copy that a test may spoil."""
    root = tmp_path / "p"
    shutil.copytree(made, root)
    for name in ("over", "under", "other"):
        edit_json(
            root / name / "adapter_config.json", base_model_name_or_path=str(root / "memorised")
        )
    return root


def both(root: Path) -> list[Path]:
    return [root / "over", root / "under"]


# --- results ------------------------------------------------------------------------------------


def test_adapters_merge_to_what_mergekit_makes_of_their_merged_copies(made, tmp_path):
    """Adapters go in as they are; the recipe written beside the result gives the same bits."""
    out = merge(both(made), made / "memorised", tmp_path / "ours", method="ties", density=0.8)
    run_mergekit("mergekit-yaml", out / "mergekit_config.yml", tmp_path / "theirs")
    ours, theirs = weights(out), weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-7)
    base = weights(made / "memorised")
    assert sum(not torch.equal(ours[name], base[name]) for name in base) == 8

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"


def test_full_models_and_adapters_are_the_same_parents(made, tmp_path):
    from_adapters = merge(both(made), made / "memorised", tmp_path / "a")
    copies = [folder / "merged" for folder in both(made)]
    from_models = merge(copies, made / "memorised", tmp_path / "b")
    for name, tensor in weights(from_adapters).items():
        torch.testing.assert_close(tensor, weights(from_models)[name], rtol=0, atol=1e-7)


def test_factor_merge_is_an_adapter(made, tmp_path):
    """By logits and weights what PEFT makes of it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    options = dict(method="linear", space="factors", scale="sum")
    out = merge(both(made), made / "memorised", tmp_path / "linear", **options)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4
    model = AutoModelForCausalLM.from_pretrained(made / "memorised")
    merged = PeftModel.from_pretrained(model, out).merge_and_unload().state_dict()
    full = merge([out], made / "memorised", tmp_path / "full", method="linear")
    for name, tensor in weights(full).items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)


def test_negated_parent_turns_the_change_round(made, tmp_path):
    """base - (over - base), with adapters and with full models."""
    base, over = weights(made / "memorised"), weights(made / "over/merged")
    for parent in (made / "over", made / "over/merged"):
        out = merge(
            [f"negate:{parent}"],
            made / "memorised",
            tmp_path / "n",
            method="linear",
            overwrite=True,
        )
        for name, tensor in weights(out).items():
            torch.testing.assert_close(tensor, 2 * base[name] - over[name], rtol=0, atol=1e-6)


def test_three_parents_and_weights(made, tmp_path):
    """Linear, weights 1, 2, 1 on (over, under, over): the mean of the two full models."""
    parents = [made / "over", made / "under", made / "over/merged"]
    out = merge(parents, made / "memorised", tmp_path / "three", method="linear", weights=[1, 2, 1])
    over, under = (weights(folder / "merged") for folder in both(made))
    for name, tensor in weights(out).items():
        torch.testing.assert_close(tensor, (over[name] + under[name]) / 2, rtol=0, atol=1e-6)


def logits(model) -> torch.Tensor:
    """What a model says of two fixed rows of 12 tokens, float32."""
    ids = torch.arange(2, 26).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def logits_of(base: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(model if adapter is None else PeftModel.from_pretrained(model, adapter))


def test_rslora_factors_keep_their_scale(tmp_path):
    """PEFT's own add_weighted_adapter writes alpha = r beside use_rslora, a scale of sqrt(r)
    (huggingface/peft#3761); one parent merged by its weight 1 must say what it says itself."""
    tiny_model(tmp_path / "base")
    tiny_adapter(tmp_path / "a", tmp_path / "base", alpha=6, use_rslora=True, step=0.1)
    out = merge(
        [tmp_path / "a"], tmp_path / "base", tmp_path / "out", method="linear", space="factors"
    )
    expected = logits_of(tmp_path / "base", tmp_path / "a")
    torch.testing.assert_close(logits_of(tmp_path / "base", out), expected, rtol=0, atol=1e-5)


def test_random_drops_repeat_from_the_record(made, tmp_path):
    options = dict(method="dare_ties", density=0.5, seed=7)
    out = merge(both(made), made / "memorised", tmp_path / "a", **options)
    assert "--random-seed 7" in (out / "mergekit_config.yml").read_text()
    again = merge_from_recipe(out / "merge.json", tmp_path / "b")
    other = merge(both(made), made / "memorised", tmp_path / "c", **{**options, "seed": 8})
    same = [torch.equal(t, weights(again)[name]) for name, t in weights(out).items()]
    assert all(same)
    assert any(not torch.equal(t, weights(other)[name]) for name, t in weights(out).items())


@pytest.mark.parametrize(
    "options",
    [dict(space="factors"), dict(weights=[1, 0.5])],
    ids=str,
)
def test_a_recipe_repeats_its_merge(project, tmp_path, options):
    out = merge(both(project), project / "memorised", tmp_path / "a", **options)
    again = merge_from_recipe(out / "merge.json", tmp_path / "b")
    first, second = weights(out), weights(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("what", ["over", "memorised"])
def test_a_recipe_is_of_its_weights(project, tmp_path, what):
    """Another run at the same path is another merge; --force says so and makes it."""
    out = merge(both(project), project / "memorised", tmp_path / "a")
    if what == "over":
        tiny_adapter(project / "over", project / "memorised", train_seed=7, alpha=8)
    else:
        spoil_adapter(project / "memorised", lambda t: t["lm_head.weight"].mul_(2), "model")
    with pytest.raises(UnlearnError, match=f"{what} has other weights than when .*merge.json"):
        merge_from_recipe(out / "merge.json", tmp_path / "b")
    lines: list[str] = []
    merge_from_recipe(out / "merge.json", tmp_path / "c", force=True, log=lines.append)
    assert any(f"{what} has other weights" in line for line in lines)


def test_a_forced_merge_is_repeated_without_asking_again(project, tmp_path):
    parents = [project / "over", project / "other"]
    out = merge(parents, project / "memorised", tmp_path / "a", space="factors", force=True)
    again = merge_from_recipe(out / "merge.json", tmp_path / "b")
    assert all(torch.equal(t, weights(again)[name]) for name, t in weights(out).items())


@pytest.mark.parametrize("who", ["base", "parent"])
def test_a_tied_model_that_stores_its_head_is_the_same_model(who, tmp_path):
    """One side holds lm_head.weight, the other leaves it out: by logits the merge is PEFT's."""
    tiny_model(tmp_path / "base", kind="llama", tied=True)
    tiny_adapter(tmp_path / "a", tmp_path / "base", step=0.1)
    merged_copy(tmp_path / "a", tmp_path / "base", tmp_path / "full")
    expected = logits_of(tmp_path / "full")
    folder = tmp_path / {"base": "base", "parent": "full"}[who]
    tensors = weights(folder)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for number, parent in enumerate(("a", "full")):
        out = merge(
            [tmp_path / parent], tmp_path / "base", tmp_path / f"out{number}", method="linear"
        )
        torch.testing.assert_close(logits_of(out), expected, rtol=0, atol=1e-5)
    spoil_adapter(folder, lambda t: t["lm_head.weight"].mul_(2), "model")
    with pytest.raises(UnlearnError, match="ties its head .* stores another lm_head.weight"):
        merge([tmp_path / "full"], tmp_path / "base", tmp_path / "x", method="linear")


def test_sharded_base_and_tied_head(tmp_path):
    model = tiny_model(tmp_path / "base", kind="llama", tied=True)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert (tmp_path / "base/model.safetensors.index.json").exists()
    (tmp_path / "base/model.safetensors").unlink()
    for number in (1, 2):
        tiny_adapter(tmp_path / f"a{number}", tmp_path / "base", train_seed=number)
    out = merge([tmp_path / "a1", tmp_path / "a2"], tmp_path / "base", tmp_path / "out")
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("kind", ["embedding", "rslora", "saved", "pattern"])
def test_adapter_varieties_merge_as_peft_does(kind, tmp_path):
    """A single parent at linear is that parent: our reading of the adapter against PEFT's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny_model(tmp_path / "base")
    options: dict = {
        "embedding": dict(targets=("embed_tokens", "q_proj")),
        "rslora": dict(use_rslora=True),
        "saved": dict(modules_to_save=["lm_head"]),
        "pattern": dict(rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 9}),
    }[kind]
    tiny_adapter(tmp_path / "a", tmp_path / "base", alpha=6, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = PeftModel.from_pretrained(model, tmp_path / "a").merge_and_unload().state_dict()
    out = merge([tmp_path / "a"], tmp_path / "base", tmp_path / "out", method="linear")
    for name, tensor in weights(out).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_initialisation_shows_in_the_a_factors(made):
    over, under, other = (open_parent(made / name) for name in ("over", "under", "other"))
    same, different = initialisation_cosines([over, under, other])
    assert same > 0.9 and abs(different) < 0.1


# --- guard rails ----------------------------------------------------------------------------------


def spoil_adapter(folder: Path, change, stem: str = "adapter_model") -> None:
    tensors = weights(folder)
    change(tensors)
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})


def nan(tensors):
    tensors[next(iter(tensors))][0, 0] = float("nan")


BAD_VALUES = [
    (dict(density=80), r"density 80 is not in \(0, 1\]"),
    (dict(density=-1), r"density -1 is not in \(0, 1\]"),
    (dict(density=0.0), r"density 0.0 is not in \(0, 1\]"),
    (dict(density=float("nan")), "density nan is not in"),
    (dict(weights=[1.0, float("nan")]), "NaN or infinity"),
    (dict(weights=[1.0]), "1 weights for 2 parents"),
    (dict(weights=[0.0, 0.0]), "All merge weights are 0"),
    (dict(weights=[1.0, -1.0]), "negative weight with scale 'average'"),
    (dict(method="tie"), "Unknown merge method 'tie': did you mean 'ties'?"),
    (dict(space="factor"), "did you mean 'factors'?"),
    (dict(scale="mean"), "Unknown merge scale 'mean'"),
    (dict(output="adapter"), "Unknown merge parameter 'output'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_VALUES, ids=lambda value: str(value)[:40])
def test_bad_values_are_refused(made, tmp_path, options, message):
    with pytest.raises(UnlearnError, match=message.replace("?", r"\?")):
        merge(both(made), made / "memorised", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_misspelt_parameter_suggests_the_name(project, tmp_path):
    out = merge(both(project), project / "memorised", tmp_path / "out")
    facts = json.loads((out / "merge.json").read_text())
    facts["recipe"]["densty"] = facts["recipe"].pop("density")
    (out / "merge.json").write_text(json.dumps(facts))
    with pytest.raises(UnlearnError, match="'densty': did you mean 'density'"):
        merge_from_recipe(out / "merge.json", tmp_path / "again")


def test_missing_folders_say_what_makes_them(project, tmp_path):
    with pytest.raises(UnlearnError, match="axolotl train"):
        merge([project / "nothing"], project / "memorised", tmp_path / "out")
    with pytest.raises(UnlearnError, match="examples/memorise.yml"):
        merge(both(project), project / "nothing", tmp_path / "out")
    (project / "empty").mkdir()
    with pytest.raises(UnlearnError, match="neither adapter_config.json nor config.json"):
        merge([project / "empty"], project / "memorised", tmp_path / "out")
    (project / "over/adapter_model.safetensors").unlink()
    with pytest.raises(UnlearnError, match="no adapter_model.safetensors"):
        merge(both(project), project / "memorised", tmp_path / "out")


def test_output_is_not_overwritten_without_asking(project, tmp_path):
    out = merge(both(project), project / "memorised", tmp_path / "out")
    (out / "mine.txt").write_text("keep")
    with pytest.raises(UnlearnError, match="--overwrite"):
        merge(both(project), project / "memorised", out)
    assert (out / "mine.txt").exists()
    merge(both(project), project / "memorised", out, overwrite=True)
    assert not (out / "mine.txt").exists()
    with pytest.raises(UnlearnError, match="is also an input"):
        merge(both(project), project / "memorised", project / "over", overwrite=True)
    with pytest.raises(UnlearnError, match="holds .*memorised, an input"):
        merge(both(project), project / "memorised", project, overwrite=True)
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary/today.txt").write_text("keep")
    with pytest.raises(UnlearnError, match="no result of a merge"):
        merge(both(project), project / "memorised", tmp_path / "diary", overwrite=True)


def test_a_failed_merge_leaves_the_old_result(project, tmp_path):
    out = merge(both(project), project / "memorised", tmp_path / "out")
    spoil_adapter(project / "over", nan)
    with pytest.raises(UnlearnError, match="NaN or infinity: that run diverged"):
        merge(both(project), project / "memorised", out, overwrite=True)
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("space", ["delta", "factors"])
def test_nan_is_found_before_anything_is_merged(project, tmp_path, space, monkeypatch):
    last = sorted(weights(project / "under"))[-1]
    spoil_adapter(project / "under", lambda tensors: tensors[last].fill_(float("nan")))
    merged: list[str] = []
    for name in ("merge_delta", "merge_factors"):
        monkeypatch.setattr(run, name, lambda *_, name=name: merged.append(name))
    with pytest.raises(UnlearnError, match="under.*NaN or infinity"):
        merge(both(project), project / "memorised", tmp_path / "out", space=space)
    assert not merged and not list(tmp_path.glob("out*"))


def test_nan_in_full_models(project, tmp_path):
    spoil_adapter(project / "over/merged", lambda t: t["lm_head.weight"].fill_(torch.inf), "model")
    with pytest.raises(UnlearnError, match="over/merged: tensor lm_head.weight holds NaN"):
        merge([project / "over/merged"], project / "memorised", tmp_path / "out")
    spoil_adapter(project / "memorised", lambda t: t["lm_head.weight"].fill_(torch.nan), "model")
    with pytest.raises(UnlearnError, match="memorised: tensor lm_head.weight holds NaN"):
        merge([project / "under"], project / "memorised", tmp_path / "out")


def test_a_merge_that_breaks_off_leaves_nothing(project, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "merge_delta", stop)
    with pytest.raises(KeyboardInterrupt):
        merge(both(project), project / "memorised", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("before", [False, True])
def test_killed_with_kill_9_a_merge_is_whole_or_not_there(project, tmp_path, before):
    """At drawn moments, most of them at the end, where the old result goes and the new one comes:
    what lies at OUT is never half of one, and the merge after it has the bits of one in peace."""
    out, facts = tmp_path / "out", "merge.json"

    def work(density=0.5):
        merge(both(project), project / "memorised", out, density=density, overwrite=True)

    work(0.9)
    old = kills.files(out, but=(facts,))
    work()
    whole = kills.files(out, but=(facts,))
    assert old.keys() == whole.keys() and old != whole
    last, rng = kills.moments(work, tmp_path), random.Random(before)
    drawn = [rng.randrange(last) for _ in range(2)]
    for at in [*drawn, *(last - n for n in rng.sample(range(250), 5 * before))]:
        if before:
            work(0.9)
        else:
            shutil.rmtree(out)
        kills.kill_at(work, at, tmp_path)
        if out.exists():
            assert kills.files(out, but=(facts,)) in (old, whole), f"killed at {at} of {last}"
        work()
        assert kills.same(whole, kills.files(out, but=(facts,)))
        assert {path.name for path in tmp_path.iterdir()} == {"p", "out", "moments"}


def test_other_base_by_hash(project, tmp_path):
    tiny_model(project / "second", seed=3)
    tiny_adapter(project / "stranger", project / "second")
    parents = [project / "over", project / "stranger"]
    with pytest.raises(UnlearnError, match="whose weights differ from the base"):
        merge(parents, project / "memorised", tmp_path / "out")
    lines: list[str] = []
    merge(parents, project / "memorised", tmp_path / "out", force=True, log=lines.append)
    assert any("forced" in line for line in lines)

    shutil.copytree(project / "memorised", project / "copy")
    merge(both(project), project / "copy", tmp_path / "copy_out")


def test_base_trained_again_at_the_same_path(project, tmp_path):
    for folder in both(project):
        record_base(folder, project / "memorised")
    merge(both(project), project / "memorised", tmp_path / "good")
    tiny_model(project / "memorised", seed=9)
    with pytest.raises(UnlearnError, match="another base"):
        merge(both(project), project / "memorised", tmp_path / "out")
    with pytest.raises(UnlearnError, match="another base"):
        merge(
            [folder / "merged" for folder in both(project)],
            project / "memorised",
            tmp_path / "out",
        )


def test_full_model_that_does_not_descend_from_the_base(project, tmp_path):
    tiny_model(project / "second", seed=3)
    with pytest.raises(UnlearnError, match="does not descend from the base"):
        merge([project / "second"], project / "memorised", tmp_path / "out")


def test_architectures_shapes_and_tokenizers(project, tmp_path):
    tiny_model(project / "llama", kind="llama")
    with pytest.raises(UnlearnError, match="LlamaForCausalLM but the base .* OlmoForCausalLM"):
        merge([project / "llama"], project / "memorised", tmp_path / "out")
    tiny_model(project / "wide", intermediate_size=64)
    with pytest.raises(UnlearnError, match=r"has shape \[32, 64\] but \[32, 48\]"):
        merge([project / "wide"], project / "memorised", tmp_path / "out")
    tiny_adapter(project / "wide_adapter", project / "wide")
    with pytest.raises(UnlearnError, match="has shape"):
        merge([project / "wide_adapter"], project / "memorised", tmp_path / "out")
    tiny_tokenizer(project / "over")
    merge(both(project), project / "memorised", tmp_path / "fine")
    tokens = json.loads((project / "over/tokenizer.json").read_text())
    tokens["model"]["merges"] = tokens["model"]["merges"][:-1]
    (project / "over/tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(UnlearnError, match="another tokenizer"):
        merge(both(project), project / "memorised", tmp_path / "out")


@pytest.mark.parametrize("form", ["merges as pairs", "files beside it", "pad token", "unreadable"])
def test_one_tokenizer_written_differently(project, tmp_path, form):
    """Hub bases have merges as "a b" or vocab.json beside tokenizer.json; training writes pairs."""
    base = project / "memorised"
    for parent in both(project):
        tiny_tokenizer(parent)
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
        path.write_text(path.read_text() + "\n")
    content["model"]["merges"] = merges
    path.write_text(json.dumps(content))
    if form == "unreadable":
        path.write_text("{}")
        with pytest.raises(UnlearnError, match="cannot be compared .*, or add --force"):
            merge(both(project), base, tmp_path / "out")
    merge(both(project), base, tmp_path / "out", force=form == "unreadable")


@pytest.mark.parametrize(
    ("damage", "says"),
    [("cut", "is cut off or no safetensors file"), ("index", "says that .* holds .*, which it do")],
)
def test_damaged_weights_are_one_sentence(project, tmp_path, damage, says):
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
    with pytest.raises(UnlearnError, match=says):
        merge(both(project), base, tmp_path / "out")


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_parents_with_added_tokens(project, tmp_path, kind):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(project / "memorised")
    model.resize_token_embeddings(323)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(project / "grown")
    with pytest.raises(UnlearnError, match="has 323 tokens and the base .* has 320: its run added"):
        merge([project / "grown"], project / "memorised", tmp_path / "out")


@pytest.mark.parametrize(
    ("adapted", "refused"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "embed_tokens"),
        (
            {
                "target_modules": ["q_proj"],
                "modules_to_save": ["embed_tokens"],
                "ensure_weight_tying": True,
            },
            None,
        ),
    ],
)
def test_an_adapter_of_tied_embeddings(tmp_path, adapted, refused):
    """As trained and as merged they were up to four models; kept tied by PEFT they are one."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    tiny_model(base, kind="llama", tied=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **adapted))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    if refused:
        with pytest.raises(UnlearnError, match=f"adapts .*{refused}.*as embeddings and as head"):
            merge([tmp_path / "adapter"], base, tmp_path / "out", method="linear")
        return
    merge([tmp_path / "adapter"], base, tmp_path / "out", method="linear")
    ids = torch.tensor([[3, 4, 5]])
    trained = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, trained(ids).logits, atol=1e-5)


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


def test_the_base_may_be_in_the_hubs_cache(project, tmp_path, monkeypatch):
    """As `base_model` of an example names it: training has downloaded it, nothing is fetched."""
    from huggingface_hub import constants

    snapshots = tmp_path / "hub/models--someone--base/snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "abc").symlink_to(project / "memorised")
    (tmp_path / "hub/models--someone--base/refs").mkdir()
    (tmp_path / "hub/models--someone--base/refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    out = merge([project / "over"], "someone/base", tmp_path / "out")
    assert weights(out).keys() == weights(project / "memorised").keys()
    with pytest.raises(UnlearnError, match="no folder and no model in the hub's cache"):
        merge([project / "over"], "someone/else", tmp_path / "out2")


def test_adapter_on_a_tied_head(tmp_path):
    tiny_model(tmp_path / "base", tied=True)
    tiny_adapter(tmp_path / "a", tmp_path / "base", targets=("lm_head",))
    with pytest.raises(UnlearnError, match="as embeddings and as head"):
        merge([tmp_path / "a"], tmp_path / "base", tmp_path / "out")


def test_factor_merges_want_one_rank_targets_and_draw(project, tmp_path):
    options = dict(space="factors")
    base = project / "memorised"
    with pytest.raises(UnlearnError, match="did not start from the same LoRA weights"):
        merge([project / "over", project / "other"], base, tmp_path / "out", **options)
    merge([project / "over", project / "other"], base, tmp_path / "forced", force=True, **options)
    tiny_adapter(project / "thin", base, rank=2)
    with pytest.raises(UnlearnError, match="rank 4 and .* rank 2"):
        merge([project / "over", project / "thin"], base, tmp_path / "out", **options)
    merge([project / "over", project / "thin"], base, tmp_path / "delta")
    tiny_adapter(project / "fewer", base, targets=("q_proj",))
    with pytest.raises(UnlearnError, match="do not adapt the same modules"):
        merge([project / "over", project / "fewer"], base, tmp_path / "out", **options)
    with pytest.raises(UnlearnError, match="is a full model: --space factors"):
        merge([project / "over/merged"], base, tmp_path / "out", **options)
    with pytest.raises(UnlearnError, match="no meaning for factors"):
        merge([f"negate:{project / 'over'}"], base, tmp_path / "out", **options)
    tiny_adapter(project / "pattern", base, rank_pattern={"q_proj": 2})
    with pytest.raises(UnlearnError, match="rank_pattern"):
        merge([project / "pattern"], base, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "loftq"),
        ("loftq_config", {"loftq_bits": 4}),
        ("use_qalora", True),
        ("trainable_token_indices", [1, 2]),
        ("something_new", {"a": 1}),
    ],
)
def test_adapters_that_we_cannot_read_say_merge_lora(project, tmp_path, key, value):
    edit_json(project / "over/adapter_config.json", **{key: value})
    with pytest.raises(UnlearnError, match="axolotl merge-lora"):
        merge(both(project), project / "memorised", tmp_path / "out")


def test_activated_lora_is_no_change_of_weights(project, tmp_path):
    edit_json(project / "over/adapter_config.json", alora_invocation_tokens=[5, 6])
    with pytest.raises(UnlearnError, match="aLoRA acts on the tokens after its invocation"):
        merge(both(project), project / "memorised", tmp_path / "out")


def test_not_enough_room(project, tmp_path, monkeypatch):
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    with pytest.raises(UnlearnError, match="of disk but 1.0 kB are free"):
        merge(both(project), project / "memorised", tmp_path / "out")


def test_estimate_is_printed(made, tmp_path):
    lines: list[str] = []
    merge(both(made), made / "memorised", tmp_path / "out", log=lines.append)
    assert any("of disk" in line for line in lines)


def test_fingerprint_does_not_depend_on_the_files(tmp_path):
    model = tiny_model(tmp_path / "one")
    model.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    assert open_base(tmp_path / "one").fingerprint == open_base(tmp_path / "two").fingerprint
    tiny_model(tmp_path / "three", seed=1)
    assert open_base(tmp_path / "one").fingerprint != open_base(tmp_path / "three").fingerprint


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


# --- command ------------------------------------------------------------------------------------


def test_command_line(made, tmp_path):
    from axolotl_unlearn.cli import unlearn

    arguments = ["merge", "--method", "ties", "--density", ".8", "--parents", made / "over",
                 made / "under", "--base", made / "memorised", "--space", "delta", "--weights", "1",
                 "0.5", "--out", tmp_path / "merged"]  # fmt: skip
    result = CliRunner().invoke(unlearn, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "merged/merge.json").read_text())["recipe"]["weights"] == [1, 0.5]

    again = CliRunner().invoke(
        unlearn,
        [
            "merge",
            "--recipe",
            str(tmp_path / "merged/merge.json"),
            "--out",
            str(tmp_path / "again"),
        ],
    )
    assert again.exit_code == 0, again.output
    for name, tensor in weights(tmp_path / "again").items():
        assert torch.equal(tensor, weights(tmp_path / "merged")[name])

    again = CliRunner().invoke(
        unlearn,
        [*map(str, arguments), "--recipe", str(tmp_path / "merged/merge.json"), "--overwrite"],
    )
    assert again.exit_code == 2 and "--recipe holds --parents already" in again.output

    result = CliRunner().invoke(unlearn, [str(word) for word in arguments])
    assert result.exit_code == 2 and "--overwrite" in result.output

    result = CliRunner().invoke(unlearn, ["merge", "--out", str(tmp_path / "x")])
    assert result.exit_code == 2 and "--parents and --base" in result.output
