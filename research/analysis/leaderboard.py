"""Lines and tables of a leaderboard: a method by its scores, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from scipy.stats import t as student

from axolotl_unlearn.metrics.intervals import auc
from research.analysis.seeds import Table, count_of_seeds, markdown


def broken_down(model: Mapping[str, Any]) -> bool:
    """Whether a model has collapsed, or lost so much utility that the gate stops it."""
    gate, collapse = model.get("gate") or {}, model.get("collapse") or {}
    return bool(gate.get("below_gate") or collapse.get("collapsed"))


def strongest_attack(model: Mapping[str, Any]) -> tuple[str, float]:
    """The attack whose AUC is farthest from chance, either way, and that AUC."""
    seen = model["likelihood"]
    sides = {"loss": {side: seen[f"{side}_loss"] for side in ("member", "nonmember")}}
    areas = {
        attack: float(auc(*([-x for x in pair[side]] for side in ("member", "nonmember"))))
        for attack, pair in (sides | seen["attacks"]).items()
    }
    return max(areas.items(), key=lambda one: abs(one[1] - 0.5))


def line(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the leaderboard keeps of a model's scores."""
    attack, area = strongest_attack(model)
    gaps = [
        abs(gap["value"])
        for name, gap in (model.get("distance") or {}).items()
        if name not in ("task_aggregate", "mia_score", "aggregate")
    ]
    collapse = model.get("collapse") or {}
    return {
        **{key: model[key] for key in ("aggregate", "task_aggregate", "utility")},
        "attack": area,
        "attack_name": attack,
        "broken": collapse.get("broken"),
        "collapsed": broken_down(model),
        "distance": statistics.fmean(gaps) if gaps else None,
    }


#: Column -> key of a line, and decimals.
COLUMNS: dict[str, tuple[str, int]] = {
    "Aggregate": ("aggregate", 3),
    "Task Aggregate": ("task_aggregate", 3),
    "strongest attack": ("attack", 2),
    "utility": ("utility", 2),
    "broken": ("broken", 2),
    "distance": ("distance", 3),
    "relearnt": ("relearn", 2),
    "4-bit": ("quantise", 2),
    "s/step": ("seconds", 2),
    "MiB": ("mib", 0),
}


def tables(content: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of a leaderboard's results, for its page and `research/tables.py`."""
    seeds = list(content["seeds"].values())
    names = list(dict.fromkeys(name for lines in seeds for name in lines))

    def of(name: str) -> list[Mapping[str, Any]]:
        return [lines[name] for lines in seeds if name in lines]

    def mean(name: str, key: str) -> float | None:
        known = [one[key] for one in of(name) if one.get(key) is not None]
        if key == "attack":  # .2 and .8 are as far from chance; their mean would hide both
            known = [max(area, 1 - area) for area in known]
        return statistics.fmean(known) if known else None

    def rank(name: str) -> tuple[bool, int, float]:
        given = name in ("original", "retrained")
        return not given, sum(one["collapsed"] for one in of(name)), -(mean(name, "aggregate") or 0)

    rows, tried = [], []
    for name in sorted(names, key=rank):
        lost = sum(one["collapsed"] for one in of(name))
        many = f" in {lost} of {len(of(name))}" if len(of(name)) > 1 else ""
        shown = [
            "" if (value := mean(name, key)) is None else f"{value:.{places}f}"
            for key, places in COLUMNS.values()
        ]
        rows.append([name + (f" (collapsed{many})" if lost else ""), *shown])
        if "knob" in of(name)[0]:
            values = ", ".join(f"{one['value']:g}" + "*" * one["at_end"] for one in of(name))
            attacks = ", ".join(dict.fromkeys(one["attack_name"] for one in of(name)))
            tried.append([name, of(name)[0]["knob"], values, attacks])
    return {
        "methods": {"columns": ["method", *COLUMNS], "rows": rows},
        "chosen": {"columns": ["method", "knob", "chosen", "strongest attack"], "rows": tried},
    }


def smallest_difference(content: Mapping[str, Any]) -> tuple[float, float] | None:
    """Standard deviation of a method's Aggregate over seeds, pooled over methods, and the
    difference of two means from which a t-test (5 %) tells them apart; None for one seed."""
    seeds = list(content["seeds"].values())
    names = [name for name in seeds[0] if "knob" in seeds[0][name]]
    if len(seeds) < 2 or not names:
        return None
    spread = statistics.fmean(
        statistics.variance([lines[name]["aggregate"] or 0.0 for lines in seeds]) for name in names
    )
    freedom = len(names) * (len(seeds) - 1)
    return spread**0.5, float(student.ppf(0.975, freedom)) * (2 * spread / len(seeds)) ** 0.5


def page(content: Mapping[str, Any]) -> str:
    """The tables as markdown."""
    made = tables(content)
    head = f"## Leaderboard ({count_of_seeds(len(content['seeds']))}, test half)\n"
    note = "\n* the end of what was tried: the best may lie beyond.\n"
    if found := smallest_difference(content):
        note += (
            f"\nFrom seed to seed a method's Aggregate differs by {found[0]:.3f} (pooled standard "
            f"deviation): means nearer than {found[1]:.3f} cannot be told apart.\n"
        )
    return "\n".join([head, markdown(made["methods"]), markdown(made["chosen"]) + note])
