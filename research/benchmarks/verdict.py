"""How often is the verdict wrong? False alarms, power and coverage, by simulation.

    python -m research.benchmarks.verdict [--parts coverage ...] [--repeats 300]

Scores are normal; five attacks share most of their noise, as real ones do. The numbers go into
research/benchmarks/verdict.json cell by cell, the tables of the pages into
research/results/error-rates.json. Run again it goes on where it was stopped; remove a cell from
the file to count it anew.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from axolotl_unlearn.metrics import intervals, semeval, verdict
from axolotl_unlearn.metrics.results import Model, read

ATTACKS = verdict.criteria.NEEDED
#: Standard deviation of a score, to turn an AUC into a shift.
SPREAD = float(np.sqrt(0.81 + 0.09 + 0.04))
#: Sizes of clusters.
LAYOUTS = {
    "100 single": [1] * 100,
    "20 of 5": [5] * 20,
    "10 of 10": [10] * 10,
    "1 of 100, 100 single": [100] + [1] * 100,
    "5 of 20, 50 single": [20] * 5 + [1] * 50,
    "32, 16, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1": [32, 16, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1],
}


def names_of(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def normal(rng: np.random.Generator, names: np.ndarray, alike: float = 0.0) -> np.ndarray:
    """Standard normal; those of one cluster with this intraclass correlation."""
    own = rng.normal(size=int(names.max()) + 1)[names]
    return np.sqrt(alike) * own + np.sqrt(1 - alike) * rng.normal(size=len(names))


def coverage(clusters: str, intraclass: float, repeats: int, seed: int = 4) -> dict[str, Any]:
    """Share of 95 % intervals that hold the truth, and their mean width."""
    truth = {"share .3": 0.3, "mean": 0.5, "AUC .66": float(norm.cdf(0.6 / np.sqrt(2)))}
    truth["difference of means"] = 0.0
    names = names_of(LAYOUTS[clusters])
    groups = (names.tolist(), (names + 1000).tolist())
    rng = np.random.default_rng([seed, len(clusters), int(10 * intraclass)])
    held, width = Counter(), Counter()
    for _ in range(repeats):
        one, other, third = (normal(rng, names, intraclass) for _ in range(3))
        share = intervals.mean_of((one > norm.ppf(0.7)).astype(float), groups[0])
        mean = intervals.mean_of(norm.cdf(one), groups[0])
        gap = mean.minus(intervals.mean_of(norm.cdf(0.8 * one + 0.6 * third), groups[0]))
        ends = {
            "share .3": share.interval(),
            "mean": mean.interval(),
            "AUC .66": intervals.area_of(one + 0.6, other, groups).interval(),
            "difference of means": (gap.value - gap.half(), gap.value + gap.half()),
        }
        for name, (low, high) in ends.items():
            held[name] += low <= truth[name] <= high
            width[name] += high - low
    each = {name: {"coverage": held[name] / repeats, "width": width[name] / repeats}
            for name in truth}  # fmt: skip
    return {"intervals": each}


def scores(rng: np.random.Generator, hard: np.ndarray, shift: float) -> dict[str, list[float]]:
    """Losses by attack; ``hard``: what makes a text hard for every model."""
    own = 0.3 * rng.normal(size=len(hard))
    noise = {name: rng.normal(0, 0.2, len(hard)) for name in ATTACKS}
    return {name: (0.9 * hard + own + x + shift).tolist() for name, x in noise.items()}


def texts(rng: np.random.Generator, n: int, tokens: int) -> dict[str, list[Any]]:
    """What comes out of texts that were never seen."""
    runs = rng.geometric(0.65, (n, max(1, tokens // 3))).max(1).clip(max=tokens)
    return {
        "tokens": [tokens] * n,
        "strength": (runs / tokens * rng.random(n)).tolist(),
        "run": runs.tolist(),
        "greedy": rng.beta(8, 16, n).tolist(),
    }


def entry(
    rng: np.random.Generator, hard: tuple[np.ndarray, np.ndarray], name: str, shift: float = 0.0,
    names: np.ndarray | None = None, logp: np.ndarray | None = None,
    role: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A model that never saw the members, but for a ``shift`` of their losses; ``logp`` of the
    answers is that of every such model, which guesses accordingly."""
    n, m = map(len, hard)
    sides = {"member": scores(rng, hard[0], shift), "nonmember": scores(rng, hard[1], 0.0)}
    sizes = {"member": n, "nonmember": m}
    groups = {side: (np.arange(k) if names is None else names) for side, k in sizes.items()}
    logp = rng.normal(-25, 6, n).clip(max=-6) if logp is None else logp
    said = (rng.random(n) < np.exp(logp)) | (role == "original")
    cells = dict.fromkeys(semeval.CELLS, 0.95)
    rows = dict.fromkeys(semeval.CELLS, n) | dict.fromkeys(semeval.CELLS[:6], 0)
    utility = float(rng.binomial(400, 0.7)) / 400 if role != "original" else 0.7
    fine = {"n": n, "nonsense_n": n, "broken": 0.01, "nonsense": 0.0, "constant": 0.02}
    fine |= {"empty": 0.0, "refusing": 0.0, "echo": 0.0}
    alike = {"auc": 0.5, "low": 0.4, "high": 0.6, "separates": False}
    gap = {"value": 0.0, "interval": [-0.04, 0.04]}
    return {
        "name": name,
        "role": role or "candidate",
        "cells": cells,
        "n": rows | {"forget_task1_knowledge": n, "utility": 400},
        "max_gen_toks": 64,
        "intervals": {side: [0.91, 0.98] for side in semeval.SIDES},
        "utility": utility,
        "utility_chance": 0.25,
        "gate": {"threshold": 0.525, "original": 0.7},
        "collapse": {"collapsed": False, **fine, "n": 6 * n, "forget": fine},
        "membership": {"blind": dict.fromkeys(verdict.criteria.BLIND, alike)},
        "learned": {"auc": 0.5, "p": float(rng.random()), "against": "retrained"},
        "distance": dict.fromkeys(semeval.SIDES, gap) if role is None else {},
        "answers": {"forget": {"n": n, "exact": said.mean(), "contained": said.mean()}},
        "likelihood": {
            **{f"{s}_loss": scores_["loss"] for s, scores_ in sides.items()},
            **{f"{s}_id": [f"{s}{i}" for i in range(k)] for s, k in sizes.items()},
            **{f"{s}_cluster": [f"{s} {i}" for i in groups[s]] for s in sizes},
            "attacks": {
                a: {s: scores_[a] for s, scores_ in sides.items()} for a in ATTACKS if a != "loss"
            },
        },
        "extraction": {
            "id": [f"q{i}" for i in range(n)],
            "document": [f"member{i}" for i in range(n)],
            **texts(rng, n, 12),
            "logp": logp.tolist(),
            "exact": said.tolist(),
            "contained": said.tolist(),
            "member": texts(rng, n, 80),
            "nonmember": texts(rng, m, 80),
        },
    }


