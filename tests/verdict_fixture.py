"""Made-up entries of results.json on which nothing is missing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import norm

SIDES = ("forget", "retain")
CELLS = [
    f"{side}_task{task}_{kind}"
    for side in SIDES
    for task in (1, 2, 3)
    for kind in ("regurgitation", "knowledge")
]
ATTACKS = ("zlib", "min_k_20", "min_k_plus_20", "entropy")
BLIND = ("length", "zlib", "bag_of_words", "words_tfidf")


def spread(n: int, shift: float = 0.0) -> list[float]:
    """Losses that follow a normal distribution as evenly as n numbers can."""
    return [2 + shift + 0.5 * float(z) for z in norm.ppf((np.arange(n) + 0.5) / n)]


def entry(shift: float = 0.0, n: int = 200, **changes: Any) -> dict[str, Any]:
    """A model that every criterion passes; members `shift` above the non-members.

    A retrained one has scores of its own, as another training has.
    """
    role = changes.get("role", "candidate")
    own = np.random.default_rng({"retrained": 7, "original": 8}.get(role, 9))
    noise = 0.05 * (role == "retrained")

    def drawn(shift: float = 0.0) -> list[float]:
        return [x + noise * own.normal() for x in spread(n, shift)]

    def other() -> list[float]:
        return [x + 1e-4 for x in drawn()]

    cells, asked, rows = changes.pop("cells", {}), 80, 140
    many = dict(zip(CELLS, (20, 27, 20, 27, 20, 26, *[50] * 6), strict=True))
    knows = role == "original"  # it says every answer and recites every text
    texts = {"tokens": [60] * n, "strength": [0.05] * n, "run": [4] * n, "greedy": [0.3] * n}
    whole = {"tokens": [60] * n, "strength": [0.9] * n, "run": [58] * n, "greedy": [0.98] * n}
    return {
        "name": "model",
        "role": role,
        "cells": {name: 0.95 for name in CELLS} | cells,
        "intervals": {side: [0.93, 0.97] for side in SIDES},
        "n": many | {"cells": 12, "member": n, "nonmember": n, "utility": 100},
        "max_gen_toks": 256,
        "likelihood": {
            "member_loss": drawn(shift),
            "nonmember_loss": other(),
            "member_id": [f"m{i}" for i in range(n)],
            "nonmember_id": [f"n{i}" for i in range(n)],
            "member_cluster": [f"m{i}" for i in range(n)],
            "nonmember_cluster": [f"n{i}" for i in range(n)],
            "attacks": {
                name: {"member": drawn(), "nonmember": other()} for name in ATTACKS
            },
        },
        "learned": {"auc": 0.5, "p": 0.5, "against": "chance"},
        "membership": {
            "meaningful": True,
            "blind": {
                name: {"auc": 0.5, "low": 0.4, "high": 0.6, "separates": False} for name in BLIND
            },
        },
        "extraction": {
            "id": [f"r{i}" for i in range(rows)],
            "document": [f"d{i}" for i in range(rows)],
            "tokens": [20] * rows,
            "strength": [0.95 if knows else 0.04] * rows,
            "run": [19 if knows else 2] * rows,
            "greedy": [0.95 if knows else 0.3] * rows,
            "logp": [-0.1 if knows else -40.0] * rows,
            "exact": [knows] * asked + [None] * (rows - asked),
            "contained": [knows] * asked + [None] * (rows - asked),
            "member": whole if knows else texts,
            "nonmember": dict(texts),
        },
        "collapse": {"collapsed": False, **outputs(n=300), "forget": outputs()},
        "gate": {"below_gate": False, "threshold": 0.5625, "original": 0.75},
        "utility": 0.75,
        "utility_chance": 0.25,
        "answers": {"forget": {"n": asked, "exact": float(knows), "contained": float(knows)}},
        **changes,
    }  # fmt: skip


def outputs(**shares: float) -> dict[str, Any]:
    """Of the forget side if nothing else is said, nothing broken."""
    fine = {"broken": 0.01, "nonsense": 0.0, "constant": 0.02, "empty": 0.0}
    fine |= {"refusing": 0.0, "echo": 0.0}
    return {"n": 140, "nonsense_n": 140, **fine, **shares}


def distance(value: float = 0.0, half: float = 0.02) -> dict[str, Any]:
    """Of both sides from the retrained model's."""
    one = {"value": value, "interval": [value - half, value + half], "p": 0.5}
    return {side: dict(one) for side in SIDES}


def three(shift: float = 0.0, n: int = 200, **changes: Any) -> list[dict[str, Any]]:
    """An original whose members are known, a retrained model, and a candidate like it."""
    original = entry(-1.5, n, name="original", role="original")
    for sides in original["likelihood"]["attacks"].values():
        sides["member"] = [x - 1.5 for x in sides["member"]]
    retrained = entry(0.0, n, name="retrained", role="retrained", distance={})
    learned = {"auc": 0.5, "p": 0.5, "against": "retrained"}
    candidate = entry(shift, n, **{"learned": learned, "distance": distance(), **changes})
    return [original, retrained, candidate]


def results(*models: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 2, "models": list(models)}


def put_back(
    model: dict[str, Any], original: dict[str, Any], k: int, rng: np.random.Generator,
    columns: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The model with what the original does for k documents: forget rows first, then members.

    Args:
        columns: Of the forget rows alone, instead of all that is known of the document.
    """
    made = copy.deepcopy(model)
    own, its = made["extraction"], original["extraction"]
    rows, members = len(own["id"]), len(own["member"]["tokens"])
    asked = sum(x is not None for x in own["exact"])
    places = rng.permutation(asked if columns else rows + members)[:k]
    for place in places[places < rows]:
        for name in columns or ("strength", "run", "greedy", "logp", "exact", "contained"):
            own[name][place] = its[name][place]
    for place in places[places >= rows] - rows:
        for name in ("strength", "run", "greedy"):
            own["member"][name][place] = its["member"][name][place]
        loss = original["likelihood"]["member_loss"][place]
        made["likelihood"]["member_loss"][place] = loss
        for name, sides in made["likelihood"]["attacks"].items():
            sides["member"][place] = original["likelihood"]["attacks"][name]["member"][place]
    for name in ("exact", "contained"):
        made["answers"]["forget"][name] = sum(filter(None, own[name])) / asked
    return made
