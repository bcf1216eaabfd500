"""The step of another commit beside the present one, on the same machine in turn.

    git worktree add ../before COMMIT
    python -m research.benchmarks.before_after ../before

Each way runs in a process of its own, before and after in turn, so that a disturbance meets both.
Writes before-after.json: processor seconds a step (median) and peak memory of both, and the ratios
(of time: median over paired steps).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

from research.benchmarks import models

HERE = Path(__file__).resolve().parent
#: (labels, precision, way)
ROWS = (
    ("answer", "float32", "ours"),
    ("document", "float32", "ours"),
    ("answer", "float32", "ours_npo_nll"),
    ("answer", "float32", "ours_cached"),
    ("answer", "bf16", "ours"),
    ("answer", "autocast", "ours"),
    ("answer", "float32", "ours_first_epoch"),
    ("answer", "float32", "finetune_packed"),
    ("document", "float32", "finetune_packed"),
)


def measure(checkout: Path, labels: str, precision: str, way: str, steps: int) -> dict:
    command = [
        *(sys.executable, "-m", "research.benchmarks.step", "--variant", way, "--labels", labels),
        *("--precision", precision, "--steps", str(steps)),
    ]
    place = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=checkout, env=os.environ | place, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    sides = {"before": given.before.resolve(), "after": HERE.parents[1]}
    commits = {
        name: subprocess.check_output(
            ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], text=True
        ).strip()
        for name, folder in sides.items()
    }
    results = {
        "command": "python -m research.benchmarks.before_after ../before",
        "date": date.today().isoformat(),
        "machine": models.machine(),
        "commits": commits,
        "rows": [],
    }
    for labels, precision, way in ROWS:
        found = {
            name: measure(folder, labels, precision, way, given.steps)
            for name, folder in sides.items()
        }
        row = {"way": way, "labels": labels, "precision": precision}
        for name, one in found.items():
            row[name] = {
                "cpu_seconds": round(statistics.median(one["cpu_seconds"]), 3),
                "peak_mb": round(one["peak_mb"]),
            }
        row["ratio"] = {
            "time": round(
                statistics.median(
                    after / before
                    for before, after in zip(
                        *(found[name]["cpu_seconds"] for name in sides), strict=True
                    )
                ),
                3,
            ),
            "memory": round(row["after"]["peak_mb"] / row["before"]["peak_mb"], 3),
        }
        results["rows"].append(row)
        print(labels, precision, way, row["before"], row["after"], row["ratio"], flush=True)
        (HERE / "before-after.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
