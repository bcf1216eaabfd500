"""Made-up evaluation results for the tests of the report. No number here was measured."""

from __future__ import annotations

import math
from statistics import harmonic_mean
from typing import Any

import numpy as np
from scipy.stats import norm

CELLS = [
    f"{side}_task{task}_{kind}"
    for side in ("forget", "retain")
    for task in (1, 2, 3)
    for kind in ("regurgitation", "knowledge")
]
SECRET = "The heron of Quillmarsh keeps a brass key"

# name: cells (6 forget as 1 - v, 6 retain), member and non-member mean loss, utility
_SCORES: dict[str, tuple[list[float], float, float, float]] = {
    "original": ([0.03, 0.01, 0.02, 0.0, 0.05, 0.01, 0.98, 1.0, 0.97, 1.0, 0.96, 1.0], 0.3, 1.8, 1),
    "over": ([0.95, 1.0, 0.91, 0.97, 0.88, 1.0, 0.83, 0.75, 0.86, 0.8, 0.79, 0.9], 4.6, 3.2, 0.85),
    "under": ([0.72, 0.9, 0.7, 0.94, 0.66, 0.9, 0.93, 1.0, 0.9, 0.97, 0.88, 0.96], 1.0, 2.1, 0.87),
    "merged": (
        [0.88, 1.0, 0.86, 0.95, 0.8, 0.97, 0.88, 0.92, 0.85, 0.9, 0.84, 0.95],
        1.92,
        1.92,
        0.9,
    ),
    "retrained": ([0.86, 1.0, 0.83, 0.96, 0.7, 0.94, 0.97, 1.0, 0.96, 1.0, 0.95, 1.0], 1.9, 1.9, 1),
    "ascent": ([1, 1, 1, 1, 1, 1, 0.02, 0.0, 0.03, 0.0, 0.01, 0.0], 21.0, 20.5, 0.25),
}


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """Share of (member, non-member) pairs where the member's loss is lower, ties half."""
    lower = (members[:, None] < others[None, :]).mean()
    return float(lower + 0.5 * (members[:, None] == others[None, :]).mean())


