"""The paper's recipe through the real commands at full shape, on one GPU.

    python -m research.benchmarks.recipe_gpu --lume ../shared/lume        # 20 GB below --work
    python -m research.benchmarks.recipe_gpu --smoke                      # the same on a tiny shape

A model of OLMo-7B's shape with random weights (nothing is downloaded; time and memory do not depend
on their values, so no score is reported), the task's 1112 forget and 1136 retain rows, and
`examples/olmo-7b/over.yml`, four pairs a step.
Then `axolotl-unlearn merge --space factors` of two adapters of that shape. Writes recipe-gpu.json:
wall clock of each command and, of the training, its own seconds and peak memory of the GPU
(`cost.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import yaml

from axolotl_unlearn.files import write_json
from research.benchmarks import models
from research.benchmarks.gpu import commit

TINY = models.Shape(64, 2, 128, 4, models.VOCABULARY)
SMOKE_ROWS = 16


def make_model(shape: models.Shape, folder: Path, texts: list[str], device: str) -> None:
    """Weights in bfloat16, and a tokenizer trained on the rows (77 tokens a row on average)."""
    from transformers import PreTrainedTokenizerFast

    model = models.olmo(shape, torch.bfloat16, device)
    model.save_pretrained(folder)
    # The padding's embedding is zero. As the first token of a row it would stay zero through all
    # layers, and the gradient of a layer norm at zero, 32 layers deep, is infinite.
    trained = models.train_bpe(texts, ("<eos>", "<pad>"))
    assert (trained.token_to_id("<eos>"), trained.token_to_id("<pad>")) == (models.EOS, models.PAD)
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=trained, **special).save_pretrained(folder)


def timed(words: list[str], log: Path) -> float:
    """Seconds of a command; its output goes to ``log``."""
    start = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{words[:3]} failed:\n{log.read_text('utf-8')[-3000:]}")
    return time.perf_counter() - start


def config_of(example: str, work: Path, pairs: int, smoke: bool) -> Path:
    config = yaml.safe_load((models.ROOT / "examples" / "olmo-7b" / f"{example}.yml").read_text())
    config |= {
        "base_model": str(work / "model"),
        "output_dir": str(work / example),
        "dataset_prepared_path": str(work / "prepared"),
        "micro_batch_size": pairs,
        "gradient_accumulation_steps": 1,
        "save_strategy": "no",
        "logging_steps": 50,
        "optimizer": "adamw_torch",  # the paged one needs managed memory of a lent card
    }
    del config["tokenizer_config"]
    for entry in config["datasets"]:
        entry["path"] = str(work / Path(entry["path"]).name)
    if smoke:
        config |= {"bf16": False, "num_epochs": 1}
    path = work / f"{example}.yml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    lume = Path(os.environ.get("LUME_DIR") or models.ROOT.parent / "shared" / "lume")
    parser.add_argument("--lume", type=Path, default=lume)
    parser.add_argument("--work", type=Path, help="room for the models [a temporary folder]")
    parser.add_argument("--out", type=Path, default=models.ROOT / "research" / "benchmarks")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument(
        "--epochs", type=int, help="fewer than the recipe's five: the first is dear"
    )
    parser.add_argument("--steps", type=int, help="end the training after these")
    parser.add_argument("--no-merge", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if not (given.lume / "train" / "forget.jsonl").is_file():
        parser.error(f"{given.lume} has no train/forget.jsonl; give LUME's folder (--lume)")
    if not given.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; `--smoke` runs the same code on the CPU")
    known = given.out / "recipe-gpu.json"
    if not given.smoke and known.exists():
        if json.loads(known.read_text("utf-8")).get("commit") == commit():
            print(f"{known} is of this commit", flush=True)
            return
    passing = None if given.work else tempfile.TemporaryDirectory()  # removed with the process
    work = given.work or Path(passing.name)
    work.mkdir(parents=True, exist_ok=True)
    rows = {}
    for side in ("forget", "retain"):
        lines = (given.lume / "train" / f"{side}.jsonl").read_text("utf-8").splitlines()
        lines = lines[:SMOKE_ROWS] if given.smoke else lines
        (work / f"{side}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        rows[side] = [json.loads(line) for line in lines]
    texts = [f"{row['input']} {row['output']}" for side in rows.values() for row in side]
    shape = TINY if given.smoke else models.OLMO_7B
    results: dict[str, object] = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": models.machine(),
        "gpu": "none (smoke)" if given.smoke else torch.cuda.get_device_name(0),
        "rows": {side: len(found) for side, found in rows.items()},
        "pairs": given.pairs,
    }
    start = time.perf_counter()
    if not (work / "model" / "config.json").exists():
        make_model(shape, work / "model", texts, "cpu" if given.smoke else "cuda:0")
    results["model_seconds"] = time.perf_counter() - start
    if not given.smoke:
        torch.cuda.empty_cache()
    config = config_of("over", work, given.pairs, given.smoke)
    shorter = {"num_epochs": given.epochs, "max_steps": given.steps}
    shorter = {key: count for key, count in shorter.items() if count}
    if shorter:
        results |= shorter
        config.write_text(
            yaml.safe_dump(yaml.safe_load(config.read_text("utf-8")) | shorter), "utf-8"
        )
    words = [sys.executable, "-m", "axolotl.cli.main", "train", str(config), "--launcher", "python"]
    results["command_seconds"] = timed(words, work / "over.log")
    results["training"] = json.loads((work / "over" / "cost.json").read_text("utf-8"))
    if not given.smoke:  # the merge may fail where mergekit is not installed
        write_json(given.out / "recipe-gpu.json", results)
    if given.no_merge:
        print(json.dumps(results, indent=1), flush=True)
        return
    shutil.rmtree(work / "under", ignore_errors=True)
    shutil.copytree(work / "over", work / "under")
    words = [sys.executable, "-m", "axolotl_unlearn.cli", "merge", "--space", "factors"]
    words += ["--method", "ties"]
    words += ["--density", "0.8", "--parents", str(work / "over"), str(work / "under")]
    words += ["--base", str(work / "model"), "--out", str(work / "merged")]
    results["merge_seconds"] = timed(words, work / "merge.log")
    if not given.smoke:
        write_json(given.out / "recipe-gpu.json", results)
    print(json.dumps(results, indent=1), flush=True)


if __name__ == "__main__":
    main()
