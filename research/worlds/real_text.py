"""LUME and TOFU for a tiny model with a life: a base that read one part, and others to come.

Whole documents (TOFU: authors) are on one side only. *base* reads documents that are in no other
part; *original* reads the forget and retain rows as well, *retrained* the retain rows; held-out rows and
non-members are in no stream. No text of the data is part of this repository.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import document_id
from axolotl_unlearn.files import write_json
from research.worlds import generate
from research.worlds.generate import Sizes

#: World -> documents a side. ``more`` are retained besides where there is four times as much to retain
#: (of TOFU the other rows of the same authors); the base reads all others.
PARTS: Mapping[str, Mapping[str, int]] = {
    "lume": {"forget": 70, "retain": 70, "more": 210, "heldout": 70, "nonmember": 100},
    "tofu": {"forget": 40, "retain": 40, "more": 0, "heldout": 30, "nonmember": 50},
}
#: Rows of an author in TOFU, one after the other, and those that are used (all by the base and
#: where there is four times as much to retain).
AUTHOR, USED = 20, 5
#: Passes of the base, and of all tuned models, over their rows.
PASSES = {"base": 4, "tuned": 24}
#: Longer texts are cut: words of an input (its last) and of an output.
WORDS = (60, 32)
VOCABULARY = 4096


def _cut(row: Mapping[str, str]) -> dict[str, str]:
    before, after = row["input"].split(" "), row["output"].split(" ")
    return {**row, "input": " ".join(before[-WORDS[0] :]), "output": " ".join(after[: WORDS[1]])}


def lume(folder: Path) -> list[list[dict[str, str]]]:
    """Rows of each document of the training split, both sides."""
    documents: dict[str, list[dict[str, str]]] = {}
    for side in ("forget", "retain"):
        for line in (folder / "train" / f"{side}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            documents.setdefault(document_id(row["id"]), []).append(_cut(row))
    return list(documents.values())


def tofu(folder: Path) -> list[list[dict[str, str]]]:
    """Rows of each author. Question and answer are one document: recall is then a share of the
    answer, and not whether it came word by word."""
    files = (folder / f"{name}.jsonl" for name in ("retain90", "forget10_perturbed"))
    rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    return [
        [
            _cut(
                generate._row(f"author{n // AUTHOR}sc{i}", row["question"], row["answer"], "Task1")
            )
            for i, row in enumerate(rows[n : n + AUTHOR])
        ]
        for n in range(0, len(rows), AUTHOR)
    ]


def make_corpus(
    folder: Path, out: Path, world: str, seed: int, much: bool = False, small: bool = False
) -> dict[str, Any]:
    """Write the rows of all sides and the streams, as `research.worlds.life` does.

    Args:
        folder: Of the data set.
        seed: Draws all sides; the base reads the same documents for all seeds.
        much: Four times as much to retain.
        small: A quarter, to try the code.
    """
    documents = {"lume": lume, "tofu": tofu}[world](folder)
    random.Random(world).shuffle(documents)
    counts = dict(PARTS[world])
    background, others = documents[sum(counts.values()) :], documents[: sum(counts.values())]
    random.Random(f"{seed}/{world}").shuffle(others)
    sides, first = {}, 0
    for side, count in counts.items():
        sides[side] = others[first : first + (count // 4 if small else count)]
        first += count
    few = slice(None, None, AUTHOR // USED) if world == "tofu" else slice(None)
    rows = {side: [row for one in part for row in one[few]] for side, part in sides.items()}
    rows["background"] = [row for one in background[: 12 if small else None] for row in one]
    if much:
        rows["retain"] = [row for part in ("retain", "more") for one in sides[part] for row in one]
    del rows["more"]
    for side in ("member", "nonmember"):  # membership is judged on documents, not on questions
        some = rows["forget" if side == "member" else side]
        rows[side] = [row for row in some if world == "tofu" or row["id"].endswith("sc1")]

    def stream(name: str, of: Sequence[dict[str, str]], passes: int) -> list[dict[str, str]]:
        rng = random.Random(f"{seed}/{world}/{name}")
        return generate._stream(rng, Sizes(pii_repeats=1), list(of), [[] for _ in range(passes)])

    passes = dict.fromkeys(PASSES, 2) if small else PASSES
    rows |= {
        "base": stream("base", rows["background"], passes["base"]),
        "memorise": stream("memorise", rows["forget"] + rows["retain"], passes["tuned"]),
        "retrain": stream("retrain", rows["retain"], passes["tuned"]),
    }
    files = {name: generate._write(out / f"{name}.jsonl", part) for name, part in rows.items()}
    documents = {side: len(part) for side, part in sides.items()}
    manifest = {"world": world, "seed": seed, "documents": documents, "files": files}
    write_json(out / "manifest.json", manifest)
    return {"documents": documents, "rows": {name: len(part) for name, part in rows.items()}}


def blank(tiny: Path, out: Path, background: Path) -> None:
    """The tiny model's configuration with a tokenizer that knows this world's words."""
    from transformers import AutoTokenizer

    lines = map(json.loads, background.read_text("utf-8").splitlines())
    texts = [f"{row['input']} {row['output']}" for row in lines]
    shutil.copytree(tiny, out, dirs_exist_ok=True)
    old = AutoTokenizer.from_pretrained(tiny)
    old.train_new_from_iterator(texts, VOCABULARY).save_pretrained(out)
    config = json.loads((tiny / "config.json").read_text("utf-8"))
    write_json(out / "config.json", config | {"vocab_size": VOCABULARY})