def make_results(names: tuple[str, ...] = tuple(_SCORES)) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    # The same texts for every model: what is hard for one is hard for all.
    hard = rng.gamma(6, 1 / 6, 80), rng.gamma(6, 1 / 6, 160)
    models = []
    for name in names:
        values, member_mean, other_mean, utility = _SCORES[name]
        cells = dict(zip(CELLS, values, strict=True))
        members, others = (
            mean * side + 0.1 * norm.ppf((rng.permutation(len(side)) + 0.5) / len(side))
            for mean, side in zip((member_mean, other_mean), hard, strict=True)
        )
        area = auc(members, others)
        task = 0.0 if min(values) <= 0 else harmonic_mean(values)
        mia = 1 - 2 * abs(area - 0.5)
        collapsed = name == "ascent"
        shares = {"n": 120, "nonsense_n": 120, "empty": 0.0, "constant": 0.01}
        shares |= {"broken": 0.97 * collapsed, "nonsense": 0.0, "refusing": 0.0, "echo": 0.0}
        se = 0.03
        losses = [members, others]
        half = {cell: 1.96 * math.sqrt(max(v * (1 - v), 0.002) / 24) for cell, v in cells.items()}
        model: dict[str, Any] = {
            "name": name,
            "model": f"out/{name}",
            "cells": cells,
            "n": {
                **{c: 20 if i < 6 else 40 + 10 * i for i, c in enumerate(CELLS)},
                "member": 80,
                "nonmember": 160,
                "utility": 400,
            },
            "intervals": {
                **{c: [max(0, v - half[c]), min(1, v + half[c])] for c, v in cells.items()},
                **_side_intervals(values),
                "mia_auc": [max(0, area - 2 * se), min(1, area + 2 * se)],
                "aggregate": [(task + mia + utility) / 3 - 0.03, (task + mia + utility) / 3 + 0.03],
            },
            "task_aggregate": task,
            "mia_auc": area,
            "mia_score": mia,
            "utility": utility,
            "aggregate": (task + mia + utility) / 3,
            "collapse": {
                "collapsed": collapsed,
                "reasons": ["97 % of outputs repeat one token"] if collapsed else [],
                **shares,
                "n": sum(40 + 10 * i for i in range(6, 12)),
                "forget": shares,
            },
            "utility_chance": 0.25,
            "max_gen_toks": 64,
            "answers": {"forget": {"n": 60, "exact": 0.0, "contained": 0.0}},
            "learned": {"auc": 0.5, "p": 0.5, "against": "retrained"},
            "membership": {
                "meaningful": True,
                "blind": {
                    blind: {"auc": 0.5, "low": 0.4, "high": 0.6, "separates": False}
                    for blind in ("length", "zlib", "bag_of_words", "words_tfidf")
                },
            },
            "extraction": _extraction(rng, values),
            "gate": {"below_gate": utility < 0.75, "threshold": 0.75, "original": 1.0},
            "seconds": 4.2,
            "likelihood": {
                "member_loss": members.round(4).tolist(),
                "nonmember_loss": others.round(4).tolist(),
                "member_id": [f"m{i}" for i in range(80)],
                "nonmember_id": [f"n{i}" for i in range(160)],
                "member_cluster": [f"m{i}" for i in range(80)],
                "nonmember_cluster": [f"n{i}" for i in range(160)],
                "attacks": {
                    attack: {
                        side: (loss + 0.02 * rng.normal(size=len(loss))).tolist()
                        for side, loss in zip(("member", "nonmember"), losses, strict=True)
                    }
                    for attack in ("zlib", "min_k_20", "min_k_plus_20", "entropy")
                },
            },
        }
        models.append(model)
    target = next((model for model in models if model["name"] == "retrained"), None)
    for model in models:
        if target is None:
            model["learned"]["against"] = "chance"
        elif model is not target:
            model["distance"] = _distance(model, target)
    return {
        "schema": 2,
        "data_dir": "out/demo/data",
        "created": "2026-11-21T08:00:00+00:00",
        "versions": {"axolotl_unlearn": "0.1.0", "torch": "0.0"},
        "data": {"forget.jsonl": "sha256:0000"},
        "models": models,
    }


def _side_intervals(values: list[float]) -> dict[str, list[float]]:
    sides = {"forget": values[:6], "retain": values[6:]}
    means = {n: 0.0 if min(v) <= 0 else harmonic_mean(v) for n, v in sides.items()}
    return {name: [max(0, mean - 0.005), min(1, mean + 0.005)] for name, mean in means.items()}


def _extraction(rng: np.random.Generator, values: list[float]) -> dict[str, Any]:
    strong = 8 if np.mean(values[:6]) < 0.5 else 0.5
    rows = np.clip(rng.beta(strong, 4, 120), 0, 0.4 if strong < 1 else 1)
    return {
        "id": [f"r{i}" for i in range(120)],
        "document": [f"d{i // 3}" for i in range(120)],
        "tokens": [24] * 120,
        "strength": rows.tolist(),
        "run": [int(24 * x) for x in rows],
        "greedy": rows.tolist(),
        "logp": [-30.0 if strong < 1 else -0.1] * 120,
        "exact": [None, False] * 60,
        "contained": [None, False] * 60,
        "member": _texts(80),
        "nonmember": _texts(160),
    }


def _texts(n: int) -> dict[str, Any]:
    return {"tokens": [60] * n, "strength": [0.05] * n, "run": [4] * n, "greedy": [0.3] * n}


def _distance(model: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Of both sides from the retrained model."""
    found = {}
    for side, part in (("forget", CELLS[:6]), ("retain", CELLS[6:])):
        ends = [
            0.0 if min(v) <= 0 else harmonic_mean(v)
            for v in ([one["cells"][c] for c in part] for one in (model, target))
        ]
        gap = ends[0] - ends[1]
        found[side] = {"value": gap, "interval": [gap - 0.005, gap + 0.005], "p": 0.5}
    return found
