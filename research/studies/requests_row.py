"""Ten requests in a row, one person each, in each of the two ways; all rows judged together.

    python -m research.studies.requests_row run WAY OUT [--at-most N]
    python -m research.studies.requests_row results OUT NAME

The draw is named below, before any run. Each request begins with the model that the one before has
left. At the end `audit` looks for every row of all ten in the last model, in the model before any
request (the control, which learned them), and in one that was trained without the ten. A request
that was carried out is kept in OUT; ``results`` writes ``research/results/NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests.audit import audit_requests
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.requests.run import run_request
from axolotl_unlearn.requests.ways import WAYS
from research.studies.exact_requests import (
    QUIET,
    ROOT,
    config,
    fork_commands,
    prepare,
    processor,
    said,
    train,
)
from research.studies.people import shown

#: Of `match` the steps of `make demo-request`.
SEED, PEOPLE, REQUESTS, STEPS = "ten in a row", 14, 10, 60
ACCEPT = "a study counts it as it is"
#: Models that all rows are looked for in, and those whose kept answers are counted.
LAST, BEFORE, WITHOUT = "after ten", "before any", "trained without"
KEPT_AFTER = (1, 5, REQUESTS)


def run(out: Path, way: str, most: int, people: int, count: int, changes: dict[str, Any]) -> None:
    rows = prepare(out)
    every = list(dict.fromkeys(row["id"] for row in rows))[:people]
    gone = random.Random(SEED).sample(every, count)
    rows = [row for row in rows if row["id"] in every]
    data = out / "data"
    write_lines(data / "some.jsonl", rows)
    write_lines(data / "kept.jsonl", [row for row in rows if row["id"] not in gone])
    path = config(out, f"whole-{way}", data / "some.jsonl", **changes)
    kept = config(out, f"kept-{way}", data / "kept.jsonl", **changes)
    model = trained(path, out / f"whole-{way}", out / "logs" / f"{way}.log")
    requests = out / f"row-{way}"
    for number, person in enumerate(gone, start=1):
        folder = requests / f"r{number:02}"
        if (folder / "record.json").is_file():
            continue
        if not most:
            return
        most -= 1
        if not (folder / "request.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            options = Options(model=model if number == 1 else None, steps=STEPS)
            new_request(path, folder, Wanted(where=[("id", person)]), options)
        began = processor()
        run_request(folder, way=way, accept=ACCEPT, threads=1, console=QUIET)
        used = {"processor": round(processor() - began, 1)}
        if number in KEPT_AFTER:
            used["kept"] = said(out, kept, folder / "model")["datasets"]
        write_json(requests / f"{number:02}.json", of_request(folder) | used)
        print(folder, (requests / f"{number:02}.json").read_text(), flush=True)
    last = requests / f"r{count:02}" / "model"
    models = {
        LAST: last,
        BEFORE: model,
        WITHOUT: trained(kept, out / f"kept-{way}", out / "logs" / f"kept-{way}.log"),
    }
    result = {
        "seed": SEED,
        "people": len(every),
        "requests": [json.loads(one.read_text()) for one in sorted(requests.glob("??.json"))],
        "together": {name: together(one, requests, out, kept) for name, one in models.items()},
        "equal_to_training_without": weights(last) == weights(models[WITHOUT]),
    }
    write_json(out / f"row-{way}.json", result)
    print(json.dumps(result["together"], indent=1), flush=True)


def trained(path: Path, model: Path, log: Path) -> Path:
    """A model by plain `axolotl train`."""
    if not weights(model):
        train(path, log)
    return model


def of_request(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "record.json").read_text())["predicate"]
    return {
        "verdict": {name: record["verdict"][name] for name in ("outcome", "status", "reasons")},
        "documents": Counter(line["reading"] for line in record["documents"]),
        "earlier": Counter(line["reading"] for line in record["earlier"]["lines"]),
        "back": record["earlier"]["back"],
        "seconds": record["seconds"],
    }


def together(model: Path, requests: Path, out: Path, kept: Path) -> dict[str, Any]:
    """All rows of all requests in one model, and answers of the rows that were kept."""
    found = audit_requests(str(model), requests, device="cpu")
    return {
        "says": found.says,
        "rows": Counter(line["reading"] for line in found.lines),
        "back": len(found.back),
        "answers_said": sum(line["answers_said"] or 0 for line in found.lines),
        "learned": found.learned,
        "kept": said(out, kept, model)["datasets"],
    }


def tables(found: Mapping[str, Any]) -> dict[str, Any]:
    """Each way: its requests, and all rows together in three models."""
    requests, rows = [], []
    for way, one in found.items():
        verdicts = Counter(line["verdict"]["outcome"] for line in one["requests"])
        kept = [shown(of(line["kept"])) for line in one["requests"] if "kept" in line]
        spent = sorted(line["processor"] for line in one["requests"])
        requests.append(
            [way, ", ".join(f"{n} {outcome}" for outcome, n in verdicts.items())]
            + [str(sum(line["back"] for line in one["requests"])), *kept]
            + [f"{spent[len(spent) // 2]:.0f}"]
        )
        for name, figures in one["together"].items():
            learned, count = figures["learned"], sum(figures["rows"].values())
            told = f"{learned['auc']:.2f} (p {learned['p']:.2g})" if learned else "not measured"
            read = ", ".join(f"{n} {reading}" for reading, n in figures["rows"].items())
            rows.append(
                [f"{way}, {name}", read, f"{figures['answers_said']} of {count}", told]
                + [shown(of(figures["kept"]))]
            )
    columns = ["way", "verdicts", "back", *(f"kept after {n}" for n in KEPT_AFTER), "processor s"]
    judged = ["model", "rows", "answers said", "learned attack: AUC", "kept answers said"]
    return {
        "requests": {"columns": columns, "rows": requests},
        "together": {"columns": judged, "rows": rows},
    }


def of(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": figures["said"], "interval": figures["interval"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = parser.add_subparsers(dest="job", required=True)
    carried = jobs.add_parser("run")
    carried.add_argument("way", choices=WAYS)
    carried.add_argument("out", type=Path)
    carried.add_argument("--at-most", type=int, default=REQUESTS, help="requests in this call")
    carried.add_argument("--people", type=int, default=PEOPLE)
    carried.add_argument("--requests", type=int, default=REQUESTS)
    carried.add_argument("--passes", type=int, help="default those of the demo")
    written = jobs.add_parser("results")
    written.add_argument("out", type=Path)
    written.add_argument("name")
    given = parser.parse_args()
    if given.job == "run":
        fork_commands()
        changes = {"num_epochs": given.passes} if given.passes else {}
        run(given.out, given.way, given.at_most, given.people, given.requests, changes)
        return
    paths = {way: given.out / f"row-{way}.json" for way in WAYS}
    found = {way: json.loads(path.read_text()) for way, path in paths.items() if path.is_file()}
    path = ROOT / "research" / "results" / f"{given.name}.json"
    content = {"ways": found, "tables": tables(found)}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
