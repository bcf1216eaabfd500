"""All benchmarks of speed and memory: results.json and a plot in this folder.

    make bench            # or: python -m research.benchmarks.run [--quick]

Takes about a quarter of an hour on two quiet cores. Every variant runs in a process of its own, in
turn, so that a disturbance meets all of them; ratios are medians over paired steps, in wall time
and in processor time (which a busy machine disturbs less).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import date
from pathlib import Path

import torch

from research.benchmarks import models, step

#: What the other ways and plain fine-tuning are compared in: (labels, precision, variants).
PLANS = {
    "step": ("answer", "float32", list(step.VARIANTS)),
    "step_document": ("document", "float32", ["ours", "finetune", "finetune_packed"]),
    "step_autocast": ("answer", "autocast", ["ours", "finetune"]),
    "step_bf16_weights": ("answer", "bf16", ["ours", "finetune"]),
}


def plot(results: dict, path: Path) -> None:
    """Bars of time and memory of each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ways = [w for w in PLANS["step"][2] if w in results["step"]]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4))
    for axis, key, unit in (
        (axes[0], "cpu_seconds", "processor seconds a step"),
        (axes[1], "peak_mb", "peak resident memory, MB"),
    ):
        values = [results["step"][w][key] for w in ways]
        colours = ["#2a6f97" if w.startswith("ours") else "#a9a9a9" for w in ways]
        axis.barh(ways[::-1], values[::-1], color=colours[::-1])
        axis.set_xlabel(unit)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write(results: dict, folder: Path) -> None:
    """results.json and results.svg."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    plot(results, folder / "results.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the step table only, three steps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    _, source = models.lume_rows()
    results: dict = {
        "date": date.today().isoformat(),
        "machine": models.machine(),
        "rows": f"{source}, 4 forget + 4 retain a step, at most {models.MAX_LENGTH} tokens",
    }
    plans = {"step": PLANS["step"]} if options.quick else PLANS
    for name, (labels, precision, variants) in plans.items():
        results[name] = step.compare(
            variants,
            steps=3 if options.quick else options.steps,
            rounds=options.rounds,
            labels=labels,
            precision=precision,
            threads=options.threads,
        )
        write(results, options.out)  # whatever comes later, this much is kept
    results["minutes"] = round((time.monotonic() - start) / 60, 1)
    results["machine"]["load_after"] = [round(x, 2) for x in os.getloadavg()]
    write(results, options.out)
    for name in plans:
        print(name, json.dumps(results[name]["ratios"], indent=1))


if __name__ == "__main__":
    main()
