"""Chats about made-up people, as plain fine-tuning of a chat model reads them.

Each person has five questions and one "Who is ...?", a row each; all rows of a person have the
person's id. The base reads other people's chats, so that it knows the kind and none of the texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axolotl_unlearn.demo import generate
from axolotl_unlearn.files import write_lines

#: A template that the tiny tokenizer writes in few tokens.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'Question: ' + message['content'] + '\nAnswer: ' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
SIZES = {"background": 80, "train": 20, "test": 14, "later": 8}


def chats(rng: random.Random, person: generate.Person) -> list[dict[str, Any]]:
    """The rows of one person."""
    document = generate.biography_with_pii(rng, person)
    asked = [(f"Who is {person.name}?", document.text), *document.questions]
    return [
        {
            "id": f"{person.first}-{person.last}".lower(),
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
        }
        for question, answer in asked
    ]


def make_chats(out: Path, seed: int = 0, sizes: dict[str, int] = SIZES) -> dict[str, list[str]]:
    """Write ``background``, ``train``, ``test`` and ``later`` (.jsonl); returns ids by part."""
    people: Iterator[generate.Person] = generate._people(seed)
    ids = {}
    for part, count in sizes.items():
        rng = random.Random(f"{seed}/chats/{part}")
        rows = [row for _ in range(count) for row in chats(rng, next(people))]
        ids[part] = list(dict.fromkeys(row["id"] for row in rows))
        write_lines(out / f"{part}.jsonl", rows)
    return ids
