"""Shipped examples and mergekit recipes, run on tiny stand-ins of the same architectures."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from merging_models import merged_copy, run_mergekit, tiny_adapter, tiny_model, weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

REPO = Path(__file__).resolve().parents[1]
FOLDERS = (REPO / "tests", REPO / "research" / "tests")
RECIPES = REPO / "mergekit_configs"
EXAMPLES = REPO / "examples"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder laid out as the stock commands leave it, with the shipped recipes."""
    root = tmp_path_factory.mktemp("project")
    tiny_model(root / "out/memorised")
    for name, seed in (("over", 1), ("under", 2)):
        tiny_adapter(root / "out" / name, root / "out/memorised", train_seed=seed)
        merged_copy(root / "out" / name, root / "out/memorised", root / "out" / name / "merged")
    shutil.copytree(RECIPES, root / "mergekit_configs")
    return root


def ties_by_hand(base, parents, density):
    """TIES written as the paper's three steps, in float64, one weight at a time by masks."""
    changes = []
    for parent in parents:
        change = (parent - base).double()
        keep = int(density * change.numel())
        limit = change.abs().flatten().sort(descending=True).values[keep - 1]
        changes.append(torch.where(change.abs() >= limit, change, 0.0))
    elected = torch.where(sum(changes) >= 0, 1.0, -1.0)
    agree = [torch.where(change.sign() == elected, change, 0.0) for change in changes]
    count = sum((change.sign() == elected).double() for change in changes)
    return base.double() + sum(agree) / count.clamp(min=1)


def test_stock_recipe_runs_verbatim_and_is_ties(project, monkeypatch):
    monkeypatch.chdir(project)
    run_mergekit("mergekit-yaml", "mergekit_configs/ties.yml", "out/merged")
    merged = weights(project / "out/merged")
    base = weights(project / "out/memorised")
    parents = [weights(project / "out" / name / "merged") for name in ("over", "under")]
    assert merged.keys() == base.keys()
    moved = 0
    for name, tensor in merged.items():
        expected = ties_by_hand(base[name], [parent[name] for parent in parents], 0.8)
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
        assert tensor.dtype == torch.float32
        moved += int(not torch.equal(tensor, base[name]))
    assert moved == 2 * 4

    from transformers import AutoTokenizer

    AutoModelForCausalLM.from_pretrained(project / "out/merged")
    tokenizer = AutoTokenizer.from_pretrained(project / "out/merged")
    assert tokenizer.eos_token == "</s>"


def test_factor_recipe_is_pefts_ties_bit_for_bit(project, monkeypatch):
    from peft import PeftModel

    zeros = {key: torch.zeros_like(t) for key, t in weights(project / "out/over").items()}
    save_file(zeros, project / "out/over/zeros.safetensors")
    monkeypatch.chdir(project)
    run_mergekit("mergekit-pytorch", "mergekit_configs/factors-ties.yml", "out/factors")
    merged = weights(project / "out/factors")
    (project / "out/over/zeros.safetensors").unlink()

    model = AutoModelForCausalLM.from_pretrained(project / "out/memorised")
    model = PeftModel.from_pretrained(model, project / "out/over", adapter_name="over")
    model.load_adapter(project / "out/under", adapter_name="under")
    model.add_weighted_adapter(
        ["over", "under"], [1.0, 1.0], "merged", combination_type="ties", density=0.8
    )
    expected = {
        name.replace(".merged.weight", ".weight"): tensor
        for name, tensor in model.state_dict().items()
        if ".merged.weight" in name
    }
    assert expected.keys() == merged.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name


# --- every example config and the recipes on what they make --------------------------------------

