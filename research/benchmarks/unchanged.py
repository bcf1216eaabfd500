"""How often is a model *shown* that forgot nothing, and how often one that forgot all?

Losses are drawn: those of held-out rows from N(0, 1), those of rows that the model learned from
N(-depth, 1); after the request those of an unchanged model once more, correlated with the first
ones, and those of a model that never saw the rows from N(0, 1). The verdict is that of
`requests.verdict` on these losses alone: nothing else speaks for or against the model, so each
figure is the most that the verdict lets through.

    python -m research.benchmarks.unchanged       # writes unchanged.json beside it, six minutes
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import false_discovery_control, mannwhitneyu

from axolotl_unlearn.metrics.audit import RATE
from axolotl_unlearn.requests.verdict import Drops

ROWS, HELDOUT = (5, 10, 20), (20, 50, 100)
DEPTHS, ALIKE = (1.0, 2.0, 3.0), (0.0, 0.9)
DRAWS, SEED = 2000, 3
#: Attacks of a verdict, which are corrected for together.
ATTACKS = 7


def _p(rows: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, float]:
    """Of each row, and of all together: is the loss too low?"""
    each = (1 + (held[None] <= rows[:, None]).sum(1)) / (1 + len(held))
    return each, float(mannwhitneyu(rows, held, alternative="less").pvalue)


def draw(generator, n: int, m: int, depth: float, alike: float, forgot: bool) -> bool:
    """Is it shown?"""
    own, held = generator.normal(size=(2, n)), generator.normal(size=(2, m))
    rest = np.sqrt(1 - alike**2)
    own[1], held[1] = (alike * one[0] + rest * one[1] for one in (own, held))
    own[0] -= depth
    own[1] -= 0 if forgot else depth
    _, all_before = _p(own[0], held[0])
    after, all_after = _p(own[1], held[1])
    told = (false_discovery_control(after, method="bh") <= RATE).any()
    refused = bool(told) or all_after * ATTACKS <= RATE
    # What the verdict demands least: no attack but the loss, corrected for none.
    attacks = {"loss": {"p_corrected": all_before}}
    ranks = [float((held[0] < x).mean()) for x in own[0]]
    lines = [
        {"document": str(i), "loss": a, "p": 0.5, "before": {"loss": b, "rank": r}}
        for i, (a, b, r) in enumerate(zip(own[1], own[0], ranks, strict=True))
    ]
    missing = list(Drops.of(lines, (held[1] - held[0]).tolist()).missing(lines, attacks))
    return not refused and not missing


def measure() -> dict:
    rows = []
    for n, m, depth, alike in product(ROWS, HELDOUT, DEPTHS, ALIKE):
        generator = np.random.default_rng([SEED, n, m, int(10 * depth), int(100 * alike)])
        cell = {"rows": n, "heldout": m, "depth": depth, "alike": alike}
        for name, draws in (("unchanged", DRAWS), ("forgot", DRAWS // 10)):
            shown = [draw(generator, n, m, depth, alike, name == "forgot") for _ in range(draws)]
            cell[name] = round(float(np.mean(shown)), 4)
        rows.append(cell)
    worst = {f"{n} rows": max(r["unchanged"] for r in rows if r["rows"] == n) for n in ROWS}
    command = "python -m research.benchmarks.unchanged"
    return {"command": command, "draws": DRAWS, "worst": worst, "rows": rows}


def main() -> None:
    made = measure()
    rows = ",\n  ".join(json.dumps(row) for row in made.pop("rows"))
    text = json.dumps(made, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'
    Path(__file__).with_suffix(".json").write_text(text, "utf-8")
    print(json.dumps(made["worst"], indent=1))


if __name__ == "__main__":
    main()
