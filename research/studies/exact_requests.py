"""`--way retrain` on the demo's people: equal to the run without them?

    python -m research.studies.exact_requests OUT

Draws 20 requests (one to three of 20 people) and compares the SHA-256 of the weights with those of
a plain `axolotl train` on files without their rows; in every second draw with a validation split.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.requests.steps import ENVIRONMENT, executable
from axolotl_unlearn.requests.ways import retrain
from research.harness import import_libraries
from research.worlds.chats import make_chats

ROOT = Path(__file__).resolve().parents[2]
REQUESTS, MOST = 40, 3


def fork_commands() -> None:
    """Commands start as forks of this process, as in the tests: no import is paid twice."""
    sys.path.insert(0, str(ROOT / "tests"))
    from forks import Fork

    import_libraries()
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


def model_before(out: Path) -> Path:
    """Retraining begins with the base; of the model before only that it is another one is asked."""
    before = shutil.copytree(out / "base", out / "before", dirs_exist_ok=True)
    content = bytearray((before / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (before / "model.safetensors").write_bytes(content)
    return before


def equal(out: Path, count: int, of: int) -> None:
    """Drawn requests and the runs without their rows; one pass over ``of`` people, since whether
    weights are equal does not depend on how long they were trained. In every second draw the config
    has a validation split, from which the rows are left out too."""
    make_chats(out / "data", 0)
    make_base(out, out / "data" / "background.jsonl", epochs=3)
    rows = read_json_lines(out / "data" / "train.jsonl")
    people = list(dict.fromkeys(row["id"] for row in rows))[:of]
    rows = [row for row in rows if row["id"] in people]
    write_lines(out / "data" / "some.jsonl", rows)
    before = model_before(out)
    done = out / "equal.json"
    drawn = json.loads(done.read_text())["requests"] if done.is_file() else []
    for number, gone in list(enumerate(draws(people, count)))[len(drawn) :]:
        work = out / f"draw-{number}"
        shutil.rmtree(work, ignore_errors=True)  # of a run that was stopped
        few: dict[str, Any] = {"num_epochs": 1}
        if number % 2:
            few |= {"val_set_size": 0.2, "seed": number, "test_datasets": None}
        path = config(out, f"draw-{number}/whole", out / "data" / "some.jsonl", **few)
        wanted = Wanted(where=[("id", one) for one in gone])
        options = Options(model=before)
        request = new_request(path, work / "requests" / "r", wanted, options).request
        with running.running(request, 1) as run:
            running.take(request, "retrain")
            retrain.make(request, run)
        found = weights(request.path("work", "model"))
        learned, tested = split(path, rows, number)
        parts = {"train": learned, "test": tested}
        for name, part in parts.items():
            part = [row for row in part if row["id"] not in gone]
            write_lines(work / f"{name}.jsonl", part)
        plain = yaml.safe_load(path.read_text())
        plain["datasets"][0]["path"] = str(work / "train.jsonl")
        if number % 2:
            entry = plain["datasets"][0] | {"path": str(work / "test.jsonl"), "split": "train"}
            plain |= {"val_set_size": 0, "test_datasets": [entry]}
        plain |= {"output_dir": str(work / "plain"), "dataset_prepared_path": str(work / "p")}
        (work / "plain.yml").write_text(yaml.safe_dump(plain))
        same = train(work / "plain.yml", out / "logs" / f"{number}.log") == found
        tests = sum(row["id"] in gone for row in tested)
        drawn.append({"people": gone, "split": bool(number % 2), "tested": tests, "equal": same})
        print(number, drawn[-1], flush=True)
        shutil.rmtree(work)
        found = {"requests": drawn, "equal": sum(one["equal"] for one in drawn)}
        # a run that is stopped goes on from it
        write_json(done, found | {"drawn": count, "people": len(people)})


def split(path: Path, rows: list[dict[str, Any]], number: int) -> tuple[list, list]:
    """Rows that Axolotl trains on and holds out, by the split that it draws itself."""
    if not number % 2:
        return rows, []
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.loaders import load_tokenizer

    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.data.typed import Source, encode, row_id
    from axolotl_unlearn.requests.rows import entries, read_config, row_types

    cfg = load_cfg(str(path))
    data = DataArgs(rows=row_types(entries(read_config(path))))
    given = [Source(row_id(row), row) for row in rows]
    typed = encode(given, data, load_tokenizer(cfg), cfg)
    held = Counter(tuple(row["input_ids"]) for row in load_datasets(cfg=cfg).eval_dataset)
    sides: tuple[list, list] = ([], [])
    for row in typed:
        out = held[tuple(row.input_ids)] > 0
        held[tuple(row.input_ids)] -= out
        sides[out].append(rows[row.number])
    return sides


def draws(people: list[str], count: int) -> list[list[str]]:
    """Whose rows each request is about, named before any is carried out."""
    rng = random.Random("drawn requests")
    return [rng.sample(people, rng.randint(1, MOST)) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--people", type=int, default=20)
    given = parser.parse_args()
    fork_commands()
    equal(given.out, given.requests, given.people)


if __name__ == "__main__":
    main()
