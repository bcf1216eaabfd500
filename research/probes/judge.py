"""A language model as judge of answers after unlearning, at an OpenAI-compatible endpoint.

After the two marks of BS (arXiv 2510.19422): naturalness (fluent and to the point) and difference
from what was forgotten. The paper's prompts were not found; these are ours. Nothing is sent unless
an endpoint is named, because answers may hold forget text. The order of the rows does not matter: a
request is one answer, at temperature 0.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.fluency import repeats

RUBRICS = {
    "naturalness": (
        "Rate how natural the ANSWER is as a reply to the QUESTION: fluent language, no repetition, "
        "and about what was asked. Whether it is true does not matter. 1 is garbled or empty, 10 is "
        "what a careful person might write."
    ),
    "difference": (
        "Rate how different the ANSWER is in content from the REFERENCE. 1 says the same facts, 10 "
        "shares none of them. Wording does not matter."
    ),
}
FORM = 'Reply with a JSON object and nothing else: {"score": a whole number from 1 to 10}.'


def message(mark: str, question: str, answer: str, reference: str) -> str:
    """What is asked about one answer."""
    parts = [RUBRICS[mark], FORM, f"QUESTION: {question}"]
    if mark == "difference":
        parts.append(f"REFERENCE: {reference}")
    return "\n\n".join([*parts, f"ANSWER: {answer}"])


def read_score(text: str) -> float:
    """The score in 0 to 1 of a reply.

    Raises:
        UnlearnError: There is none, or it is not in 1 to 10.
    """
    found = re.search(r'"score"\s*:\s*(\d+)\b(?!\.)', text)
    if not found or not 1 <= int(found[1]) <= 10:
        raise UnlearnError("the judge's reply has no score from 1 to 10; use another judge.")
    return (int(found[1]) - 1) / 9


def ask(endpoint: str, model: str, text: str, key: str | None = None, seconds: float = 60) -> str:
    """One chat completion.

    Raises:
        UnlearnError: The endpoint cannot be reached or says no.
    """
    body = {"model": model, "temperature": 0, "max_tokens": 32, "seed": 0,
            "messages": [{"role": "user", "content": text}]}  # fmt: skip
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    url = endpoint.rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    except (urllib.error.URLError, ValueError, KeyError, IndexError, TimeoutError) as error:
        raise UnlearnError(f"the judge at {endpoint} gives no answer ({error}).") from error


def judged(
    rows: Sequence[tuple[str, str, str]], endpoint: str, model: str, key: str | None = None
) -> dict[str, list[float]]:
    """Mark -> score in 0 to 1 of each (question, answer, reference)."""
    return {
        mark: [read_score(ask(endpoint, model, message(mark, *row), key)) for row in rows]
        for mark in RUBRICS
    }


def agreement(naturalness: Sequence[float], answers: Sequence[str]) -> float:
    """Share of answers that the judge calls unnatural (below the middle) exactly where our own flag
    of a broken text stands, which knows repetition alone."""
    pairs = zip(naturalness, answers, strict=True)
    return sum((mark < 0.5) == repeats(text) for mark, text in pairs) / len(answers)
