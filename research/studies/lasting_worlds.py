"""LUME and TOFU for a tiny model with a life: a base that read one part, and others to come.

Whole documents (TOFU: authors) are on one side only. *base* reads a part of them, *original* the
forget and retain rows as well, *retrained* the retain rows; held-out rows and non-members are in no
stream. No text of the data is part of this repository.
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

#: World -> documents a side; the base reads all others.
PARTS: Mapping[str, Mapping[str, int]] = {
    "lume": {"forget": 60, "retain": 240, "heldout": 60, "nonmember": 30},
    "tofu": {"forget": 10, "retain": 90, "heldout": 10, "nonmember": 10},
}
#: Rows of an author in TOFU, one after the other.
AUTHOR = 20
#: Passes of the base, and of all tuned models, over their rows.
PASSES = {"base": 3, "tuned": 10}
#: Longer rows are cut: words of a text, from its end.
WORDS = 60


def lume(folder: Path) -> list[list[dict[str, str]]]:
    """Rows of each document of the training split, both sides."""
    documents: dict[str, list[dict[str, str]]] = {}
    for side in ("forget", "retain"):
        for line in (folder / "lume" / "train" / f"{side}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            if row["id"].endswith("sc1"):
                row["input"] = " ".join(row["input"].split()[-WORDS:])
                row["output"] = " ".join(row["output"].split()[:WORDS])
            documents.setdefault(document_id(row["id"]), []).append(row)
    return list(documents.values())


def tofu(folder: Path) -> list[list[dict[str, str]]]:
    """Rows of each author."""
    files = ("retain90", "forget10_perturbed")
    lines = [
        line for f in files for line in (folder / "tofu" / f"{f}.jsonl").open(encoding="utf-8")
    ]
    rows = [json.loads(line) for line in lines]
    return [
        [
            generate._row(f"author{n // AUTHOR}qa{i}", row["question"], row["answer"], "Task1")
            for i, row in enumerate(rows[n : n + AUTHOR])
        ]
        for n in range(0, len(rows), AUTHOR)
    ]


def make_corpus(folder: Path, out: Path, world: str, seed: int = 0) -> dict[str, Any]:
    """Write the rows of all sides and the streams, as `research.worlds.life` does."""
    documents = {"lume": lume, "tofu": tofu}[world](folder)
    random.Random(f"{seed}/{world}").shuffle(documents)
    rows, first = {}, 0
    for side, count in (PARTS[world] | {"background": len(documents)}).items():
        rows[side] = [row for one in documents[first : first + count] for row in one]
        first += count
    rows["member"] = rows["forget"]

    def stream(name: str, of: Sequence[dict[str, str]], passes: int) -> list[dict[str, str]]:
        rng = random.Random(f"{seed}/{world}/{name}")
        return generate._stream(rng, Sizes(pii_repeats=1), list(of), [[] for _ in range(passes)])

    rows |= {
        "base": stream("base", rows["background"], PASSES["base"]),
        "memorise": stream("memorise", rows["forget"] + rows["retain"], PASSES["tuned"]),
        "retrain": stream("retrain", rows["retain"], PASSES["tuned"]),
    }
    out.mkdir(parents=True, exist_ok=True)
    files = {name: generate._write(out / f"{name}.jsonl", part) for name, part in rows.items()}
    manifest = {"world": world, "seed": seed, "files": files}
    write_json(out / "manifest.json", manifest)
    return manifest


def blank(tiny: Path, out: Path, background: Path) -> None:
    """The tiny model's configuration with a tokenizer that knows this world's words."""
    from transformers import AutoTokenizer

    texts = [
        f"{row['input']} {row['output']}"
        for row in map(json.loads, background.read_text("utf-8").splitlines())
    ]
    shutil.copytree(tiny, out, dirs_exist_ok=True)
    old = AutoTokenizer.from_pretrained(tiny)
    old.train_new_from_iterator(texts, len(old)).save_pretrained(out)
