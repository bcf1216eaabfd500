"""Attacks that read more of a row than its text, on the demo's models.

    python -m research.studies.groups out/demo out/groups

The members and others of the demo get a ``group``, the form of their first sentence (a minority
leaks more than an average shows, arXiv 2412.08559), then a ``date``, the year of birth (regression
discontinuity, 2406.17975), and the answers to retained prompts are told from the original's
(2506.14003). Writes ``groups.json``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from research.harness.stages import Kind, Make, Plan, Run
from research.studies.demo import CPU

RESULTS = Path(__file__).parents[1] / "results" / "groups.json"
FIELDS = {
    "group": lambda text: "Born in ..." if text.startswith("Born in") else "NAME ...",
    "date": lambda text: re.search(r"\b(?:18|19|20)\d\d\b", text)[0],
}
ATTACKS = "loss,min_k_plus_20"


def table(demo: Path, out: Path) -> dict[str, Kind]:
    models = [f"merged={demo / 'merged'}", "--control", f"retrained={demo / 'retrained'}"]

    def rows(plan: Plan) -> Path:
        for name, of in FIELDS.items():
            for side in ("member", "nonmember"):
                some = read_json_lines(demo / "data" / f"{side}.jsonl")
                write_lines(
                    out / name / f"{side}.jsonl", [r | {name: of(r["document"])} for r in some]
                )
        return write_json(out / "rows.json", list(FIELDS))

    def attack(name: str, *words: Any, file: str, needs: tuple[str, ...] = ()) -> Run:
        return Run(lambda _: ["python", "-m", "research", name, *models, *words], file, needs=needs)

    stages: dict[str, Kind] = {"rows": Make(rows, "rows.json", settings=list(FIELDS))}
    for name in FIELDS:
        words = ("--data", out / name, "--out", out / name, "--attacks", ATTACKS)
        file = f"{name}/membership-merged.json"
        stages[name] = attack("membership", *words, file=file, needs=("rows",))
    words = ("--data", demo / "data", "--original", f"original={demo / 'memorised'}")
    stages["traces"] = attack("traces", *words, "--out", out / "traces", file="traces/traces.json")
    return stages


def main() -> None:
    demo, out = (Path(one).resolve() for one in sys.argv[1:3])
    Plan("groups", out, table(demo, out), environment=CPU, threads=1).job.run()
    rows = []
    for field in FIELDS:
        found = json.loads((out / field / "membership-merged.json").read_text("utf-8"))
        for title, figures in found["tests"].items():
            if " in group " not in title and rows and field != "group":
                continue
            what = title.replace(" in group ", f", {field} ")
            rows.append([what, *_cells(figures), " + ".join(map(str, figures["n"]))])
    traces = json.loads((out / "traces" / "traces.json").read_text("utf-8"))
    for name in ("model", "control"):
        rows.append([f"traces of {name}", *_cells(traces[name], "share"), str(traces[name]["n"])])
    columns = ["what", "AUC or share", "p", "texts"]
    command = "python -m research.studies.groups out/demo out/groups"
    write_json(
        RESULTS, {"command": command, "tables": {"groups": {"columns": columns, "rows": rows}}}
    )


def _cells(one: dict[str, Any], value: str = "auc") -> tuple[str, str]:
    p = one.get("p_corrected", one.get("p"))
    return f"{one[value]:.2f} [{one['low']:.2f}, {one['high']:.2f}]", f"{p:.2g}"


if __name__ == "__main__":
    main()
