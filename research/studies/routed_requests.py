"""Drawn requests ``--way shards``: are adapters and router those of a training without the rows?

    python -m research.studies.routed_requests OUT

20 requests about one to three of eight people, in two, three or four shards, on a tiny random model.
Every third is killed (SIGKILL) at a drawn moment and started again; in every third two processes
begin at once. Compared is the SHA-256 of every adapter and of the router with those of `shards
train` on files that never had the rows. A run that is stopped goes on.
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
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import Request, held, weights
from axolotl_unlearn.requests.ways import shards
from research.studies.exact_requests import ROOT, config, fork_commands
from research.worlds.chats import make_chats

RESULTS = ROOT / "research" / "results" / "routed-requests.json"
DRAWS, MOST, COUNTS = 20, 3, (2, 3, 4)
KINDS = ("whole", "killed", "two at once")
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "num_epochs": 2,
        "lora_target_linear": True, "micro_batch_size": 4, "chat_template_jinja": None,
        "chat_template": "chatml", "sequence_len": 512,
        "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_mlp_kernel": False}  # fmt: skip


def prepare(out: Path) -> list[dict[str, Any]]:
    """Base and rows; those of the last two people are nobody's."""
    from conftest import tiny_llama
    from data_tokenizers import byte_tokenizer

    if not weights(out / "base"):
        tiny_llama(vocabulary=259, hidden_size=64, num_hidden_layers=1,
                   max_position_embeddings=512).save_pretrained(out / "base")  # fmt: skip
        byte_tokenizer().save_pretrained(out / "base")
    make_chats(out / "data", 0, {"train": 10, "test": 3})
    rows = read_json_lines(out / "data" / "train.jsonl")
    common = list(dict.fromkeys(row["id"] for row in rows))[-2:]
    return [row if row["id"] not in common else {"messages": row["messages"]} for row in rows]


def trained(out: Path, name: str, rows: list[dict[str, Any]], count: int) -> Path:
    """Shards of these rows, and their config; made once."""
    path = out / "data" / f"{name}.jsonl"
    write_lines(path, rows)
    made = config(out, name, path, **LORA)
    folder = out / "shards" / name
    if not weights(folder / "model"):
        shards.train_shards(made, folder, "id", count, threads=1, key=b"k" * 32)
    return folder


def carry_out(folder: Path) -> None:
    """The training of a request and what follows for its shards, under the locks of `request run`."""
    with held(folder.parent):
        request = Request.load(folder)
        with running.running(request, 1) as run:
            running.take(request, "shards")
            if not weights(request.path("model")):
                shards.make(request, run)
            running.hand_over(request)


def start(folder: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "research.studies.routed_requests", "--carry", str(folder)]
    with (folder.parent.parent / "said.txt").open("a") as said:
        return subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)


def draw(out: Path, number: int, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    rng = random.Random(f"routed {number}")
    people, count = sorted({row["id"] for row in rows if "id" in row}), rng.choice(COUNTS)
    gone, kind = rng.sample(people, rng.randint(1, MOST)), KINDS[number % len(KINDS)]
    place = out / "draw"
    shutil.rmtree(place, ignore_errors=True)
    kept = shutil.copytree(trained(out, f"all-{count}", rows, count), place / "shards")
    wanted = Wanted(where=[("id", one) for one in gone])
    options, folder = Options(model=kept / "model", steps=2), place / "requests" / "r"
    new_request(out / "configs" / f"all-{count}.yml", folder, wanted, options)
    began, moment = time.monotonic(), rng.uniform(0, seconds) if kind == "killed" else None
    begun = [start(folder) for _ in range(1 + (kind == "two at once"))]
    if moment is not None:
        try:
            begun[0].wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(begun[0].pid, signal.SIGKILL)
            begun[0].wait()
        begun = [start(folder)]
    ended = [one.wait() for one in begun]
    seconds = time.monotonic() - began
    left = [row for row in rows if row.get("id") not in gone]
    fresh = trained(out, f"without-{number}", left, count)
    same = weights(fresh / "model") == weights(folder / "model")
    handed = shards.load(kept)["model"] == weights(fresh / "model")
    shutil.rmtree(fresh)
    return {"people": gone, "shards": count, "kind": kind, "killed after": moment, "ended": ended,
            "seconds": round(seconds, 1), "equal": same and handed}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--carry", type=Path, help="carry out one request")
    given = parser.parse_args()
    if given.carry:
        try:
            return carry_out(given.carry)
        except UnlearnError as error:
            raise SystemExit(str(error)) from None
    fork_commands()
    out = given.out.absolute()
    rows, file = prepare(out), out / "draws.json"
    drawn = json.loads(file.read_text("utf-8"))["requests"] if file.is_file() else []
    for number in range(len(drawn), given.draws):
        whole = [one["seconds"] for one in drawn if one["kind"] == "whole"]
        drawn.append(draw(out, number, rows, max(whole, default=10.0)))
        found = {"command": "python -m research.studies.routed_requests", "drawn": len(drawn)}
        found["equal"] = sum(one["equal"] for one in drawn)
        write_json(file, found | {"requests": drawn})
        print(number, drawn[-1], flush=True)
    rows = [[kind, str(len(own)), str(sum(one["equal"] for one in own))] for kind in KINDS
            if (own := [one for one in drawn if one["kind"] == kind])]  # fmt: skip
    table = {"columns": ["request", "drawn", "equal to the bit"], "rows": rows}
    write_json(RESULTS, found | {"requests": drawn, "tables": {"exact": table}})


if __name__ == "__main__":
    main()
