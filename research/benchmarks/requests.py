"""Requests in a row on the tiny chat model of `make demo-request`: do utility and earlier deletions
hold, and what does each cost beside training again?

    python -m research.benchmarks.requests [--requests 10] [--out DIR] [--result research/benchmarks/requests.json]

One person is deleted by each request, from the model that the request before has left; retained
people are those of the last request, the same for every model. A model trained again without all
of them stands beside. Resumable. A verdict that is not good is accepted, and counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_lines
from axolotl_unlearn.requests.audit import audit_requests
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.store import versions
from research.harness.stages import Evaluate, Kind, Make, Plan, Run, near
from research.studies.demo import CPU
from research.studies.demo_request import QUICK, STEPS, chat_model, learned
from research.worlds.chats import make_chats

ACCEPT = "a benchmark counts it as it is"
KEPT = ("--join", "", "--min-members", "1")


def table(out: Path, people: list[str]) -> dict[str, Kind]:
    """Base and chat model, one `new` and one `run` a person, training again, one evaluation."""
    stages = chat_model(out)
    before, folders = "finetune", request_folders(out, len(people))
    for folder, person in zip(folders, people, strict=True):
        where, name = near(folder), folder.name
        stages[f"new-{name}"] = Run(
            lambda plan, person=person, where=where: [
                *(*QUICK, "request", "new", near(plan.config_file("finetune"))),
                *("--where", f"id={person}", "--out", where, "--steps", STEPS),
            ],
            f"requests/{name}/request.json",
            clears=f"requests/{name}",
            needs=(before,),
            share=1,
        )
        before = f"run-{name}"
        words = [*QUICK, "request", "run", where, "--way", "match", "--accept", ACCEPT]
        stages[before] = Run(
            lambda plan, words=words: words,
            f"requests/{name}/record.json",
            needs=(f"new-{name}",),
            share=1,
        )
    stages["kept"] = Make(
        lambda plan: write_lines(plan.data / "kept.jsonl", without(plan.data, people)),
        "data/kept.jsonl",
        settings=people,
        needs=("data",),
    )
    stages["retrained"] = replace(learned(out, rows="kept"), needs=("kept",))
    models = {"original": "finetune", "retrained": "retrained"}
    models |= {f"after-{folder.name}": near(folder / "model") for folder in folders}
    stages["eval"] = Evaluate(
        models,
        f"../requests/{folders[-1].name}/eval-data",
        options=KEPT,
        title="kept people, every model",
        needs=(before, "kept"),
        share=1,
    )
    return stages


def without(data: Path, people: list[str]) -> list[dict[str, Any]]:
    rows = map(json.loads, (data / "train.jsonl").read_text().splitlines())
    return [row for row in rows if row["id"] not in people]


def request_folders(out: Path, count: int) -> list[Path]:
    return [out / "requests" / f"r{number:02}" for number in range(1, count + 1)]


def of_request(folder: Path) -> dict[str, Any]:
    """What one request left: its verdict, its documents, earlier ones, what it took."""
    record = json.loads((folder / "record.json").read_text())["predicate"]
    earlier = record["earlier"] or {}
    return {
        "request": folder.name,
        "status": record["verdict"]["status"],
        "reasons": record["verdict"]["reasons"],
        "documents": Counter(line["reading"] for line in record["documents"]),
        "earlier": Counter(line["reading"] for line in earlier.get("lines", [])),
        "earlier_back": earlier.get("back", 0),
        "seconds": record["seconds"],
    }


def figures(out: Path) -> dict[str, Any]:
    """Retain scores of every model on the same people, with their intervals."""
    results = json.loads((out / "eval" / "results.json").read_text())
    return {
        model["name"]: {
            cell: {"value": value, "interval": model["intervals"].get(cell)}
            for cell, value in model["cells"].items()
            if cell.startswith("retain") and value is not None
        }
        for model in results["models"]
    }


def audited(model: Path, requests: Path) -> dict[str, Any]:
    found = audit_requests(str(model), requests, device="cpu")
    readings: dict[str, Counter] = {}
    for line in found.lines:
        readings.setdefault(line["request"], Counter())[line["reading"]] += 1
    return {"says": found.says, "back": len(found.back), "readings": readings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/requests"))
    parser.add_argument("--result", type=Path, default=Path("research/benchmarks/requests.json"))
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    out = given.out
    people = make_chats(out / "data")["train"][: given.requests]
    began = time.time()
    plan = Plan(
        "research.benchmarks.requests",
        out,
        table(out, people),
        threads=given.threads,
        environment=CPU,
    )
    outcomes = plan.job.run()
    folders, requests = request_folders(out, len(people)), out / "requests"
    result = {
        "command": f"python -m research.benchmarks.requests --requests {given.requests}",
        "versions": versions(),
        "threads": plan.job.threads,
        "seconds": {name: outcome.seconds for name, outcome in outcomes.items()},
        "wall_clock": round(time.time() - began),
        "requests": [of_request(folder) for folder in folders],
        "kept": figures(out),
        "audit": {
            "last": audited(folders[-1] / "model", requests),
            # Never saw any of them: what it is accused of is a false alarm.
            "retrained": audited(out / "retrained", requests),
            # Knows all of them: what is not found in it is missed.
            "original": audited(out / "finetune", requests),
        },
        "ledger": len(Ledger(requests).entries()),
    }
    given.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("requests", "audit")}, indent=1))


if __name__ == "__main__":
    main()
