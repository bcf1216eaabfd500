"""`axolotl-unlearn eval` beside stock lm-eval: the same model, rows, token limit and type.

    python -m research.benchmarks.evaluation MODEL [--out DIR] [--rounds 2]     (LUME_DIR, TOFU_DIR)

LUME documents and TOFU's general questions of a subset, each way in turn; the Aggregates have to
agree. Ours measures extraction, canaries' ranks and six membership scores beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json
from research.analysis.seeds import facts
from research.runs import ROOT, Runs
from research.studies.reproduce import SOURCES
from research.worlds import lume

SEED = 521


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/evaluation"))
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    out, model = given.out.absolute(), given.model.absolute()
    lume.build_subset(SOURCES["LUME"], out / "data", SOURCES["TOFU"], seed=SEED)
    lume.add_halves(out / "data", SEED)
    half, runs, scores = out / "data" / "test", Runs(out), {}
    lm_eval = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32"]
    lm_eval += ["--device", "cpu", "--tasks", "semeval_unlearn", "--batch_size", 64]
    lm_eval += ["--include_path", ROOT / "eval_tasks", "--metadata", f'{{"data_dir": "{half}"}}']
    for number in range(given.rounds):
        made = out / f"ours{number}"
        words = ["axolotl-unlearn", "eval", f"model={model}", "--data", half, "--out", made]
        runs.command(made.name, [*words, "--min-members", 10], makes=made / "results.json")
        found = json.loads((made / "results.json").read_text("utf-8"))["models"][0]["aggregate"]
        scores.setdefault("axolotl-unlearn eval", []).append((made.name, found))
        made = out / f"stock{number}"
        runs.command(made.name, [*lm_eval, "--output_path", made], makes=made)
        (path,) = made.rglob("results_*.json")
        found = json.loads(path.read_text("utf-8"))["groups"]["semeval_unlearn"]["aggregate,none"]
        scores.setdefault("lm_eval --model hf", []).append((made.name, found))
    took, rows = {}, []
    for way, done in scores.items():
        took[way] = [runs.done[name] | {"aggregate": score} for name, score in done]
        took[way] = [
            {k: one[k] for k in ("seconds", "processor", "aggregate")} for one in took[way]
        ]
        medians = [statistics.median(one[k] for one in took[way]) for k in ("seconds", "processor")]
        rows.append([f"`{way}`", *(f"{value:.0f}" for value in medians)])
    aggregates = [one["aggregate"] for ran in took.values() for one in ran]
    if max(aggregates) - min(aggregates) > 1e-6:
        raise SystemExit(f"the Aggregates differ: {took}")
    names = ("forget", "retain", "member", "nonmember", "general")
    counts = {name: len(read_json_lines(half / f"{name}.jsonl")) for name in names}
    table = {"columns": ["command", "seconds", "processor seconds"], "rows": rows}
    made = facts("python -m research.benchmarks.evaluation MODEL") | {"rows": counts, "runs": took}
    path = ROOT / "research" / "results" / "evaluation.json"
    write_json(path, made | {"tables": {"seconds": table}})


if __name__ == "__main__":
    main()
