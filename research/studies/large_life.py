"""A model of a billion weights with a life, one request by `match`, and its cost beside retraining.

    python -m research.studies.large_life --out out/large-life          # one GPU with 40 GB
    python -m research.studies.large_life --out out/large-life --smoke  # a tiny shape, on the CPU

No weights are downloaded. A base reads chats about some people, `axolotl train` teaches it others,
two of these are deleted by ``axolotl-unlearn request new`` and ``run --way match``; *retrained* is
the base trained on the other rows. Each figure is written to large-life.json when it is known:
seconds of each command, of each training its own (without start and saving), the verdict, and how
often the answers of the deleted are given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml

from axolotl_unlearn.files import write_json
from research.benchmarks.gpu import commit
from research.benchmarks.models import machine
from research.worlds.chats import make_chats

ROOT = Path(__file__).parents[2]
PEOPLE = {"background": 400, "train": 100, "test": 42}
SMALL_PEOPLE = {"background": 12, "train": 8, "test": 14}
#: 1.07 billion weights in the layers.
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 16}
CLI = (sys.executable, "-m", "axolotl_unlearn.cli")
TRAIN = (sys.executable, "-m", "axolotl.cli.main", "train")
STEPS, DELETED = 60, 2


def config(out: Path, name: str, base: Path, rows: str, smoke: bool, **changes: Any) -> Path:
    """The chat example with this base and these rows, on the GPU; float32 weights, which keep every update."""
    made = yaml.safe_load((ROOT / "examples" / "chat" / "finetune.yml").read_text("utf-8"))
    made |= {"base_model": str(base), "output_dir": str(out / name)}
    made["datasets"][0]["path"] = str(out / "data" / f"{rows}.jsonl")
    made["test_datasets"][0]["path"] = str(out / "data" / "test.jsonl")
    if not smoke:
        del made["device_map"]
        made |= {"tf32": True, "learning_rate": 3e-4, "num_epochs": 10}
    path = out / f"{name}.yml"
    path.write_text(yaml.safe_dump(made | changes), "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="folder of large-life.json [--out]")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    out, results_folder = given.out.resolve(), given.results or given.out
    people = SMALL_PEOPLE if given.smoke else PEOPLE
    if not (out / "data" / "train.jsonl").exists():  # a machine without Faker brings them along
        make_chats(out / "data", 7, people)
    lines = (out / "data" / "train.jsonl").read_text("utf-8").splitlines()
    ids = list(dict.fromkeys(json.loads(line)["id"] for line in lines))[:DELETED]
    rest = [line for line in lines if json.loads(line)["id"] not in ids]
    (out / "data" / "rest.jsonl").write_text("\n".join(rest) + "\n", "utf-8")
    shape = out / "shape"
    shape.mkdir(exist_ok=True)
    for file in (ROOT / "examples" / "tiny-olmo").iterdir():
        content = file.read_text("utf-8")
        if file.name == "config.json" and not given.smoke:
            content = json.dumps(json.loads(content) | LARGE)
        (shape / file.name).write_text(content, "utf-8")
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "people": people,
        "rows": {"train": len(lines), "deleted": len(lines) - len(rest)},
        "seconds": {},
    }

    def run(**commands: Sequence[Any]) -> None:
        """Commands side by side."""
        start, running = time.perf_counter(), {}
        for name, words in commands.items():
            with (results_folder / f"{name}.log").open("w") as log:
                words = [str(word) for word in words]
                running[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        for name, process in running.items():
            code = process.wait()
            results["seconds"][name] = round(time.perf_counter() - start, 1)
            if code:
                results["failed"] = name
        figures(results, out, results_folder)
        write_json(results_folder / "large-life.json", results)
        print(results["seconds"], flush=True)
        if "failed" in results:
            raise SystemExit(f"{results['failed']} failed: see its log")

    def train(name: str, base: Path, rows: str, **changes: Any) -> Sequence[Any]:
        made = config(out, name, base, rows, given.smoke, **changes)
        return *TRAIN, made, "--launcher", "python"

    read = {"reinit_weights": True, "test_datasets": None, "num_epochs": 3}
    run(base=train("base", shape, "background", **read))
    run(
        finetune=train("finetune", out / "base", "train"),
        retrained=train("retrained", out / "base", "rest", seed=43),
    )
    request = out / "requests" / "1"
    where = [word for person in ids for word in ("--where", f"id={person}")]
    new = *CLI, "request", "new", out / "finetune.yml", *where
    run(new=(*new, "--out", request, "--steps", STEPS))
    threads = os.cpu_count() or 1
    run(run=(*CLI, "request", "run", request, "--way", "match", "--threads", threads))


def figures(results: dict[str, Any], out: Path, logs: Path) -> None:
    """What the runs wrote by now."""
    request = out / "requests" / "1"
    results["training_seconds"] = {
        path.stem: float(seconds[-1])
        for path in [*sorted(logs.glob("*.log")), *sorted(request.glob("work/logs/*"))]
        if (seconds := re.findall(r"'train_runtime': '?([0-9.]+)", path.read_text("utf-8")))
    }
    if (cost := request / "model" / "cost.json").exists():
        results["forget"] = json.loads(cost.read_text("utf-8"))
    if (record := request / "record.json").exists():
        results["record_seconds"] = json.loads(record.read_text("utf-8"))["predicate"]["seconds"]
    if (verdict := request / "verdict.json").exists():
        judged = json.loads(verdict.read_text("utf-8"))
        results["verdict"] = {key: judged[key] for key in ("good", "status", "reasons")}
        results["documents"] = [
            {key: line[key] for key in ("reading", "p", "rank", "answers", "answers_said")}
            | {"said_before": line["before"]["answers_said"]}
            for line in judged["documents"]
        ]


if __name__ == "__main__":
    main()
