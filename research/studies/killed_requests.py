"""`request run` killed at a drawn moment and started again: does it end as if nothing had been?

    python -m research.studies.killed_requests OUT --way retrain

A request of the demo's chats on the tiny model. Each draw gives SIGKILL to the command and all that
it has started, at a moment of the whole run; then the ledger has to be whole, a model has to be there
only with its record's weights, and the same command has to end with the weights of a run that nobody
stopped, one accepted entry, and a record that verifies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import Ledger, weights
from axolotl_unlearn.requests.verify import verify
from axolotl_unlearn.requests.ways import WAYS
from research.studies.exact_requests import config, fork_commands, model_before, prepare

DRAWS, PEOPLE = 50, 2


def make(out: Path, way: str) -> Path:
    """The folder of a request that nobody has run; a copy stays beside it."""
    rows = prepare(out)
    people = list(dict.fromkeys(row["id"] for row in rows))[:PEOPLE]
    write_lines(out / "data" / "few.jsonl", [row for row in rows if row["id"] in people])
    before, tests = model_before(out), read_json_lines(out / "data" / "test.jsonl")
    write_lines(out / "data" / "tests.jsonl", tests[: 40 if way == "match" else 4])
    path = config(out, way, out / "data" / "few.jsonl", num_epochs=1)
    settings = path.read_text("utf-8").replace("data/test.jsonl", "data/tests.jsonl")
    path.write_text(settings, "utf-8")
    place, kept = out / way / "requests", out / way / "kept"
    if not kept.is_dir():
        shutil.rmtree(out / way, ignore_errors=True)
        wanted, options = Wanted(where=[("id", people[0])]), Options(model=before, steps=2)
        new_request(path, place / "r", wanted, options)
        shutil.copytree(place, kept)
    return place


def start(place: Path, way: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "axolotl_unlearn.cli", "request", "run", str(place / "r")]
    words += ["--way", way, "--threads", "1", "--accept", "a study of kills"]
    with (place.parent / "said.txt").open("w") as said:
        return subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)


def draw(place: Path, way: str, seconds: float, known: Any) -> dict[str, Any]:
    """Kill it after so many seconds, look, run it again, look."""
    fresh(place)
    process = start(place, way)
    try:
        process.wait(seconds)
        ended = True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ended = False
    lines = (place.parent / "said.txt").read_text("utf-8").strip().splitlines()
    found = {"seconds": round(seconds, 2), "at": lines[-1][9:] if lines else "", "ended": ended}
    model, record = place / "r" / "model", place / "r" / "record.json"
    accepted = Ledger(place).accepted()  # raises where the chain is broken
    faults = ["a record without an entry"] if record.is_file() and not accepted else []
    if model.is_dir() and weights(model) != known["weights"]:
        faults.append("a model that is not whole")
    if not accepted:
        process = start(place, way)
        if process.wait():
            faults.append((place.parent / "said.txt").read_text("utf-8")[-400:])
    if len(Ledger(place).accepted()) != 1 or weights(model) != known["weights"]:
        faults.append("another end than that of a whole run")
    try:
        verify(place / "r").require()
    except Exception as error:
        faults.append(str(error))
    return found | {"faults": faults}


def fresh(place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(place.parent / "kept", place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--draws", type=int, default=DRAWS)
    given = parser.parse_args()
    fork_commands()
    out, way = given.out.absolute(), given.way
    place, path = make(out, way), out / f"killed-{way}.json"
    if path.is_file():
        known = json.loads(path.read_text("utf-8"))
    else:
        fresh(place)
        began = time.monotonic()
        if start(place, way).wait():
            raise SystemExit((place.parent / "said.txt").read_text("utf-8"))
        known = {"way": way, "seconds": time.monotonic() - began, "draws": []}
        known["weights"] = weights(place / "r" / "model")
    rng = random.Random(f"killed {way}")
    for _ in known["draws"]:
        rng.random()
    while sum(not one["ended"] for one in known["draws"]) < given.draws:
        moment = rng.uniform(0, known["seconds"])
        known["draws"].append(draw(place, way, moment, known))
        known["faults"] = sum(bool(one["faults"]) for one in known["draws"])
        killed = [one["at"] for one in known["draws"] if not one["ended"]]
        known["steps"] = dict(Counter(at.split(":")[0] for at in killed))
        write_json(path, known)  # a run that is stopped goes on from it
        print(len(known["draws"]), known["draws"][-1], flush=True)


if __name__ == "__main__":
    main()
