"""The shipped mergekit recipes, run by mergekit's own command lines on tiny OLMo models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from merging_models import merged_copy, tiny_adapter, tiny_model, weights
from safetensors.torch import save_file

REPO = Path(__file__).resolve().parents[1]
RECIPES = REPO / "mergekit_configs"


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


def run_script(script: str, *arguments: str, cwd: Path) -> None:
    command = Path(sys.executable).with_name(script)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


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


def test_stock_recipe_runs_verbatim_and_is_ties(project):
    run_script("mergekit-yaml", "mergekit_configs/ties.yml", "out/merged", cwd=project)
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

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(project / "out/merged")
    tokenizer = AutoTokenizer.from_pretrained(project / "out/merged")
    assert tokenizer.eos_token == "<eos>"


def test_factor_recipe_is_pefts_ties_bit_for_bit(project):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    zeros = {key: torch.zeros_like(t) for key, t in weights(project / "out/over").items()}
    save_file(zeros, project / "out/over/zeros.safetensors")
    run_script("mergekit-pytorch", "mergekit_configs/factors-ties.yml", "out/factors", cwd=project)
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


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yml")), ids=lambda path: path.name)
def test_recipes_use_parameters_that_mergekit_knows(recipe):
    """mergekit ignores a misspelt parameter: each name must belong to the method."""
    import yaml
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
