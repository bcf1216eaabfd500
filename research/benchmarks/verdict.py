"""How often is the verdict wrong? False alarms, power and coverage, by simulation.

    python -m research.benchmarks.verdict [--parts coverage ...] [--repeats 1000]

Scores are normal; five attacks share most of their noise, as real ones do. "told" is a false alarm
where no difference was made; "good" is one where the difference is as large as the margin: of the
criteria that read scores, the others are not asked. The numbers go into
research/benchmarks/verdict.json, the tables of the pages into research/results/error-rates.json.
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

from axolotl_unlearn.metrics import intervals, learned, membership, verdict
from axolotl_unlearn.metrics.intervals import Area, Mean
from axolotl_unlearn.metrics.relative import relative_test
from research.probes import canaries_metrics as canaries

SIZES = (20, 50, 100, 150, 300)
ATTACKS = verdict.attacks.NEEDED
#: Criteria of the verdict that read the scores of members and non-members.
SCORED = ("told", "scores", "same")


def normal(rng: np.random.Generator, n: int, rows: int = 1, alike: float = 0.0) -> np.ndarray:
    """``[n]`` standard normal; groups of ``rows`` with this intraclass correlation."""
    group = np.repeat(rng.normal(0, 1, n // rows), rows)
    return np.sqrt(alike) * group + np.sqrt(1 - alike) * rng.normal(0, 1, n)


def scores(
    rng: np.random.Generator,
    n: int,
    shift: float,
    shared: np.ndarray | None = None,
    rows: int = 1,
    alike: float = 0.0,
):
    """Losses by attack of n texts; ``shared``: what makes a text hard for every model."""
    hard = normal(rng, n, rows, alike) if shared is None else shared
    own = 0.3 * normal(rng, n, rows, alike)
    return {name: 0.9 * hard + own + rng.normal(0, 0.2, n) + shift for name in ATTACKS}


#: Standard deviation of a score, to turn an AUC into a shift.
SPREAD = float(np.sqrt(0.81 + 0.09 + 0.04))


def shift_of(area: float) -> float:
    """Loss that members have less, for this AUC."""
    return float(np.sqrt(2) * SPREAD * norm.ppf(area))


def entry(members, others, name="model", rows: int = 1, against="chance") -> dict[str, Any]:
    """``rows`` of one author each are named as such; 1 calls every text independent."""
    side = {"member": members, "nonmember": others}
    names = {
        f"{s}_{kind}": [f"{s} {i // by}" for i in range(len(v["loss"]))]
        for s, v in side.items()
        for kind, by in (("id", 1), ("cluster", rows))
    }
    return {
        "name": name,
        "role": "retrained" if name == "retrained" else "candidate",
        "likelihood": {
            **{f"{s}_loss": list(v["loss"]) for s, v in side.items()},
            **names,
            "attacks": {
                a: {s: list(v[a]) for s, v in side.items()} for a in ATTACKS if a != "loss"
            },
        },
        "learned": {"auc": 0.5, "p": 1.0, "against": against},
    }


TOLD = ("over-forgets", "under-forgets", "recognisable")
#: Judged alone or beside a retrained model, that one's AUC, the model's.
CASES = (
    *(("alone", 0.5, a) for a in (0.5, 0.6, 0.7, 0.8)),
    *(("retrained", 0.5, a) for a in (0.5, 0.55, 0.6)),
    ("retrained", 0.67, 0.67),
)


def judged(repeats: int, seed: int = 0) -> list[dict[str, Any]]:
    """Statuses by n and AUC, alone and beside a retrained model (whose own AUC may be off .5)."""
    found = []
    for n in SIZES:
        for kind, target, area in CASES:
            rng = np.random.default_rng([seed, n, int(100 * area), int(100 * target), len(kind)])
            counts: Counter[str] = Counter()
            for _ in range(repeats):
                hard = rng.normal(0, 1, n), rng.normal(0, 1, n)
                model = entry(
                    scores(rng, n, -shift_of(area), hard[0]),
                    scores(rng, n, 0.0, hard[1]),
                    against="chance" if kind == "alone" else kind,
                )
                retrained = None
                if kind == "retrained":
                    retrained = entry(
                        scores(rng, n, -shift_of(target), hard[0]),
                        scores(rng, n, 0.0, hard[1]),
                        "retrained",
                    )
                counts[verdict.judge(model, None, retrained, asks=SCORED).status] += 1
            told = sum(counts[s] for s in TOLD) / repeats
            found.append(
                {
                    "n": n,
                    "against": kind,
                    "target_auc": target,
                    "auc": area,
                    "told": told,
                    "good": counts["good"] / repeats,
                    "not_enough": counts["not enough texts"] / repeats,
                    "repeats": repeats,
                }
            )
            print(found[-1], flush=True)
    return found


#: Texts of one author, and how alike they are: TOFU has 20.
CLUSTERS = ((20, 0.0), (20, 0.1), (20, 0.3), (4, 0.3))


def clustered(repeats: int, seed: int = 7, n: int = 200) -> list[dict[str, Any]]:
    """Statuses of 200 texts of each kind that come in clusters, judged by rows and by clusters."""
    found = []
    for rows, alike in CLUSTERS:
        for kind, area in (("alone", 0.5), ("alone", 0.6), ("retrained", 0.5), ("retrained", 0.6)):
            rng = np.random.default_rng([seed, rows, int(10 * alike), int(10 * area), len(kind)])
            counts: Counter[tuple[str, str]] = Counter()
            against = "chance" if kind == "alone" else kind
            for _ in range(repeats):
                hard = [normal(rng, n, rows, alike) for _ in range(2)]
                shifts = (-shift_of(area), 0.0)
                own, other = (
                    [scores(rng, n, s, h, rows, alike) for s, h in zip(each, hard, strict=True)]
                    for each in (shifts, (0.0, 0.0))
                )
                for by, size in (("rows", 1), ("clusters", rows)):
                    model = entry(*own, rows=size, against=against)
                    target = entry(*other, "retrained", size) if kind == "retrained" else None
                    status = verdict.judge(model, None, target, asks=SCORED).status
                    counts[by, "told"] += status in TOLD
                    counts[by, "good"] += status == "good"
            found.append(
                {"clusters": n // rows, "rows": rows, "intraclass": alike, "against": kind,
                 "auc": area, "repeats": repeats}
                | {f"{by}: {what}": count / repeats for (by, what), count in sorted(counts.items())}
            )  # fmt: skip
            print(found[-1], flush=True)
    return found


def recited(repeats: int, seed: int = 8) -> list[dict[str, Any]]:
    """k of N documents come out word for word, all others as of a retrained model."""
    found = []
    for documents in (100, 150, 400):
        for count in (0, 1, 5, 10):
            for kind in ("alone", "retrained"):
                rng = np.random.default_rng([seed, documents, count, len(kind)])
                hits = 0
                for _ in range(repeats):
                    one, other = (rng.beta(1, 12, documents) for _ in range(2))
                    one[:count] = 1.0
                    both = [_extraction(strength, rng) for strength in (one, other)]
                    model, target = (
                        {"name": name, "extraction": x, "likelihood": y}
                        for name, (x, y) in zip(("model", "retrained"), both, strict=True)
                    )
                    judged = verdict.judge(
                        model, None, target if kind == "retrained" else None, asks=("recited",)
                    )
                    hits += judged.findings[0].outcome == "fail"
                found.append({"documents": documents, "recited": count, "against": kind,
                              "found": hits / repeats, "repeats": repeats})  # fmt: skip
                print(found[-1], flush=True)
    return found


def _extraction(strength: np.ndarray, rng: np.random.Generator) -> tuple[dict, dict]:
    """A row a document; 50 members and non-members of the same kind of text."""
    names = [f"d{i}" for i in range(len(strength))]
    sides = {
        side: {"tokens": [60] * 50, "strength": rng.beta(1, 12, 50).tolist()}
        for side in ("member", "nonmember")
    }
    rows = {"id": names, "document": names, "tokens": [20] * len(names)}
    likelihood = {f"{side}_{kind}": [f"{side} {i}" for i in range(50)]
                  for side in sides for kind in ("id", "cluster")}  # fmt: skip
    likelihood |= {f"{side}_loss": [0.0] * 50 for side in sides}
    return {**rows, "strength": strength.tolist(), **sides}, likelihood


def relative(repeats: int, seed: int = 9) -> list[dict[str, Any]]:
    """The relative test: a candidate a share of the way from the retrained model to the one before
    (half way is the boundary), 1.5 nats apart."""
    found = []
    for n, rows, alike in ((20, 1, 0.0), (50, 1, 0.0), (150, 1, 0.0), (200, 20, 0.1)):
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            rng = np.random.default_rng([seed, n, rows, int(100 * share)])
            counts: Counter[str] = Counter()
            for _ in range(repeats):
                hard = normal(rng, n, rows, alike)
                own, before, target = (
                    np.stack(list(scores(rng, n, -1.5 * s, hard, rows, alike).values()), 1)
                    for s in (share, 1.0, 0.0)
                )
                names = (np.arange(n) // rows).tolist()
                one = relative_test(own, before, target, names)
                counts["fails"] += one.p_first < 0.05
                counts["passes"] += one.p_second < 0.05
            found.append({"n": n, "clusters": n // rows, "intraclass": alike, "share": share,
                          "repeats": repeats}
                         | {k: counts[k] / repeats for k in ("fails", "passes")})  # fmt: skip
            print(found[-1], flush=True)
    return found


def single_tests(repeats: int, seed: int = 1) -> list[dict[str, Any]]:
    """False alarms of each test by itself, and of the rules that were there before."""
    found = []
    for n, m in ((20, 20), (50, 50), (150, 150), (150, 20), (300, 300)):
        rng = np.random.default_rng([seed, n, m])
        hits: Counter[str] = Counter()
        for _ in range(repeats):
            members = {a: -v for a, v in scores(rng, n, 0.0).items()}
            others = {a: -v for a, v in scores(rng, m, 0.0).items()}
            pair = members["loss"], others["loss"]
            hits["rank test"] += membership.rank_test(*pair) < 0.05
            hits["tail test"] += membership.tail_test(*pair).p < 0.05
            each = [(members[a], others[a]) for a in members]
            tests = [p for one in each
                     for p in (membership.rank_test(*one), membership.tail_test(*one).p)]  # fmt: skip
            hits["all attacks, Holm"] += min(intervals.holm(tests)) < 0.05
            documents = membership.told_documents(members, others)
            hits["any document told"] += bool(documents.told.any())
            hits["documents with p <= .05 (share)"] += (documents.p <= 0.05).mean()
            hits["before: recognisable"] += _recognisable_before(*pair)
            low, high = membership.auc_interval(*pair)
            hits["before: called balanced"] += low <= 0.5 <= high
        found.append(
            {"n": n, "m": m, "repeats": repeats} | {k: v / repeats for k, v in hits.items()}
        )
        print(found[-1], flush=True)
    return found


def _recognisable_before(members: np.ndarray, others: np.ndarray) -> bool:
    """The rule before: binomial bound for a cut that was taken as known, both ends."""
    for sign in (1, -1):
        cut = np.sort(sign * others)[::-1][int(0.01 * len(others))]
        hits = int((sign * members > cut).sum())
        if hits and membership.share_interval(hits, len(members))[0] > 0.01:
            return True
    return False


def at_the_margin(repeats: int, seed: int = 2) -> list[dict[str, Any]]:
    """How often a model that is exactly the margin away passes the equivalence test (<= .05)."""
    found = []
    for n in SIZES:
        rng = np.random.default_rng([seed, n])
        alone = paired = inside = 0
        for _ in range(repeats):
            hard = rng.normal(0, 1, n), rng.normal(0, 1, n)
            first, second, off = (
                [-scores(rng, n, s, h)["loss"] for s, h in zip(shifts, hard, strict=True)]
                for shifts in ((0, 0), (0, 0), (-shift_of(0.6), 0))
            )
            alone += membership.auc_equivalence(tuple(off)).equivalent
            paired += membership.auc_equivalence(tuple(off), tuple(first)).equivalent
            inside += membership.auc_equivalence(tuple(second), tuple(first)).equivalent
        found.append(
            {"n": n, "repeats": repeats, "alone": alone / repeats, "paired": paired / repeats,
             "paired, no difference": inside / repeats}
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def best_of_variants(repeats: int, seed: int = 3) -> dict[str, Any]:
    """An attack with eight variants and no effect: how often is one called a finding?"""
    rng = np.random.default_rng(seed)
    now = before = 0
    for _ in range(repeats):
        figures = []
        for z in rng.normal(0, 1, 8):
            value = 0.02 * z
            p = float(2 * norm.sf(abs(z)))
            figures.append({"value": value, "low": value - 0.0392, "high": value + 0.0392, "p": p})
        rows = [{"variant": "as it is", "gain": {"recalled": dict(figures[0], value=0.0)}}]
        rows += [{"variant": str(i), "gain": {"recalled": f}} for i, f in enumerate(figures)]
        now += verdict.strongest_gain(rows)[2] < 0.05
        before += bool(max(figures, key=lambda f: f["value"])["low"] > 0)
    return {"repeats": repeats, "now": now / repeats, "before": before / repeats}


def coverage(repeats: int, resamples: int = 800, seed: int = 4) -> list[dict[str, Any]]:
    """Share of 95 % intervals that hold the truth."""
    found = []

    def add(what: str, n: int, held: int) -> None:
        found.append({"interval": what, "documents": n, "coverage": float(held) / repeats,
                      "repeats": repeats})  # fmt: skip
        print(found[-1], flush=True)

    for n in (20, 50, 150):
        for area in (0.5, 0.7, 0.9):
            rng = np.random.default_rng([seed, n, int(100 * area)])
            d, held = np.sqrt(2) * norm.ppf(area), 0
            for _ in range(repeats):
                low, high = intervals.auc_interval(rng.normal(d, 1, n), rng.normal(0, 1, n))
                held += low <= area <= high
            add(f"AUC {area}", n, held)
        rng = np.random.default_rng([seed, n, 1])
        held = 0
        for _ in range(repeats):
            text = rng.normal(0, 1, n), rng.normal(0, 1, n)
            pairs = [tuple(t + rng.normal(0, 0.5, n) for t in text) for _ in range(2)]
            gap = intervals.auc_gap(*pairs).difference
            held += gap.low <= 0 <= gap.high
        add("difference of two AUCs", n, held)
        for what, draw, truth in (
            ("mean, even values", lambda r, k: r.random(k), 0.5),
            ("mean, skewed values", lambda r, k: r.beta(0.5, 2.0, k), 0.2),
            ("share .3", lambda r, k: (r.random(k) < 0.3) * 1.0, 0.3),
            ("share .8, five rows a document", None, 0.8),
        ):
            rng = np.random.default_rng([seed, n, len(what)])
            held = 0
            for trial in range(repeats):
                if draw is None:
                    own = rng.beta(8, 2, n)
                    values = (rng.random((n, 5)) < own[:, None]).astype(float).ravel()
                    score = Mean(values, np.repeat(np.arange(n), 5).tolist())
                else:
                    score = Mean(draw(rng, n), range(n))
                low, high = intervals.mean_interval(score, n=resamples, seed=trial)
                held += low <= truth <= high
            add(what, n, held)
        rng = np.random.default_rng([seed, n, 2])
        held = Counter()
        for trial in range(repeats):
            hard = rng.normal(0, 0.2, n)
            first, second = (
                Mean(np.clip(0.5 + hard + rng.normal(0, 0.1, n), 0, 1), range(n)) for _ in range(2)
            )
            gap = intervals.paired_difference(first, second, n=resamples, seed=trial)
            held["difference of two means"] += gap.low <= 0 <= gap.high
        for what, count in held.items():
            add(what, n, count)
    return found


def composites(repeats: int, resamples: int = 500, seed: int = 4) -> list[dict[str, Any]]:
    """The same of the scores that are computed from cells, AUC and utility."""
    found = []
    for n in (20, 50, 150):
        held: Counter[str] = Counter()
        rng = np.random.default_rng([seed, n, 2])
        for trial in range(repeats):
            cells = {
                "forget_a": Mean(rng.beta(8, 2, n), [("f", i) for i in range(n)]),
                "forget_b": Mean((rng.random(n) < 0.97) * 1.0, [("f", i) for i in range(n)]),
                "retain_a": Mean(rng.beta(9, 1, n), [("r", i) for i in range(n)]),
            }
            bounds = intervals.Scores(cells).intervals(resamples, trial)
            low, high = bounds["task_aggregate"]
            held["task_aggregate of three cells"] += (
                low <= 3 / (1 / 0.8 + 1 / 0.97 + 1 / 0.9) <= high
            )
        drawn = Counter(dict.fromkeys(held, repeats))
        for shift in (0.0, 0.3, 0.8):
            for what, count in _composites(n, shift, repeats, resamples, seed).items():
                if what in ("mia_score", "aggregate"):
                    what = f"{what}, AUC {norm.cdf(shift / np.sqrt(2)):.2f}"
                held[what] += count
                drawn[what] += repeats
        for what, count in held.items():
            found.append({"interval": what, "documents": n, "coverage": count / drawn[what],
                          "repeats": drawn[what]})  # fmt: skip
            print(found[-1], flush=True)
    return found


#: Expected values of six cells a side, completions and answers in turn.
TWELVE = {"forget": (0.85, 0.97, 0.7, 0.9, 0.75, 0.95), "retain": (0.9, 0.95, 0.85, 0.9, 0.8, 0.9)}


def _composites(n: int, shift: float, repeats: int, resamples: int, seed: int) -> Counter[str]:
    """Twelve cells of n documents a task, n members and non-members, 3 n questions."""
    rng = np.random.default_rng([seed, n, int(10 * shift), 3])
    held: Counter[str] = Counter()
    sides = {f"side {name}": 6 / sum(1 / p for p in means) for name, means in TWELVE.items()}
    truth = {name.removeprefix("side "): value for name, value in sides.items()}
    truth["task_aggregate"] = 2 / sum(1 / side for side in sides.values())
    truth["mia_score"] = 2 * (1 - norm.cdf(shift / np.sqrt(2)))
    truth["aggregate"] = (truth["task_aggregate"] + truth["mia_score"] + 0.8) / 3
    for trial in range(repeats):
        cells = {}
        for side, means in TWELVE.items():
            for i, p in enumerate(means):
                drawn = rng.beta(10 * p, 10 - 10 * p, n) if i % 2 == 0 else rng.random(n) < p
                documents = [(side, i // 2, document) for document in range(n)]
                cells[f"{side}_{i}"] = Mean(drawn * 1.0, documents)
        area = Area(rng.normal(shift, 1, n), rng.normal(0, 1, n))
        utility = Mean((rng.random(3 * n) < 0.8) * 1.0, range(3 * n))
        bounds = intervals.Scores(cells, area, utility).intervals(resamples, trial)
        for name, value in truth.items():
            held[name] += bool(bounds[name][0] <= value <= bounds[name][1])
    return held


def learned_attack(repeats: int, seed: int = 5) -> list[dict[str, Any]]:
    """The learned attack: features with few causes; a difference in the spread of one of them.

    Also the test that was tried before: a rank test of the cross-validated scores.
    """
    found = []
    for n in SIZES:
        for effect in (0.0, 0.5):
            rng = np.random.default_rng([seed, n, int(10 * effect)])
            told = ranked = 0
            for _ in range(repeats):
                mix = rng.normal(0, 1, (6, 40))
                sides = []
                for size in (effect, 0.0):
                    causes = rng.standard_t(5, (n, 6))
                    causes[:, 0] += size
                    sides.append(causes @ mix + rng.normal(0, 1, (n, 40)))
                one = learned.learned_attack(*sides, permutations=399)
                told += one.p <= 0.05
                ranked += membership.rank_test(one.members, one.nonmembers, "greater") <= 0.05
            found.append(
                {"n": n, "effect": effect, "repeats": repeats, "permutation test": told / repeats,
                 "rank test of the scores": ranked / repeats}
            )  # fmt: skip
            print(found[-1], flush=True)
    return found


def canary_pairs(repeats: int, seed: int = 6, most: int = 3000) -> list[dict[str, Any]]:
    """Planted pairs: answers by the share of pairs that the attack gets right, pairs needed.

    ``most`` pairs are there; .6 is as large as the default margin.
    """
    found = []
    for margin in (0.1, 0.05):
        for share in (0.5, 0.52, 0.55, 0.6, 0.7, 0.9):
            rng = np.random.default_rng([seed, int(100 * share), int(100 * margin)])
            answers: Counter[str] = Counter()
            needed = []
            for _ in range(repeats):
                wins = (rng.random(most) < share) * 1.0
                one = canaries.certify({"loss": wins}, {"loss": np.full(most, 0.5)}, margin=margin)
                answers[one.answer] += 1
                needed.append(one.needed or most)
            found.append(
                {"margin": margin, "share": share, "repeats": repeats,
                 **{a: answers[a] / repeats for a in ("told", "certified", "open")},
                 "median_needed": float(np.median(needed)),
                 "needed_9_of_10": float(np.quantile(needed, 0.9))}
            )  # fmt: skip
            print(found[-1], flush=True)
    return found


PARTS = {
    "judged": judged,
    "clustered": clustered,
    "recited": recited,
    "relative": relative,
    "tests": single_tests,
    "margin": at_the_margin,
    "variants": best_of_variants,
    "coverage": coverage,
    "composites": composites,
    "learned": learned_attack,
    "canaries": canary_pairs,
}


def tables(report: dict[str, Any]) -> dict[str, Any]:
    """The tables of the pages, as text."""

    def table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
        return {"columns": columns, "rows": rows}

    def judged_rows(against: str, areas: list[tuple[float, float, str]]) -> list[list[str]]:
        lines = {
            (one["n"], one["target_auc"], one["auc"]): one
            for one in report["judged"]
            if one["against"] == against
        }
        return [
            [
                str(n),
                *(
                    f"{lines[n, target, area][key]:.2f}" if (n, target, area) in lines else ""
                    for target, area, key in areas
                ),
            ]
            for n in SIZES
        ]

    alone = [(0.5, 0.5, "told"), (0.5, 0.5, "good"), (0.5, 0.6, "told"), (0.5, 0.6, "good")]
    alone += [(0.5, 0.7, "told")]
    paired = [(0.5, 0.5, "told"), (0.5, 0.5, "good"), (0.5, 0.55, "told"), (0.5, 0.6, "told")]
    paired += [(0.5, 0.6, "good"), (0.67, 0.67, "told")]
    by_interval: dict[str, dict[int, float]] = {}
    for one in [*report["coverage"], *report["composites"]]:
        by_interval.setdefault(one["interval"], {})[one["documents"]] = one["coverage"]
    margins = {one["n"]: one for one in report["margin"]}
    learnt = {(one["n"], one["effect"]): one for one in report["learned"]}
    return {
        "alone": table(
            ["texts of each kind", "AUC .5: told (false alarm)", "AUC .5: good", "AUC .6: told",
             "AUC .6: good (wrong)", "AUC .7: told"],
            judged_rows("alone", alone),
        ),
        "paired": table(
            ["texts of each kind", "same: told (false alarm)", "same: good", ".05 off: told",
             ".10 off: told", ".10 off: good (wrong)", "both at .67: told (false alarm)"],
            judged_rows("retrained", paired),
        ),
        "clustered": table(
            ["clusters of rows", "intraclass correlation", "against", "AUC off by",
             "by rows: told", "by rows: good", "by clusters: told", "by clusters: good"],
            [[f"{one['clusters']} of {one['rows']}", f"{one['intraclass']:g}", one["against"],
              f"{one['auc'] - 0.5:.1f}",
              *(f"{one[f'{by}: {what}']:.3f}" for by in ("rows", "clusters")
                for what in ("told", "good"))] for one in report["clustered"]],
        ),
        "recited": table(
            ["documents", "recited", "against", "refused"],
            [[str(one["documents"]), str(one["recited"]), one["against"], f"{one['found']:.3f}"]
             for one in report["recited"]],
        ),
        "relative": table(
            ["texts", "clusters", "share of the way back", "fails", "passes"],
            [[str(one["n"]), str(one["clusters"]), f"{one['share']:g}", f"{one['fails']:.3f}",
              f"{one['passes']:.3f}"] for one in report["relative"]],
        ),
        "margin": table(
            ["texts of each kind", "against .5", "paired", "paired, no difference"],
            [[str(n), *(f"{margins[n][k]:.3f}" for k in ("alone", "paired"))]
             + [f"{margins[n]['paired, no difference']:.2f}"] for n in SIZES if n in margins],
        ),
        "coverage": table(
            ["95 % interval of", *(f"{n} documents" for n in (20, 50, 150))],
            [[name, *(f"{found[n]:.3f}" if n in found else "" for n in (20, 50, 150))]
             for name, found in by_interval.items()],
        ),
        "learned": table(
            ["texts of each kind", "no difference: permutation test", "no difference: rank test",
             "a difference: permutation test"],
            [[str(n), f"{learnt[n, 0.0]['permutation test']:.3f}",
              f"{learnt[n, 0.0]['rank test of the scores']:.3f}",
              f"{learnt[n, 0.5]['permutation test']:.2f}"] for n in SIZES if (n, 0.5) in learnt],
        ),
        "canaries": table(
            ["margin", "share of pairs told", "certified", "told", "open", "pairs needed (median)",
             "in 9 of 10"],
            [[f"{one['margin']:g}", f"{one['share']:g}",
              *(f"{one[k]:.3f}" for k in ("certified", "told", "open")),
              f"{one['median_needed']:.0f}", f"{one['needed_9_of_10']:.0f}"]
             for one in report["canaries"]],
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("research/benchmarks/verdict.json"))
    parser.add_argument("--tables", type=Path, default=Path("research/results/error-rates.json"))
    options = parser.parse_args()
    started = time.perf_counter()
    n = options.repeats
    # Parts that are not made again stay as they were.
    report = json.loads(options.out.read_text()) if options.out.is_file() else {}
    report["command"] = "python -m research.benchmarks.verdict"
    report |= {part: PARTS[part](n) for part in options.parts}
    print(f"{time.perf_counter() - started:.0f} s")
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not set(PARTS) <= set(report):
        return  # the tables need all parts
    shown = {"as_printed_in": "research/benchmarks/verdict.json", "tables": tables(report)}
    options.tables.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