def shift_of(area: float) -> float:
    """Loss that members have less, for this AUC."""
    return -float(np.sqrt(2) * SPREAD * norm.ppf(area))


def members(
    clusters: str, intraclass: float, auc: float, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """The criterion *Members told*, alone and beside a retrained model."""
    names = names_of(TEXTS[clusters])
    rng = np.random.default_rng([seed, len(names), int(10 * intraclass), int(100 * auc)])
    counts: Counter[str] = Counter()
    for _ in range(repeats):
        hard = normal(rng, names, intraclass), normal(rng, names, intraclass)
        own = read(Model, entry(rng, hard, "model", shift_of(auc), names))
        other = read(Model, entry(rng, hard, "retrained", 0.0, names, role="retrained"))
        for against, target in (("alone", None), ("paired", other)):
            (one,) = verdict.judge(own, None, target, asks=["membership"]).findings
            counts[f"{against}, {one.outcome}"] += 1
    return rates(counts, repeats)


def whole(documents: int, guessable: float, repeats: int, seed: int = 1) -> dict[str, Any]:
    """The whole verdict on a model that is like a retrained one, and on one in which documents of
    the original stand again; a share of the questions can be guessed (one time in three)."""
    n = documents
    rng = np.random.default_rng([seed, n, int(10 * guessable)])
    counts: Counter[str] = Counter()
    for _ in range(repeats):
        hard = rng.normal(size=n), rng.normal(size=n)
        logp = rng.normal(-25, 6, n).clip(max=-12)
        logp[: int(guessable * n)] = np.log(1 / 3)
        original = entry(rng, hard, "original", -1.5, role="original")
        retrained = entry(rng, hard, "retrained", logp=logp, role="retrained")
        own = entry(rng, hard, "model", logp=logp)
        for kind, target in (("paired", retrained), ("alone", None)):
            one = own | ({"distance": {}} if target is None else {})
            if target is None:
                one["learned"] = own["learned"] | {"against": "chance"}
            counts[f"{kind}, {verdict.judge(one, original, target).outcome}"] += 1
        k = int(rng.choice([1, 3, 8]))
        for place in rng.permutation(n)[:k]:
            for name in ("exact", "contained"):
                own["extraction"][name][place] = True
        share = float(np.mean(own["extraction"]["exact"]))
        own["answers"] = {"forget": {"n": n, "exact": share, "contained": share}}
        counts[f"put back, {verdict.judge(own, original, retrained).outcome}"] += 1
    return rates(counts, repeats)


def rates(counts: Counter[str], repeats: int) -> dict[str, float]:
    return {key: count / repeats for key, count in sorted(counts.items())}


#: Sizes of clusters of each side, for `members`.
TEXTS = {f"{n} single": [1] * n for n in (20, 50, 100, 150, 300)}
TEXTS |= {"50 of 4": [4] * 50, "10 of 20": [20] * 10, "1 of 60, 60 single": [60] + [1] * 60}
#: Part -> what counts one cell, and the cells.
PARTS = {
    "coverage": (
        coverage,
        [{"clusters": layout, "intraclass": alike}
         for layout in LAYOUTS for alike in (0.0, 0.1, 0.5, 1.0)],
    ),
    "members": (
        members,
        [{"clusters": layout, "intraclass": alike, "auc": area}
         for layout, sizes in TEXTS.items()
         for alike in ((0.0,) if max(sizes) == 1 else (0.1, 0.3))
         for area in (0.5, 0.6, 0.7, 0.8)],
    ),
    "whole": (
        whole,
        [{"documents": n, "guessable": share}
         for share in (0.0, 0.1) for n in (40, 60, 80, 100, 150, 200)],
    ),
}  # fmt: skip


def tables(report: dict[str, Any]) -> dict[str, Any]:
    """The tables of the pages, as text."""

    def table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
        return {"columns": columns, "rows": rows}

    def rate(one: dict[str, Any], key: str) -> str:
        return f"{one.get(key, 0.0):.2f}"

    kinds = list(report["coverage"][0]["intervals"])
    whole = [f"{a}, {b}" for a in ("paired", "alone") for b in ("shown", "refused")]

    def of(part: str, *keys: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
        """The cells that differ in their last fact alone."""
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for one in report[part]:
            groups.setdefault(tuple(f"{one[key]}" for key in keys), []).append(one)
        return groups

    def told(cells: list[dict[str, Any]], against: str) -> list[str]:
        return [
            ", ".join(rate(one, f"{against}, fail") for one in cells),
            rate(cells[0], f"{against}, pass"),
        ]

    return {
        "coverage": table(
            ["clusters", *kinds],
            [[*name, *(", ".join(f"{one['intervals'][kind]['coverage']:.2f}" for one in cells)
                       for kind in kinds)] for name, cells in of("coverage", "clusters").items()],
        ),
        "members": table(
            ["texts of each kind", "intraclass correlation", "beside retrained: told", "same",
             "alone: told", "same (alone)"],
            [[*name, *told(cells, "paired"), *told(cells, "alone")]
             for name, cells in of("members", "clusters", "intraclass").items()],
        ),
        "whole": table(
            ["documents", "questions that can be guessed", "beside retrained: good", "refused",
             "alone: good", "refused (alone)", "answers put back: good",
             "refused (put back)"],
            [[str(one["documents"]), f"{one['guessable']:.0%}", *(rate(one, key) for key in whole),
              rate(one, "put back, shown"), rate(one, "put back, refused")]
             for one in report["whole"]],
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("research/benchmarks/verdict.json"))
    parser.add_argument("--tables", type=Path, default=Path("research/results/error-rates.json"))
    options = parser.parse_args()
    report = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for part in options.parts:
        count, cells = PARTS[part]
        found = {json.dumps(cell): None for cell in cells}
        for one in report.get(part, []):
            key = json.dumps({name: one.get(name) for name in cells[0]})
            if one["repeats"] >= options.repeats and key in found:
                found[key] = one
        for cell in cells:
            if found[json.dumps(cell)] is None:
                started = time.perf_counter()
                made = cell | {"repeats": options.repeats} | count(**cell, repeats=options.repeats)
                found[json.dumps(cell)] = made
                print(f"{part} {time.perf_counter() - started:.0f} s", made, flush=True)
                report[part] = [one for one in found.values() if one is not None]
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if set(PARTS) <= set(report):
        shown = {"as_printed_in": "research/benchmarks/verdict.json", "tables": tables(report)}
        options.tables.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
