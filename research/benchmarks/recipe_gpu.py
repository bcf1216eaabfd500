"""The paper's recipe through the real commands at full shape, on one GPU.

    make bench-gpu
    python -m research.benchmarks.recipe_gpu --smoke     # the same on a tiny shape, on the CPU

A model of OLMo-7B's shape with random weights (time and memory do not depend on their values, so no
score is reported), the task's 1112 forget and 1136 retain rows, `examples/olmo-7b/over.yml`; then
stock mergekit by `mergekit_configs/olmo-7b-ties.yml` (to bfloat16) and `axolotl-unlearn eval` of 100 rows of each
side. `commands` of `recipe-gpu.json` has the seconds of each, written when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml

from axolotl_unlearn.files import write_json
from research.benchmarks import models
from research.benchmarks.gpu import commit

TINY = models.Shape(64, 2, 128, 4, models.VOCABULARY)


def make_model(shape: models.Shape, folder: Path, texts: list[str], device: str) -> None:
    """Weights in bfloat16, and a tokenizer trained on the rows (77 tokens a row on average)."""
    from transformers import PreTrainedTokenizerFast

    models.olmo(shape, torch.bfloat16, device).save_pretrained(folder)
    # An id of its own for the padding: its embedding is zero, and the gradient of a layer norm at
    # zero, 32 layers deep, is infinite.
    trained = models.train_bpe(texts, ("<eos>", "<pad>"))
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=trained, **special).save_pretrained(folder)


def config_of(work: Path, given: argparse.Namespace) -> Path:
    """The example with the folder's files, no checkpoints, and an optimizer without managed memory
    (which a lent card may not give)."""
    text = (models.ROOT / "examples/olmo-7b/over.yml").read_text("utf-8")
    config = yaml.safe_load(text) | {
        "base_model": str(work / "model"),
        "output_dir": str(work / "over"),
        "dataset_prepared_path": str(work / "prepared"),
        "micro_batch_size": given.pairs,
        "gradient_checkpointing": given.checkpointing,
        "num_epochs": given.epochs,
        "save_strategy": "no",
        "logging_steps": 50,
        "optimizer": "adamw_torch",
    }
    del config["tokenizer_config"]
    if not given.checkpointing:
        del config["gradient_checkpointing_kwargs"]
    for entry in config["datasets"]:
        entry["path"] = str(work / Path(entry["path"]).name)
    if given.smoke:
        config |= {"bf16": False}
    path = work / "over.yml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    lume = Path(os.environ.get("LUME_DIR") or models.ROOT.parent / "shared" / "lume")
    parser.add_argument("--lume", type=Path, default=lume)
    parser.add_argument("--out", type=Path, default=models.ROOT / "research" / "benchmarks")
    parser.add_argument("--pairs", type=int, default=8, help="forget rows a step, as many retain")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--minutes", type=float, default=8, help="begin no command after these")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; `--smoke` runs the same code on the CPU")
    with tempfile.TemporaryDirectory() as work:
        run(given, Path(work))


def run(given: argparse.Namespace, work: Path) -> None:
    begun, texts, path = time.perf_counter(), [], given.out / "recipe-gpu.json"
    known = (
        json.loads(path.read_text("utf-8")) if path.exists() else {}
    )  # what the tests said, a longer training
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": models.machine(),
        "gpu": "none (smoke)" if given.smoke else torch.cuda.get_device_name(0),
        "pairs": given.pairs,
        "epochs": given.epochs,
        "checkpointing": given.checkpointing,
    }
    for side in ("forget", "retain"):
        lines = (given.lume / "train" / f"{side}.jsonl").read_text("utf-8").splitlines()
        lines = lines[:16] if given.smoke else lines
        texts += lines
        (work / f"{side}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        (work / "data").mkdir(exist_ok=True)
        (work / "data" / f"{side}.jsonl").write_text("\n".join(lines[:100]) + "\n", "utf-8")
        results[f"{side}_rows"] = len(lines)

    def command(name: str, *words: str) -> None:
        """Its seconds; none begins after the time is over."""
        if time.perf_counter() - begun > 60 * given.minutes:
            raise SystemExit(f"{name}: no time is left")
        start = time.perf_counter()
        with (given.out / f"{name}.log").open("w") as log:
            done = subprocess.run([sys.executable, "-m", *words], stdout=log, stderr=log)
        what = "failed_after" if done.returncode else "seconds"
        results[f"{name}_{what}"] = round(time.perf_counter() - start, 1)
        write_json(path, known | {"commands": results})
        print(name, results, flush=True)
        if done.returncode:
            raise SystemExit((given.out / f"{name}.log").read_text("utf-8")[-3000:])

    shape = TINY if given.smoke else models.OLMO_7B
    make_model(shape, work / "model", texts, "cpu" if given.smoke else "cuda:0")
    results["model_seconds"] = round(time.perf_counter() - begun, 1)
    if not given.smoke:
        torch.cuda.empty_cache()
    config = config_of(work, given)
    command("train", "axolotl.cli.main", "train", str(config), "--launcher", "python")
    command("merge_lora", "axolotl.cli.main", "merge-lora", str(config))
    recipe = yaml.safe_load((models.ROOT / "mergekit_configs/olmo-7b-ties.yml").read_text("utf-8"))
    recipe |= {"base_model": str(work / "model"), "dtype": "bfloat16"}
    # Another model of this shape: values play no part.
    (work / "under").symlink_to(work / "over")
    for model, name in zip(recipe["models"], ("over", "under"), strict=True):
        model["model"] = str(work / name / "merged")
    (work / "ties.yml").write_text(yaml.safe_dump(recipe), "utf-8")
    cuda = [] if given.smoke else ["--cuda"]
    command(
        "merge", "mergekit.scripts.run_yaml", str(work / "ties.yml"), str(work / "merged"), *cuda
    )
    command(
        "eval", "axolotl_unlearn.cli", "eval", f"merged={work}/merged", "--max-gen-toks", "64",
        "--data", str(work / "data"), "--min-members", "0", "--out", str(work / "eval"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