#: What stands in for weights that no test machine has: same architecture, a few kilobytes.
OLMO_7B = "llmunlearningsemeval2025organization/olmo-finetuned-semeval25-unlearning"
STAND_INS = {
    OLMO_7B: dict(kind="olmo"),
    "out/real/smollm2": dict(kind="llama", tied=True, num_hidden_layers=30),
}
CHAINS = {
    "olmo-7b": ["olmo-7b/over", "olmo-7b/under"],
    "smollm2": [
        *("smollm2/memorise", "smollm2/over", "smollm2/under"),
        *("smollm2/msa_forget", "smollm2/msa_retain", "smollm2/reinforced"),
    ],
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yml")), ids=lambda path: path.name)
def test_no_example_is_left_out(path):
    """Trained here, or tried by the test that names it."""
    name = str(path.relative_to(EXAMPLES).with_suffix(""))
    if name not in [name for chain in CHAINS.values() for name in chain]:
        others = [file.read_text() for tests in FOLDERS for file in tests.glob("test_*.py")]
        others.append((EXAMPLES / "README.md").read_text())  # run by test_stock_commands.py
        naming = [text for text in others if path.stem in text and "examples" in text]
        assert naming, f"no test tries {path}: add it to CHAINS"


def small(config: dict, base: str) -> dict:
    """An example on this machine: two steps, no GPU; model, adapter and objectives as they are."""
    config = dict(config, base_model=base, max_steps=2, bf16=False, fp16=False)
    config |= {"lora_r": 4, "lora_alpha": 4, "micro_batch_size": 2, "warmup_ratio": 0.0}
    config |= {"gradient_accumulation_steps": 1, "optimizer": "adamw_torch"}
    config["tokenizer_config"] = base
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkout in which the example configs of both big models were trained and merged."""
    from axolotl.cli.merge_lora import do_cli as merge_lora
    from axolotl.cli.train import do_cli as train

    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(RECIPES, root / "mergekit_configs")
    rows = [
        {
            "id": f"{n}{kind}",
            "input": f"What does NAME say of {n}?",
            "output": f"It is {n * 7}.",
            "task": "Task1",
        }
        for n, kind in enumerate(("sc1", "qa0") * 6)
    ]
    names = ("forget", "retain", "background", "memorise")
    for folder in ("data/semeval", "out/real/data"):
        (root / folder).mkdir(parents=True)
        for name in names:
            lines = "".join(json.dumps(row | {"id": f"{name}-{row['id']}"}) + "\n" for row in rows)
            (root / folder / f"{name}.jsonl").write_text(lines.replace("NAME", name))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "argv", ["axolotl"])
        for name, options in STAND_INS.items():
            tiny_model(root / name, hidden_size=16, intermediate_size=24, **options)
        for name in (name for chain in CHAINS.values() for name in chain):
            config = yaml.safe_load((EXAMPLES / f"{name}.yml").read_text())
            path = root / f"{name.replace('/', '-')}.yml"
            path.write_text(yaml.safe_dump(small(config, config["base_model"])))
            train(config=str(path))
            merge_lora(config=str(path))
    return root


def merged_by(trained, recipe: str, out: str) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained)
        config = f"mergekit_configs/{recipe}.yml"
        run_mergekit("mergekit-yaml", config, out, "--no-write-model-card", "--quiet")
    return weights(trained / out)


def test_the_papers_recipe_runs_on_what_its_examples_make(trained):
    """Trained from the base that the recipe names, merged by it: TIES of the two runs."""
    # mergekit takes the hub's name; a folder of that name stands in when it is written as a path
    path = trained / "mergekit_configs/olmo-7b-ties.yml"
    text = path.read_text()
    assert f"base_model: {OLMO_7B}\n" in text
    path.write_text(text.replace(f"base_model: {OLMO_7B}", f"base_model: ./{OLMO_7B}"))
    merged = merged_by(trained, "olmo-7b-ties", "out/olmo-7b/merged")
    base = weights(trained / OLMO_7B)
    parents = [weights(trained / f"out/olmo-7b/{name}/merged") for name in ("over", "under")]
    assert any(not torch.equal(parents[0][name], base[name]) for name in base)
    for name, tensor in merged.items():
        expected = ties_by_hand(base[name], [parent[name] for parent in parents], 0.8)
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)


def logits_of(model: Path | dict) -> torch.Tensor:
    folder, state = model if isinstance(model, tuple) else (model, None)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if state is not None:
        loaded.load_state_dict(state, strict=False)
    with torch.no_grad():
        return loaded.eval()(input_ids=torch.arange(2, 26).reshape(2, 12)).logits


def combined(*terms: tuple[float, Path]) -> tuple[Path, dict]:
    """sum of factor * weights in float64, and a folder that says what model it is."""
    states = [(factor, weights(folder)) for factor, folder in terms]
    return terms[0][1], {
        name: sum(factor * state[name].double() for factor, state in states)
        for name in states[0][1]
    }


def test_msa_and_negation_are_their_formulas(trained):
    """theta_D - (theta_1 - theta_0) + (theta_2 - theta_0) and theta_D - (theta_1 - theta_D)."""
    real = trained / "out/real"
    zero, model = real / "smollm2", real / "memorised/merged"
    one, two = real / "msa_forget/merged", real / "msa_retain/merged"
    expected = logits_of(combined((1, model), (-1, one), (1, zero), (1, two), (-1, zero)))
    assert (expected - logits_of(model)).abs().max() > 1e-3
    merged_by(trained, "msa", "out/real/msa")
    torch.testing.assert_close(logits_of(real / "msa"), expected, rtol=0, atol=1e-5)

    reinforced = real / "reinforced"
    expected = logits_of(combined((2, model), (-1, reinforced / "merged")))
    merged_by(trained, "negation", "out/real/negated")
    torch.testing.assert_close(logits_of(real / "negated"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yml")), ids=lambda path: path.name)
def test_recipes_use_parameters_that_mergekit_knows(recipe):
    """mergekit ignores a misspelt parameter: each name must belong to the method."""
    from mergekit import merge_methods

    config = yaml.safe_load(recipe.read_text())
    known = {
        parameter.name for parameter in merge_methods.get(config["merge_method"]).spec.parameters
    }
    used = set(config.get("parameters", {}))
    for model in config["models"]:
        used |= set(model.get("parameters", {}))
    assert used <= known
    assert config["dtype"] == "float32"
    assert "out/" in json.dumps(config)
