"""Does an unlearning update hold on the next version of its base? Beside unlearning again.

    python -m research.studies.next_version out/demo out/next
    python -m research.studies.next_version out/demo out/next attacks

The demo's original is tuned on further documents and its retained rows (the next version, which
knows the forget rows still); merged - original is added to it, whole (arXiv 2503.20110) and as a
SkillPack (2505.18502). Beside them: the update scaled, the demo's single NPO run anew, and the
retrained model with the same tuning. The second call attacks what the first one made. Both write
``next-version.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from research.harness.stages import Evaluate, Kind, Make, Plan, Run, Train
from research.studies.demo import CPU, MEMBERS, SINGLE_BETA
from research.studies.never_seen import FILES

RESULTS = Path(__file__).parents[1] / "results" / "next-version.json"
FURTHER = 400
SHOWN = ("task_aggregate", "mia_auc", "utility", "aggregate")
SIDES = ("forget", "retain")
ATTACKED = {"grafted": "grafted", "again": "again/merged"}
ATTACKS = {
    "relearn": ("--source", "forget", "--rows", "20", "--steps", "5,20", "--lr", "1e-3"),
    "prompt": (),
    "quantise": ("--schemes", "int4"),
}
ASKED = ("--limit", "80", "--max-new-tokens", "64")
PROGRAM = ("python", "-m", "research", "membership")


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


def attack_table(demo: Path, out: Path) -> dict[str, Kind]:
    """The attacks on models of `table` that lie in ``out``, beside the retrained one."""
    shared = ["--control", f"retrained={out / 'next_retrained'}", "--data", demo / "data"]
    shared += ["--out", out / "attacks"]

    def attack(*words: str, file: str, more: Any = ()) -> Run:
        words = [*words, *shared, *more]
        return Run(lambda _: words, f"attacks/{file}.json")

    named = {name: f"{name}={out / folder}" for name, folder in ATTACKED.items()}
    stages: dict[str, Kind] = {
        f"{name}-{kind}": attack(
            "axolotl-unlearn",
            "attack",
            kind,
            model,
            file=f"{FILES.get(kind, kind)}-{name}",
            more=(*options, *ASKED),
        )
        for kind, options in ATTACKS.items()
        for name, model in named.items()
    }
    return stages | {"membership": attack(*PROGRAM, *named.values(), file="membership")}


def attacks_found(folder: Path) -> dict[str, dict[str, Any]]:
    """Attack -> model -> what is recalled before and after, and above the control with interval;
    of membership attacks AUC with interval and corrected p. Of those that were made."""
    found: dict[str, dict[str, Any]] = {}
    made = {
        name: [path for kind in ATTACKS for path in folder.glob(f"{kind}-*{name}.json")]
        for name in ATTACKED
    }
    for name, paths in made.items():
        for result in (json.loads(path.read_text("utf-8")) for path in paths):
            for row in result["rows"]:
                if row["variant"] in ("0 steps", "plain", "not quantised"):
                    continue
                found.setdefault(f"{result['attack']}, {row['variant']}", {})[name] = {
                    "before": row["before"]["recalled"]["value"],
                    "after": row["recalled"]["value"],
                    "above": row["above_control"]["recalled"],
                }
    for file in (json.loads(path.read_text("utf-8")) for path in folder.glob("membership-*.json")):
        for attack, row in file["tests"].items():
            keys = ("auc", "low", "high", "p_corrected", "control")
            found.setdefault(attack, {})[file["model"]] = {key: row.get(key) for key in keys}
    return found


def main() -> None:
    demo, out = (Path(one).resolve() for one in sys.argv[1:3])
    if "attacks" in sys.argv[3:]:
        stages = attack_table(demo, out)
        Plan("next version", out, stages, environment=CPU, threads=1).job.run()
        save(json.loads(RESULTS.read_text("utf-8"))["models"], attacks_found(out / "attacks"))
        return
    plan = Plan("next version", out, table(demo, out), seed=0, data=demo / "data", environment=CPU)
    models: dict[str, Any] = {}
    for model in plan.run()["models"]:
        row = {name: model[name] for name in SHOWN}
        for side in SIDES:
            cells = [v for name, v in model["cells"].items() if name.startswith(side)]
            row[side] = sum(cells) / len(cells)
        models[model["name"]] = row
    save(models)


def save(models: dict[str, dict[str, float]], attacks: dict[str, Any] | None = None) -> None:
    """The figures, and tables of them."""
    columns = (*SIDES, *SHOWN)
    rows = [[name, *(f"{row[key]:.2f}" for key in columns)] for name, row in models.items()]
    command = "python -m research.studies.next_version out/demo out/next"
    content = {"command": command, "further": FURTHER, "models": models}
    tables = {"next-version": {"columns": ["model", *columns], "rows": rows}}
    if attacks:
        content |= {"attack_command": f"{command} attacks", "attacks": attacks}
        lines = [
            [name, *(_cell(row.get(one)) for one in ATTACKED)] for name, row in attacks.items()
        ]
        tables["attacks"] = {"columns": ["attack", *ATTACKED], "rows": lines}
    write_json(RESULTS, content | {"tables": tables})


def _cell(one: dict[str, Any] | None) -> str:
    if one is None or one.get("auc", 0) is None:
        return "not measured"
    if "auc" in one:
        told = one["p_corrected"] < 0.05
        return f"{'**' * told}{one['auc']:.2f} [{one['low']:.2f}, {one['high']:.2f}]{'**' * told}"
    above = one["above"]
    gap = f"{above['value']:+.2f} [{above['low']:+.2f}, {above['high']:+.2f}]"
    return f"{one['before']:.2f} -> {one['after']:.2f}; {gap}"


if __name__ == "__main__":
    main()
