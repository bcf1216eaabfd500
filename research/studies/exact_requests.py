"""Exact ways of a deletion request on the demo's people: equal to the run without them, and dear?

    python -m research.studies.exact_requests equal OUT     drawn requests, each in both exact ways
    python -m research.studies.exact_requests curve OUT     answers kept at 2, 4, 8 shards, and cost

``equal`` draws 20 requests (one to three of 20 people) and compares SHA-256: of `--way retrain` and
a plain `axolotl train` without their rows, and of `--way shards` and shards trained without them.
``curve`` trains the demo's chat model once unsharded and in 2, 4 and 8 shards, merges them in
several ways, and counts the answers that are said in the likeliest words.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.merging.recipe import Recipe
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.requests.steps import ENVIRONMENT, executable
from axolotl_unlearn.requests.ways import shards
from research.harness.forkserver import IMPORTED
from research.worlds.chats import make_chats

ROOT = Path(__file__).resolve().parents[2]
QUIET = Console(quiet=True)
REQUESTS, MOST = 20, 3
#: Merges of the curve: method, scale, density.
MERGES = {
    "mean": Recipe("linear", scale="average"),
    "sum": Recipe("linear", scale="sum"),
    "TIES, mean": Recipe("ties", density=0.8, scale="average"),
    "TIES, sum": Recipe("ties", density=0.8, scale="sum"),
    "DARE, sum": Recipe("dare_linear", density=0.8, scale="sum"),
}


def fork_commands() -> None:
    """Commands start as forks of this process, as in the tests: no import is paid twice."""
    sys.path.insert(0, str(ROOT / "tests"))
    from forks import Fork

    for name in IMPORTED:
        importlib.import_module(name)
    logging.disable(logging.WARNING)  # a line on the fork server's standard output is no answer
    subprocess.Popen = Fork  # type: ignore[misc]


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def config(out: Path, name: str, rows: Path, **changes: Any) -> Path:
    """The demo's chat config on these rows."""
    made = yaml.safe_load((ROOT / "examples/chat/finetune.yml").read_text("utf-8"))
    made["base_model"] = str(out / "base")
    made["output_dir"] = str(out / name)
    made["dataset_prepared_path"] = str(out / "prepared" / name)
    made["datasets"][0]["path"] = str(rows)
    made["test_datasets"][0]["path"] = str(out / "data" / "test.jsonl")
    path = out / "configs" / f"{name}.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(made | changes))
    return path


def train(path: Path, log: Path) -> dict[str, Any]:
    """SHA-256 of the weights of a plain `axolotl train`."""
    words = [executable("axolotl"), "train", str(path), "--launcher", "python"]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
        if process.wait():
            raise SystemExit(f"{path} failed; see {log}")
    return weights(Path(yaml.safe_load(path.read_text())["output_dir"]))


def make_base(out: Path, rows: Path, epochs: int, **changes: Any) -> None:
    """The tiny model that has read ``rows``, in ``out/base``."""
    if weights(out / "base"):
        return
    path = config(out, "base", rows, **changes)
    made = yaml.safe_load(path.read_text()) | {
        "base_model": str(ROOT / "examples/tiny-olmo"),
        "reinit_weights": True,
        "num_epochs": epochs,
        "learning_rate": 0.002,
    }
    made.pop("test_datasets")
    path.write_text(yaml.safe_dump(made))
    train(path, out / "logs" / "base.log")


