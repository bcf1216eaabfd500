"""All benchmarks of speed and memory: results.json, results.md and a plot in this folder.

    make bench            # or: python research/benchmarks/run.py [--quick]

Takes about a quarter of an hour on two quiet cores. Every variant runs in a process of its own, in
turn, so that a disturbance meets all of them; ratios are medians over paired steps, in wall time
and in processor time (which a busy machine disturbs less).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from research.benchmarks import models, step  # noqa: E402

#: What the other ways and plain fine-tuning are compared in: (labels, precision, variants).
PLANS = {
    "step": ("answer", "float32", list(step.VARIANTS)),
    "step_document": ("document", "float32", ["ours", "finetune", "finetune_packed"]),
    "step_autocast": ("answer", "autocast", ["ours", "finetune"]),
    "step_bf16_weights": ("answer", "bf16", ["ours", "finetune"]),
}


def as_markdown(results: dict) -> str:
    """The tables that docs/performance.md refers to."""
    facts = results["machine"]
    lines = [
        "# Benchmarks",
        "",
        f"Made by `make bench` on {results['date']}: {facts['processor']}, {facts['cores']} cores, "
        f"{facts['threads']} threads, load {facts['load_before'][0]} before the start; torch "
        f"{facts['torch']}, transformers {facts['transformers']}, peft {facts['peft']}. Rows: "
        f"{results['rows']}.",
        "",
    ]
    for name in PLANS:
        if name not in results:
            continue
        table = results[name]
        lines += [
            f"## {name}: labels on the {PLANS[name][0]}, {PLANS[name][1]}",
            "",
            "| way | seconds a step | processor seconds | peak MB |",
            "|---|---|---|---|",
        ]
        for way in PLANS[name][2]:
            if way in table:
                row = table[way]
                lines.append(
                    f"| {way} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} "
                    f"| {row['peak_mb']:.0f} |"
                )
        lines += ["", "| ratio | wall time | processor time | memory |", "|---|---|---|---|"]
        for ratio, row in table["ratios"].items():
            lines.append(f"| {ratio} | {row['time']} | {row['cpu_time']} | {row['memory']} |")
        lines.append("")
    return "\n".join(lines)


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
    """results.json, results.md and results.svg."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    (folder / "results.md").write_text(as_markdown(results) + "\n", "utf-8")
    plot(results, folder / "results.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the step table only, three steps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "research" / "benchmarks")
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
    print(as_markdown(results))


if __name__ == "__main__":
    main()
