"""Whole flows of requests on data, formats and weights that are not ours, and ten in a row.

    python -m research.studies.foreign_requests OUT lora --tofu ../shared/tofu

``lora``, ``pairs`` and ``sharegpt`` are rows of TOFU (arXiv 2401.06121) as alpaca, DPO and ShareGPT on
the tiny model; ``ten`` is ten requests in a row for people of made-up chats; ``smollm2`` a LoRA of such
chats on SmolLM2-135M (`research.worlds.smollm2`), in OUT/smollm2-base.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.rows import row_id
from axolotl_unlearn.requests.verify import verify
from research.studies.exact_requests import config, fork_commands, prepare, processor, train
from research.worlds.chats import make_chats
from research.worlds.smollm2 import fetch_smollm2

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
LORA |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
TURNS = {"role": "from", "content": "value"}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # type of the rows, and settings
    "lora": ({"type": "alpaca"}, {**LORA, "num_epochs": 12, "learning_rate": 0.003}),
    "pairs": ({"type": "chatml"}, {"rl": "dpo", "chat_template": "chatml", "num_epochs": 3}),
    "sharegpt": (
        {"field_messages": "conversations", "message_property_mappings": TURNS},
        {"num_epochs": 6},
    ),
    "ten": ({}, {"num_epochs": 12, "learning_rate": 0.003}),
    "smollm2": ({}, {**LORA, "num_epochs": 2, "micro_batch_size": 4, "learning_rate": 0.001}),
}
#: Authors of TOFU (20 rows each in its files with perturbed answers) that are learned, and rows of
#: each; rows of the others, which are held out.
LEARNED, EACH, HELD = 8, 5, 2


def shaped(part: str, author: int, row: dict[str, Any]) -> dict[str, Any]:
    question, answer = row["question"], row["answer"]
    if part == "pairs":
        made = {"prompt": question, "chosen": answer, "rejected": row["perturbed_answer"][0]}
    elif part == "sharegpt":
        said = (("human", question), ("gpt", answer))
        made = {"conversations": [{"from": who, "value": text} for who, text in said]}
    else:
        made = {"instruction": question, "input": "", "output": answer}
    return {"author": f"{author}", **made}


def tofu(folder: Path, out: Path, part: str) -> tuple[Path, Path]:
    names = ("retain_perturbed.jsonl", "forget10_perturbed.jsonl")
    if not (folder / names[0]).is_file():
        raise SystemExit(f"{folder} has no TOFU: skipped")
    lines = [line for name in names for line in (folder / name).read_text("utf-8").splitlines()]
    rows = [(number // 20, number % 20, json.loads(line)) for number, line in enumerate(lines)]
    sides = [[r for r in rows if r[0] < LEARNED and r[1] < EACH]]
    sides.append([r for r in rows if r[0] >= LEARNED and r[1] < HELD])
    learned, held = ([shaped(part, author, row) for author, _, row in side] for side in sides)
    return write_lines(out / "learned.jsonl", learned), write_lines(out / "held.jsonl", held)


def command(done: list[dict[str, Any]], *words: Any) -> int:
    """One of ours, with its processor seconds and what it said."""
    began, called = processor(), [sys.executable, "-m", "axolotl_unlearn.cli", "request"]
    called += map(str, words)
    process = subprocess.run(called, capture_output=True, text=True)
    said = (process.stdout + process.stderr).strip().splitlines()
    used, name = round(processor() - began, 1), " ".join(map(str, words[:1]))
    done.append(
        {"command": name, "exit": process.returncode, "processor_s": used, "says": said[-2:]}
    )
    print(done[-1], flush=True)
    return process.returncode


def request(path: Path, folder: Path, way: str, *chosen: str) -> dict[str, Any]:
    """new, plan, run (accepted where it is not shown), verify."""
    done: list[dict[str, Any]] = []
    command(done, "new", path, *chosen, "--out", folder, "--steps", "40")
    command(done, "plan", folder)
    if command(done, "run", folder, "--way", way, "--threads", "1"):
        command(done, "run", folder, "--accept", "a study")
    command(done, "verify", folder)
    record = read(folder)["predicate"]
    known = {part: record[part] for part in ("verdict", "earlier")}
    return {"way": way, "commands": done, **known, "rows": record["request"]["counts"]}


def ten(path: Path, out: Path, way: str, rows: Path) -> dict[str, Any]:
    """Ten in a row; then is the first as it was, and are all found in the old model and not in the
    new one?"""
    every, requests, made, kept_out = read_rows(rows), out / f"requests-{way}", [], True
    people = list(dict.fromkeys(row["id"] for row in every))[:10]
    for number, person in enumerate(people, 1):
        folder = requests / f"{number}"
        made.append(request(path, folder, way, "--where", f"id={person}"))
        gone = {row_id(row) for row in every if row["id"] in people[:number]}
        files = [*folder.glob("work/rows/*.jsonl"), folder / "data" / "retain.jsonl"]
        for file in files:
            ids = {row_id(row.get("row", row)) for row in read_rows(file)}
            kept_out &= not ids & gone
    found = {"earlier_rows_stay_out": kept_out, "ledger": verify(requests / "1").ledger}
    audits: list[dict[str, Any]] = []
    last, before = requests / "10" / "model", out / path.stem
    found["audit_of_last"] = command(audits, "audit", last, requests, "--quiet")
    found["audit_of_old"] = command(audits, "audit", before, requests, "--quiet")
    found["first_verifies"] = command(audits, "verify", requests / "1")
    return {**found, "says": audits, "requests": made}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tofu", type=Path, default=Path("../shared/tofu"))
    given = parser.parse_args()
    fork_commands()
    out, part = given.out.absolute(), given.part
    kind, settings = PARTS[part]
    if part in ("ten", "smollm2"):
        make_chats(
            out / part,
            1,
            {"learned": 12 if part == "ten" else 5, "held": 7 if part == "ten" else 1},
        )
        learned, held = out / part / "learned.jsonl", out / part / "held.jsonl"
    else:
        learned, held = tofu(given.tofu, out / part, part)
    prepare(out)
    if part == "smollm2":
        settings = settings | {"base_model": str(fetch_smollm2(out / "smollm2-base"))}
        settings |= {"chat_template": "tokenizer_default", "chat_template_jinja": None}
    path = config(out, f"{part}-before", learned, **settings)
    import yaml

    made = yaml.safe_load(path.read_text("utf-8"))
    for key, file in (("datasets", learned), ("test_datasets", held)):
        made[key][0] |= kind | {"path": str(file), "split": "train"}
    path.write_text(yaml.safe_dump({k: v for k, v in made.items() if v is not None}), "utf-8")
    began = processor()
    train(path, out / "logs" / f"{part}.log")
    result: dict[str, Any] = {"training_processor_s": round(processor() - began, 1)}
    chosen = ("--where", "author=2")
    if part == "ten":
        result |= {way: ten(path, out, way, learned) for way in ("retrain", "match")}
    elif part == "smollm2":
        result["retrain"] = request(path, out / "requests-smollm2" / "1", "retrain", "--where",
                                    f"id={read_rows(learned)[0]['id']}")  # fmt: skip
        for more in ((), ("--yes",)):
            command(result["retrain"]["commands"], "erase", out / "requests-smollm2" / "1", *more)
        command(result["retrain"]["commands"], "verify", out / "requests-smollm2" / "1")
    else:
        for way in ("retrain", "match"):
            result[way] = request(path, out / f"requests-{part}-{way}" / "1", way, *chosen)
    result["ledgers"] = {str(p.parent.name): len(Ledger(p.parent).entries())
                         for p in sorted(out.glob(f"requests-{part}*/ledger.jsonl"))}  # fmt: skip
    write_json(out / f"{part}.json", result)


if __name__ == "__main__":
    main()
