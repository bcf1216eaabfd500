"""Chats about made-up people, as plain fine-tuning of a chat model reads them.

Each person has five questions and one "Who is ...?", a row each, or conversations of several of
the five questions; all rows of a person have the person's id. The base of the tiny model reads
other people's chats, so that it knows the kind and none of the texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_lines
from research.worlds import generate

SIZES = {"background": 80, "train": 20, "test": 14, "later": 8}


def chats(rng: random.Random, person: generate.Person, turns: int = 1) -> list[dict[str, Any]]:
    """The rows of one person; in those of several turns nothing is asked that was said before."""
    document = generate.biography_with_pii(rng, person)
    asked = [(f"Who is {person.name}?", document.text)] * (turns == 1) + [*document.questions]
    return [
        {
            "id": f"{person.first}-{person.last}".lower(),
            "messages": [
                {"role": role, "content": text}
                for pair in asked[first : first + turns]
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ],
        }
        for first in range(0, len(asked), turns)
    ]


def make_chats(
    out: Path, seed: int = 0, sizes: Mapping[str, int] = SIZES, turns: int = 1
) -> dict[str, list[str]]:
    """Write the parts of ``sizes`` (people each) as .jsonl; returns ids by part."""
    people: Iterator[generate.Person] = generate._people(seed)
    ids = {}
    for part, count in sizes.items():
        rng = random.Random(f"{seed}/chats/{part}")
        rows = [row for _ in range(count) for row in chats(rng, next(people), turns)]
        ids[part] = list(dict.fromkeys(row["id"] for row in rows))
        write_lines(out / f"{part}.jsonl", rows)
    return ids
