"""Does the demo's outcome hold elsewhere? Its training with other seeds and numbers of threads.

    python -m research.studies.demo OUT [SEED-THREADS ...]

Each run has a folder OUT/SEED-THREADS; what is there is not made again. research/results/demo.json has
of each model the aggregate, its three parts, the share of nonsense among its longer answers about
rows of either side, and the verdict; and whether the merge is above both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.verdict import judged
from research import demo
from research.benchmarks.models import machine

ROOT = Path(__file__).parents[2]
# named before any of them was run; the settings were chosen on 42, 43 and 45
RUNS = tuple(f"{seed}-{threads}" for seed in range(47, 52) for threads in (1, 2))
SCORES = ("aggregate", "task_aggregate", "mia_auc", "utility")
TRAINED = ("memorise", "forget-over", "adapter-over", "forget-under", "adapter-under", "merge")
CPU = {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, seed: int, threads: int) -> None:
    """The demo's commands but for the request and the retrained model."""
    for name in ("examples", "mergekit_configs"):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    for config in folder.glob("examples/*.yml"):
        config.write_text(config.read_text("utf-8").replace("seed: 42", f"seed: {seed}"), "utf-8")
    by_name = dict(zip(demo.STEPS, demo.commands(), strict=False))
    steps = {demo.STEPS[name][1]: by_name[name] for name in TRAINED}
    scored = [word for word in by_name["score"] if not word.startswith(("request=", "retrained="))]
    steps[demo.STEPS["score"][1]] = scored
    environment = os.environ | CPU | {"OMP_NUM_THREADS": str(threads)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for made, words in steps.items():
        if not (folder / demo.OUT / made).exists():
            subprocess.run(words, cwd=folder, env=environment, check=True)


def main() -> None:
    rows = []
    for name in sys.argv[2:] or RUNS:
        folder, (seed, threads) = Path(sys.argv[1]).resolve() / name, map(int, name.split("-"))
        run(folder, seed, threads)
        results = json.loads((folder / "out/eval/results.json").read_text("utf-8"))
        verdicts = judged(results)
        models = {
            one["name"]: {score: round(one[score], 4) for score in SCORES}
            | {
                "nonsense": {
                    "forget": one["collapse"]["forget"]["nonsense"],
                    "retain": one["collapse"]["nonsense"],
                }
            }
            | {"verdict": verdicts[one["name"]].label, "below_gate": one["gate"]["below_gate"]}
            for one in results["models"]
        }
        best = max(models["over"]["aggregate"], models["under"]["aggregate"])
        above = models["merged"]["aggregate"] > best
        rows.append({"seed": seed, "threads": threads, "merged_above_both": above} | models)
        print(rows[-1], flush=True)
    versions = {"versions": results["versions"], "machine": machine()}
    write_json(ROOT / "research/results/demo.json", versions | {"runs": rows})


if __name__ == "__main__":
    main()