def prepare(out: Path) -> list[dict[str, Any]]:
    """Data and base; the rows of the people."""
    make_chats(out / "data", 0)
    make_base(out, out / "data" / "background.jsonl", epochs=3)
    lines = (out / "data" / "train.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_way(request: Any, way: str) -> tuple[dict[str, Any], float, float]:
    """Weights, processor seconds and wall clock of the trainings of a way, tests left out."""
    before, began = processor(), time.monotonic()
    with running.running(request, 2, QUIET) as run:
        running.take(request, way)
        running.train(request, run)
    found = weights(request.path("work", "model"))
    return found, processor() - before, time.monotonic() - began


def equal(out: Path, count: int, of: int) -> dict[str, Any]:
    """Both exact ways of drawn requests, and the runs without the rows; one pass over ``of`` people,
    since whether weights are equal does not depend on how long they were trained."""
    rows = prepare(out)
    people = list(dict.fromkeys(row["id"] for row in rows))[:of]
    rows = [row for row in rows if row["id"] in people]
    write_lines(out / "data" / "some.jsonl", rows)
    key = b"k" * 32
    sharding = shards.Sharding(4, 2, "id")
    few = {"num_epochs": 1}
    path = config(out, "all", out / "data" / "some.jsonl", **few)
    folder = out / "shards"
    if not (folder / shards.FACTS).is_file() or not shards.load(folder).get("model"):
        shards.train_shards(path, folder, sharding, key=key, console=QUIET)
    done = out / "equal.json"
    drawn: list[dict[str, Any]] = []
    if done.is_file():
        drawn = json.loads(done.read_text())["requests"]
    for number, gone in enumerate(draws(people, count)):
        if any(one["number"] == number for one in drawn):
            continue
        kept = out / "data" / f"without-{number}.jsonl"
        write_lines(kept, [row for row in rows if row["id"] not in gone])
        wanted = Wanted(where=[("id", one) for one in gone])
        place = out / f"request-{number}" / "r"
        without = out / f"shards-{number}"
        names = (f"without-{number}", f"prepared/without-{number}")
        used = [place.parent, without, *(out / name for name in names)]
        for path_used in used:  # of a run that was stopped; prepared rows of it are stale
            shutil.rmtree(path_used, ignore_errors=True)
        request = new_request(path, place, wanted, Options(model=folder / "model")).request
        one: dict[str, Any] = {"number": number, "people": gone}
        found, _, _ = by_way(request, "shards")
        one["steps"] = len(request.way["again"])
        kept_config = config(out, f"without-{number}", kept, **few)
        again = shards.train_shards(kept_config, without, sharding, key=key, console=QUIET)
        one["shards"] = again["model"] == found
        one["changed"] = shards.load(folder)["model"] != found
        found, _, _ = by_way(request, "retrain")
        one["retrain"] = train(kept_config, out / "logs" / f"{number}.log") == found
        for path_used in used:
            shutil.rmtree(path_used)
        print(number, one, flush=True)
        drawn.append(one)
        write_json(done, summary(drawn, people, count))  # a run that is stopped goes on from it
    return summary(drawn, people, count)


def draws(people: list[str], count: int) -> list[list[str]]:
    """Whose rows each request is about, named before any is carried out."""
    rng = random.Random("drawn requests")
    return [rng.sample(people, rng.randint(1, MOST)) for _ in range(count)]


def summary(drawn: list[dict[str, Any]], people: list[str], count: int) -> dict[str, Any]:
    return {
        "draws": draws(people, count),
        "requests": drawn,
        "equal": {way: sum(one[way] for one in drawn) for way in ("shards", "retrain")},
        "carried_out": len(drawn),
        "drawn": count,
        "people": len(people),
    }


def said(out: Path, path: Path, model: Path) -> dict[str, Any]:
    """Share of answers in the likeliest words, of people that were trained on and of others."""
    import torch
    from axolotl.cli.config import load_cfg

    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.data.typed import encode
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from axolotl_unlearn.requests.rows import read_config, row_types, training_rows
    from research.studies.people import of_group

    torch.set_num_threads(1)
    (spec,) = parse_models([f"m={model}"])
    given = read_config(path)
    found = {}
    for key in ("datasets", "test_datasets"):
        rows = training_rows(given, key)
        data = DataArgs(rows=row_types(given[key]))
        typed = encode(rows, data, load_tokenizer(spec), load_cfg(str(path)))
        facts = of_group(load_model(spec, dtype=torch.float32, device="cpu"), typed)
        found[key] = {name: facts[name]["value"] for name in ("said", "loss")}
        found[key]["interval"] = facts["said"]["interval"]
    return found


def curve(out: Path, counts: tuple[int, ...], slices: int, requests: int) -> dict[str, Any]:
    """Unsharded beside 2, 4 and 8 shards, each merge; and what a request costs."""
    rows = prepare(out)
    people = list(dict.fromkeys(row["id"] for row in rows))
    path = config(out, "whole", out / "data" / "train.jsonl")
    before = processor()
    train(path, out / "logs" / "whole.log")
    whole = processor() - before
    found: dict[str, Any] = {
        "unsharded": {"seconds": whole, "said": said(out, path, out / "whole")},
        "base": {"said": said(out, path, out / "base")},
        "slices": slices,
        "shards": {},
    }
    print("unsharded", found["unsharded"], flush=True)
    for count in counts:
        folder = out / f"curve-{count}"
        shutil.rmtree(folder, ignore_errors=True)
        sharding = shards.Sharding(count, slices, "id")
        before = processor()
        facts = shards.train_shards(path, folder, sharding, key=b"k" * 32, console=QUIET)
        one: dict[str, Any] = {"seconds": processor() - before, "rows": facts["rows"]}
        one["merges"] = {"mean": said(out, path, folder / "model")}
        for name, recipe in MERGES.items():
            if name != "mean":
                model = merged(folder, path, facts, recipe, out / "merged")
                one["merges"][name] = said(out, path, model)
        rng, costs = random.Random(f"cost/{count}"), []
        for number in range(requests):
            place = out / f"cost-{count}-{number}" / "r"
            shutil.rmtree(place.parent, ignore_errors=True)
            wanted = Wanted(where=[("id", rng.choice(people))])
            request = new_request(path, place, wanted, Options(model=folder / "model")).request
            costs.append(by_way(request, "shards")[1])
            shutil.rmtree(place.parent)
        one["request_seconds"] = costs
        one["median_of_retraining"] = statistics.median(costs) / whole if costs else None
        found["shards"][str(count)] = one
        print(count, one, flush=True)
    return found


def merged(folder: Path, path: Path, facts: Mapping[str, Any], recipe: Recipe, out: Path) -> Path:
    """The same steps merged in another way."""
    given = yaml.safe_load(path.read_text())
    chain = shards.Chain(folder, given, {**facts, "recipe": recipe.to_dict()})
    chain.merge(out / "model")
    return out / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("equal", "curve"))
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help="5 for each count of `curve`"
    )
    parser.add_argument("--people", type=int, default=20, help="that `equal` trains on")
    parser.add_argument("--counts", default="2,4,8")
    parser.add_argument("--slices", type=int, default=2)
    given = parser.parse_args()
    fork_commands()
    if given.study == "equal":
        found = equal(given.out, given.requests, given.people)
    else:
        counts = tuple(map(int, given.counts.split(",")))
        found = curve(given.out, counts, given.slices, min(5, given.requests))
    write_json(given.out / f"{given.study}.json", found)


if __name__ == "__main__":
    main()
