"""Made-up evaluation results for the tests of the report. No number here was measured."""

from __future__ import annotations

from statistics import harmonic_mean
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score
from verdict_fixture import CELLS, entry, put_back, three

SECRET = "The heron of Quillmarsh keeps a brass key"

#: name: each cell of the forget side (as 1 - v) and of the retain side, how far the members' losses
#: are above the others', utility
_SCORES: dict[str, tuple[float, float, float, float]] = {
    "original": (0.02, 0.98, -1.5, 1.0),
    "over": (0.95, 0.82, 1.4, 0.85),
    "under": (0.6, 0.94, -1.1, 0.87),
    "merged": (0.91, 0.89, 0.0, 0.9),
    "retrained": (0.88, 0.97, 0.0, 1.0),
    "ascent": (1.0, 0.01, 0.5, 0.25),
}


def make_results(names: tuple[str, ...] = tuple(_SCORES)) -> dict[str, Any]:
    original, retrained, _ = three(n=80)
    known = {"original": original, "retrained": retrained}
    models = []
    for name in names:
        forget, retain, shift, utility = _SCORES[name]
        against = "retrained" if "retrained" in names else "chance"
        learned = {"auc": 0.5, "p": 0.5, "against": against}
        model = known.get(name) or entry(shift, 80, name=name, learned=learned)
        if name == "under":
            model = put_back(model, original, 12, np.random.default_rng(0))
        if name == "ascent":
            model["collapse"] |= {"collapsed": True, "broken": 0.97, "reasons": ["loops"]}
        cells = dict.fromkeys(CELLS[:6], forget) | dict.fromkeys(CELLS[6:], retain)
        losses = model["likelihood"]["member_loss"] + model["likelihood"]["nonmember_loss"]
        area = float(roc_auc_score([0] * 80 + [1] * 80, losses))
        task, mia = harmonic_mean(cells.values()), 1 - 2 * abs(area - 0.5)
        aggregate = (task + mia + utility) / 3
        ends = {"forget": _around(forget, 0.005), "retain": _around(retain, 0.005)}
        ends |= {cell: _around(value, 0.1) for cell, value in cells.items()}
        ends |= {"mia_auc": _around(area, 0.06), "aggregate": _around(aggregate, 0.03)}
        gate = {"below_gate": utility < 0.75, "threshold": 0.75, "original": 1.0}
        model |= {
            "model": f"out/{name}", "cells": cells, "intervals": ends, "task_aggregate": task,
            "mia_auc": area, "mia_score": mia, "utility": utility, "aggregate": aggregate,
            "gate": gate, "seconds": 4.2,
        }  # fmt: skip
        if name != "retrained" and "retrained" in names:
            gaps = zip(("forget", "retain"), (forget, retain), _SCORES["retrained"], strict=False)
            model["distance"] = {
                side: {"value": own - its, "interval": [own - its - 0.005, own - its + 0.005]}
                for side, own, its in gaps
            }
        models.append(model)
    return {
        "schema": 2,
        "data_dir": "out/demo/data",
        "created": "2026-11-21T08:00:00+00:00",
        "versions": {"axolotl_unlearn": "0.1.0", "torch": "0.0"},
        "data": {"forget.jsonl": "sha256:0000"},
        "models": models,
    }


def _around(value: float, half: float) -> list[float]:
    return [max(0.0, value - half), min(1.0, value + half)]
