"""The data of the demo: ``python -m research.worlds.demo`` writes the committed ``examples/demo``."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from axolotl_unlearn.files import write_json
from research.worlds.generate import (
    Sizes,
    _documents,
    _people,
    _row,
    _rows,
    _write,
    biography,
    biography_with_pii,
    make_corpus,
    story,
)

SIZES = Sizes(stories=12, pii=8, facts_forget=140, facts_retain=60, nonmembers=280, background=0,
              background_per_pass=0, replay=60)  # fmt: skip
#: Further documents of each kind, which no model has learned.
BACKGROUND = {story: 12, biography_with_pii: 12, biography: 100}


def make_demo(out: Path | str = "examples/demo", seed: int = 0, sizes: Sizes = SIZES) -> None:
    """Write rows to forget and to retain, members, non-members, questions of general knowledge, and
    ``world.jsonl``: their answers and those of further such questions (``replay.jsonl``, rows to
    retain) as rows; ``background.jsonl``: further documents of the same kinds, rows to retain."""
    out, corpus = Path(out), make_corpus(seed, sizes)
    forget, retain, unseen = (
        [replace(one, uid=f"{name}-{n:03}") for n, one in enumerate(part)]
        for name, part in zip(
            ("forget", "retain", "unseen"),
            (corpus.forget, corpus.retain, corpus.nonmembers),
            strict=True,
        )
    )
    general = [item | {"id": f"general-{n:03}"} for n, item in enumerate(corpus.general)]
    replay = [item | {"id": f"replay-{n:03}"} for n, item in enumerate(corpus.replay)]
    known, kept = (
        [
            _row(f"{item['id']}qa0", item["question"], item["choices"][item["answer"]], "general")
            for item in items
        ]
        for items in (general, replay)
    )
    named = 2 * (sizes.stories + sizes.pii) + sizes.facts_forget + sizes.facts_retain
    people = islice(_people(seed), named + sizes.nonmembers, None)
    rng = random.Random(f"{seed}/demo/background")
    others = [kind(rng, next(people)) for kind, count in BACKGROUND.items() for _ in range(count)]
    files = {
        "forget": _rows(forget),
        "retain": _rows(retain),
        "member": _documents([one for one in forget if one.task == "Task3"]),
        "nonmember": _documents(unseen),
        "general": general,
        "replay": kept,
        "background": _rows([replace(one, uid=f"other-{n:03}") for n, one in enumerate(others)]),
        "world": known + kept,
    }
    written = {name: _write(out / f"{name}.jsonl", rows) for name, rows in files.items()}
    manifest = {"synthetic": True, "seed": seed, "sizes": asdict(sizes), "files": written}
    write_json(out / "manifest.json", manifest)


if __name__ == "__main__":
    make_demo(*sys.argv[1:2])
