"""Does an unlearning update hold on the next version of its base? Beside unlearning again.

    python -m research.studies.next_version out/demo out/next

The demo's original is tuned on further documents and its retained rows (the next version, which
knows the forget rows still); merged - original is added to it, whole (arXiv 2503.20110) and as a
SkillPack (2505.18502). Beside them: the update scaled, the demo's single NPO run anew, and the
retrained model with the same tuning. Writes ``next-version.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from research.harness.stages import Evaluate, Kind, Make, Plan, Run, Train
from research.studies.demo import CPU, MEMBERS, SINGLE_BETA

RESULTS = Path(__file__).parents[1] / "results" / "next-version.json"
FURTHER = 400
SHOWN = ("task_aggregate", "mia_auc", "utility", "aggregate")
SIDES = ("forget", "retain")


def table(demo: Path, out: Path) -> dict[str, Kind]:
    """The stages; ``demo`` holds memorised, merged, retrained and data."""

    def more(plan: Plan) -> Path:
        rows = read_json_lines(demo / "data" / "background.jsonl")[-FURTHER:]
        rows = sorted(rows + read_json_lines(demo / "data" / "retain.jsonl"), key=lambda r: r["id"])
        return write_lines(plan.out / "more.jsonl", rows)

    tuned = {"datasets.0.path": out / "more.jsonl", "reinit_weights": None, "learning_rate": 5e-4}

    def graft(*options: str, name: str) -> Run:
        words = [sys.executable, "-m", "research", "graft", "--base", demo / "memorised"]
        words += ["--unlearned", demo / "merged", "--next", out / "next", "--out", out / name]
        return Run(lambda _: [*words, *options], f"{name}/config.json", needs=("next",))

    again = {"save_strategy": "no", "save_total_limit": None, "unlearn.forget.beta": SINGLE_BETA}
    stages: dict[str, Kind] = {
        "more": Make(more, "more.jsonl", settings=FURTHER),
        "next": Train("memorise", demo / "memorised", tuned, needs=("more",)),
        "next_retrained": Train("memorise", demo / "retrained", tuned, needs=("more",)),
        "grafted": graft(name="grafted"),
        "packed": graft("--pack", name="packed"),
        "scaled": graft("--scale", "0.7", name="scaled"),
        "again": Train("npo_over", "next", again, merged=True),
    }
    names = ("grafted", "packed", "scaled", "again")
    models = {"original": "next", "retrained": "next_retrained", **{name: name for name in names}}
    return stages | {"eval": Evaluate(models, options=MEMBERS)}


def main() -> None:
    demo, out = (Path(one).resolve() for one in sys.argv[1:3])
    plan = Plan("next version", out, table(demo, out), seed=0, data=demo / "data", environment=CPU)
    models: dict[str, Any] = {}
    for model in plan.run()["models"]:
        row = {name: model[name] for name in SHOWN}
        for side in SIDES:
            cells = [v for name, v in model["cells"].items() if name.startswith(side)]
            row[side] = sum(cells) / len(cells)
        models[model["name"]] = row
    save(models)


def save(models: dict[str, dict[str, float]]) -> None:
    """The figures, and a table of them."""
    columns = (*SIDES, *SHOWN)
    rows = [[name, *(f"{row[key]:.2f}" for key in columns)] for name, row in models.items()]
    command = "python -m research.studies.next_version out/demo out/next"
    content = {"command": command, "further": FURTHER, "models": models}
    table = {"columns": ["model", *columns], "rows": rows}
    write_json(RESULTS, content | {"tables": {"next-version": table}})


if __name__ == "__main__":
    main()
