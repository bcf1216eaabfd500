"""How often is a model *shown* that forgot nothing, and how often one that forgot all?

Losses are drawn: those of held-out rows from N(0, 1), those of rows that the model learned from
N(-depth, 1); after the request those of an unchanged model once more, correlated with the first
ones, and those of a model that never saw the rows from N(0, 1). The verdict is that of
`requests.verdict` on these losses alone: nothing else speaks for or against the model, so each
figure is the most that the verdict lets through. `before` is the rule up to version 0.2.

    python -m research.benchmarks.unchanged       # writes unchanged.json beside it, a minute
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scipy.stats import false_discovery_control, mannwhitneyu

from axolotl_unlearn.metrics.audit import RATE
from axolotl_unlearn.requests.verdict import CONTROL, Drops

ROWS, HELDOUT = (5, 10, 20), (20, 50, 100)
DEPTHS, ALIKE = (1.0, 2.0, 3.0), (0.0, 0.9)
DRAWS, SEED = 2000, 3
#: Attacks of a verdict, which are corrected for together.
ATTACKS = 7


def _p(rows: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, float]:
    """Of each row, and of all together: is the loss too low?"""
    each = (1 + (held[None] <= rows[:, None]).sum(1)) / (1 + len(held))
    return each, float(mannwhitneyu(rows, held, alternative="less").pvalue)


def draw(generator, n: int, m: int, depth: float, alike: float, forgot: bool) -> tuple[bool, bool]:
    """Is it shown, by the rule now and by the rule before?"""
    own, held = generator.normal(size=(2, n)), generator.normal(size=(2, m))
    rest = np.sqrt(1 - alike**2)
    own[1], held[1] = (alike * one[0] + rest * one[1] for one in (own, held))
    own[0] -= depth
    own[1] -= 0 if forgot else depth
    before, all_before = _p(own[0], held[0])
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
    found = sum(rank <= 0.05 for rank in ranks) >= CONTROL * n or all_before < 0.05
    return not refused and not missing, not refused and found


def measure() -> dict:
    rows = []
    for n in ROWS:
        for m in HELDOUT:
            for depth in DEPTHS:
                for alike in ALIKE:
                    generator = np.random.default_rng(
                        [SEED, n, m, int(10 * depth), int(100 * alike)]
                    )
                    shown = {
                        forgot: np.mean(
                            [
                                draw(generator, n, m, depth, alike, forgot)
                                for _ in range(DRAWS // (1 + 9 * forgot))
                            ],
                            axis=0,
                        )
                        for forgot in (False, True)
                    }
                    rows.append(
                        {"rows": n, "heldout": m, "depth": depth, "alike": alike}
                        | {"unchanged": round(float(shown[False][0]), 4)}
                        | {"unchanged before": round(float(shown[False][1]), 4)}
                        | {"forgot": round(float(shown[True][0]), 3)}
                        | {"forgot before": round(float(shown[True][1]), 3)}
                    )
    worst = {
        f"{n} rows": {
            key: max(row[key] for row in rows if row["rows"] == n)
            for key in ("unchanged", "unchanged before")
        }
        for n in ROWS
    }
    return {
        "command": "python -m research.benchmarks.unchanged",
        "draws": DRAWS,
        "worst": worst,
        "rows": rows,
    }


def main() -> None:
    made = measure()
    rows = ",\n  ".join(json.dumps(row) for row in made.pop("rows"))
    text = json.dumps(made, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'
    Path(__file__).with_suffix(".json").write_text(text, "utf-8")
    print(json.dumps(made["worst"], indent=1))


if __name__ == "__main__":
    main()
