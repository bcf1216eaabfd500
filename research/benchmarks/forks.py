"""`axolotl train` started anew and from a fork server, in turn, on one thread.

    make demo OUT=out/demo
    python -m research.benchmarks.forks out/demo/configs/over.yml --epochs 4

Writes forks.json: wall clock of the command, its training alone (as
Axolotl prints it), and the start of the fork server, which a job has once; whether the adapters
have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import yaml

from axolotl_unlearn.files import write, write_json
from axolotl_unlearn.requests.steps import executable
from axolotl_unlearn.store import file_digest
from research.harness.forkserver import ForkServer

HERE = Path(__file__).resolve().parent
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def measure(config: Path, out: Path, log: Path, forked: bool) -> dict[str, object]:
    command = [executable("axolotl"), "train", str(config), "--launcher", "python"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found: dict[str, object] = {}
    log.write_text("", "utf-8")
    began = time.monotonic()
    if forked:
        server = ForkServer(environment)
        process = server.start(command, log, THREADS)
        found["server_seconds"] = round(time.monotonic() - began, 1)
        began = time.monotonic()
        code = process.wait()
        found["seconds"] = round(time.monotonic() - began, 1)
        server.close()
    else:
        with log.open("ab") as file:
            code = subprocess.call(
                command, env=environment | THREADS, stdout=file, stderr=subprocess.STDOUT
            )
        found["seconds"] = round(time.monotonic() - began, 1)
    if code:
        sys.exit(log.read_text("utf-8")[-2000:])
    (trained,) = re.findall(r"'train_runtime': '?([\d.]+)", log.read_text("utf-8"))
    digest = file_digest(out / "adapter_model.safetensors")
    return found | {"training_seconds": float(trained), "adapter": digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    content = yaml.safe_load(given.config.read_text("utf-8"))
    content |= {"num_epochs": given.epochs} if given.epochs else {}
    found: dict[str, list] = {"anew": [], "fork": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.repeats):
            for way, rows in found.items():
                out = Path(folder) / f"{way}-{number}"
                config = out.with_suffix(".yml")
                write(config, yaml.safe_dump(content | {"output_dir": str(out)}))
                rows.append(measure(config, out, out.with_suffix(".log"), way == "fork"))
                print(way, rows[-1], flush=True)
    pairs = zip(found["fork"], found["anew"], strict=True)
    adapters = {row.pop("adapter") for rows in found.values() for row in rows}
    result = {
        "date": str(date.today()),
        "epochs": content["num_epochs"],
        **found,
        "ratio": round(statistics.median(a["seconds"] / b["seconds"] for a, b in pairs), 3),
        "same_adapters": len(adapters) == 1,
    }
    write_json(HERE / "forks.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
