"""The people of a request side by side: deleted, held out and retained, under three models.

python -m research.studies.people REQUEST OUT
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.files import write_json

if TYPE_CHECKING:
    from axolotl_unlearn.data.typed import Typed

#: Documents whose texts are shown: what was learned, and what two models say.
WORST, KEYS = 5, ("output", "after", "teacher")
MODELS = {"before": "before", "after": "after", "teacher": "the teacher"}


def measure_people(folder: Path, out: Path) -> None:
    """Write people.json: each group's answers and loss under each model, and the worst documents.

    An answer counts as said where each of its tokens is the likeliest after those before it, in
    the row as it was learned. Intervals (95 %) are over people, of one person over rows.
    """
    import torch

    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from axolotl_unlearn.requests.measure import teacher_of
    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.rows import encoded, load_tokenizer_of

    request = Request.load(folder)
    tokenizer = load_tokenizer_of(request.path("finetune.yml"))
    parts = {"deleted": "forget", "held out": "judge", "retained": "retain"}
    groups = {name: encoded(folder, part, tokenizer) for name, part in parts.items()}
    groups["retained"] = groups["retained"][: len(groups["held out"])]
    worst = json.loads(request.path("verdict.json").read_text("utf-8"))["documents"][:WORST]
    lines = request.path("eval-data", "forget.jsonl").read_text("utf-8").splitlines()
    asked = [json.loads(line) for line in lines]
    for document in worst:
        document["texts"] = [row for row in asked if row["document"] == document["document"]]
    rows = [row for document in worst for row in document["texts"]]
    names = {"before": request.before, "after": request.after, "teacher": teacher_of(request)}
    models = {}
    for spec in parse_models([f"{name}={source}" for name, source in names.items()]):
        model = load_model(spec, dtype=torch.float32, device="cpu")
        models[spec.name] = {name: of_group(model, part) for name, part in groups.items()}
        prompts = [row["input"] for row in rows]
        said = generate_greedily(model, load_tokenizer(spec), prompts, max_new_tokens=64)
        for row, one in zip(rows, said, strict=True):
            row[spec.name] = one.text
    write_json(out / "people.json", {"models": models, "worst": worst})


def of_group(model: Any, rows: Sequence[Typed]) -> dict[str, Any]:
    """``said`` and ``loss`` (nats a token) of the answers of some people: value and interval."""
    from axolotl_unlearn.engine.token_scoring import Query, score_queries
    from axolotl_unlearn.metrics.intervals import Mean, mean_interval

    queries, ends = [], []
    for row in rows:
        times = [t for t, label in enumerate(row.labels[1:]) if label != IGNORE]
        queries.append(Query(row.input_ids, times, [row.input_ids[t + 1] for t in times]))
        ends.append([i for i in range(1, len(times)) if times[i] > times[i - 1] + 1])
    said, loss, people = [], [], ([], [])
    several = len({row.source.row["id"] for row in rows}) > 1
    for row, stretches, facts in zip(rows, ends, score_queries(model, queries), strict=True):
        person = str(row.source.row["id"]) if several else row.id
        answers = [bool(part.all()) for part in np.split(facts.greedy, stretches)]
        said += answers
        people[0].extend([person] * len(answers))
        loss.append(-float(facts.logp.mean()))
        people[1].append(person)
    found: dict[str, Any] = {"people": len({row.source.row["id"] for row in rows})}
    for name, values, clusters in (("said", said, people[0]), ("loss", loss, people[1])):
        low, high = mean_interval(Mean([float(value) for value in values], clusters))
        found[name] = {"n": len(values), "value": float(np.mean(values)), "interval": [low, high]}
    return found


def tables(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of people.json, as `research/tables.py` prints them: the groups, and the worst documents."""
    models = found["models"]
    rows = [
        [f"{group}, {one['people']} people: {words}"]
        + [shown(models[model][group][figure]) for model in MODELS]
        for figure, words in (("said", "answers said"), ("loss", "loss, nats a token"))
        for group, one in models["before"].items()
    ]
    worst = [
        [f"{document['reading']}, p {document['p']:.2f}, rank {document['rank']:.2f}"]
        + ["<br>".join(_plain(one[key]) for one in document["texts"]) for key in KEYS]
        for document in found["worst"]
    ]
    return {
        "people": {"columns": ["", *MODELS.values()], "rows": rows},
        "worst": {"columns": ["reading", "learned", "said now", "the teacher says"], "rows": worst},
    }


def _plain(text: str) -> str:
    """In a cell of a table, without the template's tokens."""
    return re.sub(r"<\|.*?\|>", "", text).strip().replace("|", "/").replace("\n", " ") or "-"


def shown(figure: Mapping[str, Any]) -> str:
    """A value with its interval, as text."""
    low, high = figure["interval"]
    return f"{figure['value']:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    measure_people(Path(sys.argv[1]), Path(sys.argv[2]))
