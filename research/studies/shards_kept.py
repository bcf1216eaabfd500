"""What a model merged of shards keeps of the answers that the unsharded run says.

    python -m research.studies.shards_kept run OUT [--at-most N]
    python -m research.studies.shards_kept results OUT NAME

Worlds: the demo's people; authors of TOFU and people of LUME (``../shared``), on a tiny base that
has read others of the same kind. Ways of training a shard: LoRA; LoRA for a third of the passes,
so that shards stay near each other, and for twice as many; LoRA from a warm start on rows of
others; all weights. Each in 2, 4 and 8 shards, merged in five ways. A part that was carried out is
kept in OUT/parts; ``results`` writes ``research/results/NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.requests.ways import shards
from research.studies.exact_requests import (
    MERGES,
    QUIET,
    ROOT,
    config,
    fork_commands,
    make_base,
    merged,
    prepare,
    processor,
    said,
    train,
)
from research.studies.people import shown

#: OLMo has none of Axolotl's LoRA kernels.
LORA = {
    "adapter": "lora",
    "lora_r": 64,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
    "learning_rate": 0.004,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_mlp_kernel": False,
}
WARM = "LoRA, warm start"
TRIES: dict[str, dict[str, Any]] = {
    "LoRA": LORA,
    "LoRA, a third of the passes": LORA | {"num_epochs": 6},
    WARM: LORA,
    "LoRA, twice the passes": LORA | {"num_epochs": 36},
    "all weights": {},
}
COUNTS = (2, 4, 8)
#: People or authors of the texts, those that the base has read, and rows of each.
OWN, OTHERS, ROWS = 8, 30, 6
TEXTS = {"LUME": {"num_epochs": 30}, "TOFU": {"num_epochs": 30}}


def chats_of(world: str) -> list[list[dict[str, Any]]]:
    """Rows in the form of the demo's chats, by author or person."""
    if world == "TOFU":
        lines = (ROOT.parent / "shared/tofu/retain90.jsonl").read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        asked = [(f"author-{n // 20}", r["question"], r["answer"]) for n, r in enumerate(found)]
    else:
        lines = (ROOT.parent / "shared/lume/train/retain.jsonl").read_text("utf-8").splitlines()
        found = [row for line in lines if (row := json.loads(line))["task"] == "Task2"]
        asked = [(r["id"][:36], r["input"], r["output"]) for r in found]  # a UUID, then the row
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, question, answer in asked:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        groups.setdefault(name, []).append({"id": name, "messages": messages})
    return [rows[:ROWS] for rows in groups.values()]


def make_world(out: Path, world: str) -> dict[str, Any]:
    """Data and base of a world; changes of its config."""
    if world == "people":
        prepare(out)
        return {}
    changes = {"sequence_len": 512, **TEXTS[world]}
    groups = chats_of(world)
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    parts = {"train": groups[:OWN], "test": groups[OWN : OWN + 4]}
    parts["background"] = groups[OWN + 4 :][:OTHERS]
    for name, part in parts.items():
        write_lines(data / f"{name}.jsonl", [row for rows in part for row in rows])
    make_base(out, data / "background.jsonl", epochs=6, **changes)
    return changes


def parts() -> Iterator[tuple[str, str, int]]:
    """World, try, number of shards; 0 is the unsharded run. What says most comes first. All weights
    of the demo's people: ``exact_requests``."""
    people, texts = [name for name in TRIES if TRIES[name]], ("all weights", "LoRA")
    yield from (("people", people[0], count) for count in (0, *COUNTS))
    yield from (("people", name, count) for name in people[1:] for count in (0, 4))
    yield from ((world, texts[0], count) for world in TEXTS for count in (0, 4, 2))
    yield from (("people", name, count) for name in people[1:] for count in (2, 8))
    yield from ((world, texts[1], count) for world in TEXTS for count in (0, 4, 2))


def carry_out(out: Path, world: str, name: str, count: int) -> dict[str, Any]:
    place = out / world
    changes = make_world(place, world) | TRIES[name]
    rows = place / "data" / "train.jsonl"
    if name == WARM:
        warm = config(place, "warm", place / "data" / "later.jsonl")
        if not weights(place / "warm"):
            train(warm, place / "logs" / "warm.log")
        changes |= {"base_model": str(place / "warm")}
    run = name.replace(", ", "-").replace(" ", "-")
    path = config(place, f"whole-{run}", rows, **changes)
    before = processor()
    if not count:
        model = place / f"whole-{run}"
        shutil.rmtree(model, ignore_errors=True)
        train(path, place / "logs" / f"{run}.log")
        seconds = processor() - before
        start = yaml.safe_load(path.read_text())["base_model"]
        after = f"{start}+{model}" if "adapter" in changes else model
        base = said(place, path, Path(start))
        return {"seconds": seconds, "said": said(place, path, after), "base": base}
    folder = place / f"shards-{run}-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    sharding = shards.Sharding(count, 1, "id")
    facts = shards.train_shards(path, folder, sharding, key=b"k" * 32, console=QUIET)
    found: dict[str, Any] = {"seconds": processor() - before, "rows": facts["rows"]}
    found["trainings"] = facts["seconds"]
    found["merges"] = {"mean": said(place, path, folder / "model")}
    for merge, recipe in MERGES.items():
        if merge != "mean":
            model = merged(folder, path, facts, recipe, place / "merged")
            found["merges"][merge] = said(place, path, model)
    shutil.rmtree(folder)
    return found


def tables(found: Mapping[str, Any]) -> dict[str, Any]:
    """Answers said: each try, unsharded, and in shards the merge that keeps most."""
    groups: dict[str, dict[int, Any]] = {}
    for one in found.values():
        groups.setdefault(f"{one['world']}, {one['try']}", {})[one["shards"]] = one
    rows = []
    for name, by_count in groups.items():
        row = [name]
        for count in (0, *COUNTS):
            one = by_count.get(count)
            if one is None:
                row.append("")
            elif count:
                merges = one["merges"]
                best = max(merges, key=lambda m: merges[m]["datasets"]["said"])
                row.append(f"{_shown(merges[best])} ({best})")
            else:
                row.append(_shown(one["said"]))
        rows.append(row)
    columns = ["people or texts, try", "unsharded", *(f"{count} shards" for count in COUNTS)]
    return {"kept": {"columns": columns, "rows": rows}}


def _shown(figures: Mapping[str, Any]) -> str:
    one = figures["datasets"]
    return shown({"value": one["said"], "interval": one["interval"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = parser.add_subparsers(dest="job", required=True)
    carried = jobs.add_parser("run")
    carried.add_argument("out", type=Path)
    carried.add_argument("--at-most", type=int, default=10**6, help="parts in this call")
    written = jobs.add_parser("results")
    written.add_argument("out", type=Path)
    written.add_argument("name")
    given = parser.parse_args()
    done: dict[str, Any] = {}
    if given.job == "run":
        fork_commands()
    for world, name, count in parts():
        title = f"{world}, {name}, {count or 'unsharded'}"
        path = given.out / "parts" / f"{title}.json"
        if given.job == "run" and not path.is_file():
            if given.at_most <= 0:
                return
            given.at_most -= 1
            facts = {"world": world, "try": name, "shards": count}
            write_json(path, facts | carry_out(given.out, world, name, count))
            print(title, path.read_text(), flush=True)
        if path.is_file():
            done[title] = json.loads(path.read_text())
    if given.job == "results":
        path = ROOT / "research" / "results" / f"{given.name}.json"
        content = {"parts": done, "tables": tables(done)}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
