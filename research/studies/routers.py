"""Which router finds the shard of a prompt, and whether its file tells who is in.

    python -m research.studies.routers OUT TINY SMOLLM2

Beside the product's (hashed n-grams, a vector a person): rows in place of people, mean-pooled hidden
states of a base, and both together. Made-up people as in `routed` (seeds 299 and 300 chose; 302 and
303 were named before), and 100 authors of TOFU, of whom the seed draws the shards alone. Every
second row of nobody is in the router as one of shard 0; the others are asked.

The attack on the file: a third of the people stays, a third is in or deleted, a third never was in. A
person's score
is the largest similarity of their questions to a vector, or the share of n-grams that somebody has.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.intervals import area_of
from axolotl_unlearn.shards.router import LEAST, Router, grams, place
from research.analysis.seeds import facts
from research.studies.exact_requests import ROOT
from research.studies.routed import SHARED, rows_of

OUT = ROOT / "research" / "results" / "routers.json"
DEV, FRESH, COUNTS, WEIGHTS = (299, 300), (302, 303), (4, 8, 20), (0.25, 0.5)
KINDS = "other words", "nobody's"
COLUMNS = "about people", "about nobody", "about TOFU's authors", "about nobody (TOFU)"
#: Whose a row is ("" nobody's), its question, the same in other words, question and answer.
Row = tuple[str, str, str, str]


def people(data: Path, seed: int) -> Iterator[Row]:
    data.mkdir(parents=True, exist_ok=True)
    rows = rows_of(data, seed)
    for row in rows["train"] + rows["nobody"]:
        asked, answer = (turn["content"] for turn in row["messages"])
        yield row.get("id", ""), asked, row["other"], f"{asked} {answer}"


def tofu() -> Iterator[Row]:
    def read(name: str) -> list[dict[str, str]]:
        return read_json_lines(SHARED / "tofu" / f"{name}.jsonl")

    retain, forget = read("retain_perturbed"), read("forget10_perturbed")
    other = {row["question"]: row["paraphrased_question"] for row in retain + forget}
    nobody = read("world_facts_perturbed") + read("real_authors_perturbed")
    for number, row in enumerate(read("retain90")[:1600] + forget + nobody):
        whose, asked = str(number // 20) if number < 2000 else "", row["question"]
        same = other.get(asked, "") if whose else asked
        yield whose, asked, same, f"{asked} {row['answer']}"


def hidden(base: Path, texts: list[str], cache: Path) -> dict[str, np.ndarray]:
    """``[text, width]`` of the middle and the last layer."""
    if not cache.is_file():
        import torch
        from transformers import AutoModel, AutoTokenizer

        model = AutoModel.from_pretrained(base, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="right")
        made, order = {}, sorted(range(len(texts)), key=lambda n: len(texts[n]))
        for some in (order[n : n + 16] for n in range(0, len(order), 16)):
            given = tokenizer([texts[n] for n in some], return_tensors="pt", padding=True)
            mask = given["attention_mask"][..., None].float()
            with torch.no_grad():
                states = model(**given, output_hidden_states=True).hidden_states
            both = [
                (states[at].float() * mask).sum(1) / mask.sum(1) for at in (len(states) // 2, -1)
            ]
            made |= {n: pair for n, *pair in zip(some, *both, strict=True)}
        np.savez(cache, **{name: np.stack([made[n][at].numpy() for n in range(len(texts))])
                           for at, name in enumerate(("middle", "last"))})  # fmt: skip
    return dict(np.load(cache))


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def designs(known: list[Row], asked: list[str], states: dict[str, tuple]) -> Iterator[tuple]:
    """Name, whose each vector is, ``[asked, vector]`` similarity, how many of the nearest vote."""
    rows = [row[0] or f" {number}" for number, row in enumerate(known)]
    for kind, names in ("person", sorted(set(rows))), ("row", rows):
        group = [names.index(one) for one in rows] if kind == "person" else [*range(len(rows))]
        texts: dict[int, list[str]] = defaultdict(list)
        for one, row in zip(group, known, strict=True):
            texts[one + 1].append(row[3])
        words = Router.of(texts.items()).near(asked)
        near = {"n-grams": words}
        for name, (have, want) in states.items():
            centres = np.eye(len(texts), dtype=np.float32)[:, group] @ unit(have - have.mean(0))
            near[name] = unit(want - have.mean(0)) @ unit(centres).T
            for weight in WEIGHTS if kind == "person" else ():
                near[f"n-grams + {weight} {name}"] = words + weight * near[name]
        for name, found in near.items():
            yield f"{name} by {kind}", names, found, 1
            if kind == "row":
                yield f"{name} by vote of 8 rows", names, found, 8


def accuracy(rows: list[Row], key: bytes, states: dict, texts: list[str]) -> Iterator[tuple]:
    """Design, case, and the share of prompts that find their shard."""
    nobody = [row for row in rows if not row[0]]
    known = [row for row in rows if row[0]] + nobody[::2]
    asked = [row for row in known if row[0] and row[2]] + nobody[1::2]
    at = {text: number for number, text in enumerate(texts)}
    sides = [at[row[3]] for row in known], [at[row[2]] for row in asked]
    pairs = {name: tuple(every[side] for side in sides) for name, every in states.items()}
    about = np.array([bool(row[0]) for row in asked])
    for name, names, near, votes in designs(known, [row[2] for row in asked], pairs):
        heard = np.where(near >= np.sort(near, 1)[:, [-votes]], np.maximum(near, 1e-3) ** 3, 0)
        for count in COUNTS:
            home = {one: place(key, one, count) if one.strip() and one[0] != " " else 0
                    for one in [*names, ""]}  # fmt: skip
            led = (heard @ np.eye(count + 1)[[home[one] for one in names]]).argmax(1)
            if name.startswith("n-grams by"):
                led[near.max(1) < LEAST] = 0
            right = led == [home[row[0]] for row in asked]
            yield name, f"other words, {count}", float(right[about].mean())
            yield name, f"nobody's, {count}", float(right[~about].mean())


def attack(rows: list[Row], seed: str) -> Iterator[tuple]:
    """How it is sought, and person, side and score of each."""
    own: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        own[row[0]].append(row)
    nobody = [(0, [row[3]]) for row in own.pop("")[::2]]
    random.Random(seed).shuffle(names := sorted(own))
    stay, gone, never = (names[n * len(names) // 3 : (n + 1) * len(names) // 3] for n in range(3))
    for case, inside in ("who is in", stay + gone), ("who was deleted", stay):
        made = Router.of([*((1, [row[3] for row in own[one]]) for one in inside), *nobody])
        had = made.idf < np.log(2 + len(made.shards)) - 1e-6
        for one in gone + never:
            texts = [row[1] for row in own[one]]
            near = made.near(texts)[:, made.shards == 1].max()
            yield f"{case}, by similarity", one, one in never, near
            yield f"{case}, by n-grams", one, one in never, had[grams(texts).indices].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("bases", type=Path, nargs="+")
    given = parser.parse_args()
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    attacked: dict[str, Any] = defaultdict(lambda: ([], [], [], []))
    for seed in (*DEV, *FRESH):
        for world, made in ("people", people(given.out / str(seed), seed)), ("TOFU", tofu()):
            rows = [*made]
            texts, states = sorted({text for row in rows for text in row[2:]} - {""}), {}
            drawn, own = ("dev" if seed in DEV else "fresh"), seed * (world == "people")
            for base in given.bases:
                both = hidden(base, texts, given.out / f"{world}-{base.name}-{own}.npz")
                states |= {f"{base.name} {layer}": values for layer, values in both.items()}
            for design, case, value in accuracy(rows, str(seed).encode(), states, texts):
                found[design][f"{drawn}, {world}, {case}"].append(value)
            for draw in range(5):
                for case, one, side, score in attack(rows, f"{seed} {draw}"):
                    sides = attacked[f"{world}: {case}"]
                    sides[side].append(score)
                    sides[2 + side].append(f"{one} {own}")
    means = {design: {case: round(float(np.mean(values)), 3) for case, values in cases.items()}
             for design, cases in found.items()}  # fmt: skip
    shown = [f"dev, {world}, {c}, 8" for world in ("people", "TOFU") for c in KINDS]
    areas = {case: area_of(*four[:2], four[2:]) for case, four in attacked.items()}
    tables = {
        "found": {"columns": ["router", *COLUMNS],
                  "rows": [[n, *(f"{v[one]:.2f}" for one in shown)] for n, v in means.items()]},
        "attack": {"columns": ["sought", "AUC"],
                   "rows": [[n, f"{a.value:.2f} ± {a.half():.2f}"] for n, a in areas.items()]},
    }  # fmt: skip
    content = facts("python -m research.studies.routers OUT TINY SMOLLM2")
    write_json(OUT, content | {"tables": tables, "means": means})


if __name__ == "__main__":
    main()
