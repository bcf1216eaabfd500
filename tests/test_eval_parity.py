"""The whole group and `evaluate` against an independent plain loop: difference exactly 0.

On rows of LUME where they are at hand (``LUME_DIR`` or a folder shared/lume beside the
repository), else on made-up rows; the model has memorised half of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import eval_model
import pytest
import semeval_oracle
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_unlearn.evaluation.measurement import Options
from axolotl_unlearn.evaluation.run import evaluate
from axolotl_unlearn.evaluation.tasks import task_folder
from axolotl_unlearn.metrics.semeval import CELLS
from axolotl_unlearn.store import unsealed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Model folder, data folder and what the plain loop says of them."""
    home = tmp_path_factory.mktemp("parity")
    real = bool(eval_model.lume_folder())
    sides = eval_model.lume_rows(2) if real else eval_model.made_up_rows(2, retain_years=400)
    # Memorised: most retain rows and some forget rows, so that every cell is between 0 and 1.
    # Made-up rows by document: a story and its question hold the same year.
    step = 1 if real else 2
    learned = [r for i, r in enumerate(sides["forget"]) if i // step % 3 == 0]
    learned += [r for i, r in enumerate(sides["retain"]) if i // step % 3 != 0]
    folder = eval_model.write_folder(
        home / "data", sides, eval_model.documents_of(sides), general=6
    )
    path = eval_model.train_model(home / "model", learned)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    oracle = semeval_oracle.evaluate(model, tokenizer, folder)
    values = oracle["cells"]
    assert 0 < oracle["task_aggregate"] < 1 and len(set(values.values())) > 2, values
    return path, folder, oracle


def lm_eval_results(path, folder, batch_size: int):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    metadata = {"data_dir": str(folder), "min_members": 1, "pretrained": str(path)}
    return simple_evaluate(
        HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=batch_size),
        tasks=["semeval_unlearn"],
        task_manager=TaskManager(include_path=str(task_folder()), metadata=metadata),
        bootstrap_iters=0,
    )


def assert_same_scores(results: dict, oracle: dict) -> None:
    tasks, mia = results["semeval_unlearn_tasks"], results["semeval_unlearn_mia"]
    assert {name: tasks[f"{name},none"] for name in CELLS} == oracle["cells"]
    assert tasks["cells,none"] == 12
    assert tasks["task_aggregate,none"] == oracle["task_aggregate"]
    assert mia["mia_auc,none"] == oracle["mia_auc"]
    assert mia["mia_score,none"] == oracle["mia_score"]
    assert results["semeval_unlearn_mmlu"]["mmlu,none"] == oracle["mmlu"]
    aggregate = results["semeval_unlearn"]["aggregate,none"]
    assert aggregate == pytest.approx(oracle["aggregate"], abs=1e-15)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_lm_eval_group_equals_the_plain_loop(case, batch_size):
    path, folder, oracle = case
    results = lm_eval_results(path, folder, batch_size)
    assert_same_scores(results["results"], oracle)
    samples = results["samples"]["semeval_unlearn_tasks"]
    generated = sorted(sample["filtered_resps"][0] for sample in samples)
    assert generated == sorted(oracle["generations"].values())
    losses = [sample["mia_auc"] for sample in results["samples"]["semeval_unlearn_mia"]]
    ours = sorted(loss for is_member, loss, _ in losses if is_member)
    assert ours == pytest.approx(sorted(oracle["losses"]["member"]), abs=1e-5)


def test_two_processes(case, tmp_path):
    """Half of the documents each, gathered by lm-eval: the same scores."""
    path, folder, oracle = case
    out = tmp_path / "results.json"
    script = eval_model.ROOT / "tests" / "two_processes.py"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(script), str(path), str(folder), str(task_folder()), str(out)),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        timeout=600,
    )
    assert_same_scores(json.loads(out.read_text()), oracle)


def test_evaluate_equals_the_plain_loop(case, tmp_path):
    """In batches of 7, of which the last is smaller; of any size: tests/test_eval_generate.py."""
    path, folder, oracle = case
    options = {"batch_size": 7, "min_members": 1, "keep_texts": True, "progress": False}
    options = Options(out_dir=tmp_path, **options)
    (result,) = evaluate([f"original={path}"], folder, options)
    assert result["cells"] == oracle["cells"]
    assert result["task_aggregate"] == oracle["task_aggregate"]
    assert result["mia_auc"] == oracle["mia_auc"]
    assert result["mia_score"] == oracle["mia_score"]
    assert result["utility"] == oracle["mmlu"]
    assert result["aggregate"] == pytest.approx(oracle["aggregate"], abs=1e-15)
    likelihood = result["likelihood"]
    assert likelihood["member_loss"] == pytest.approx(oracle["losses"]["member"], abs=1e-5)
    written = json.loads((tmp_path / "results.json").read_text())
    (cached,) = [p for p in (tmp_path / "cache").glob("*.json") if len(p.stem) == 32]
    assert unsealed(cached.read_text())["texts"] == oracle["generations"]
    assert written["models"][0]["cells"] == result["cells"]


def test_adapter_is_evaluated_as_its_merged_model(case, tmp_path):
    """base+adapter, the adapter folder alone, and the merged weights give the same scores."""
    from peft import LoraConfig, get_peft_model

    path, folder, _ = case
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    lora = get_peft_model(model, config)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    lora.save_pretrained(tmp_path / "adapter")
    merged = lora.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "merged" / name).write_bytes((path / name).read_bytes())
    models = [
        f"pair={path}+{tmp_path / 'adapter'}",
        f"alone={tmp_path / 'adapter'}",
        f"merged={tmp_path / 'merged'}",
    ]
    options = {"min_members": 1, "progress": False, "max_gen_toks": 32}
    results = evaluate(models, folder, Options(out_dir=tmp_path / "out", **options))
    assert results[0]["cells"] == results[1]["cells"] == results[2]["cells"]
    assert results[0]["likelihood"] == results[1]["likelihood"]
    assert results[0]["likelihood"]["member_loss"] == pytest.approx(
        results[2]["likelihood"]["member_loss"], abs=1e-5
    )
