"""Is DeLong's standard error right for a trained attack? Where there is nothing to tell.

    python -m research.benchmarks.learned_spread   # > research/results/learned-spread.json, two minutes

Two made-up models that saw neither side (their losses at a text have half in common) are attacked
by the learned attack of the notebook page never-seen, again and again. The true spread of the difference of
their AUC is set beside the standard error that DeLong gives for out-of-fold scores, and beside that
of permutations of the labels (`learned_spread`, of the first data sets).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.membership import auc_equivalence
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.store import versions
from research.analysis.attacked import Facts, learned_scores, learned_spread

OUT = Path(__file__).resolve().parents[1] / "results" / "learned-spread.json"
TOKENS, DIVISIONS = 40, 4
#: Members, others, data sets.
SIZES = ((40, 120, 100), (80, 160, 100))
PERMUTED = 3


def pair(members: int, others: int, rng: np.random.Generator) -> tuple[Facts, Facts]:
    models: tuple[list[TokenFacts], list[TokenFacts]] = ([], [])
    for _ in range(members + others):
        common = rng.normal(0, 1, TOKENS) + rng.normal(0, 0.7)
        for model in models:
            own = rng.normal(0, 0.6, TOKENS) + rng.normal(0, 0.3)
            mean = rng.normal(-2.0, 0.3, TOKENS)
            sd = np.abs(rng.normal(1.5, 0.2, TOKENS))
            logp = -np.exp(0.7 * (common + own))
            model.append(TokenFacts(logp, np.zeros(TOKENS, bool), mean, sd))
    first, second = ((texts[:members], texts[members:]) for texts in models)
    return first, second


def measured(members: int, others: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    gaps, errors, permuted, missed = [], [], [], 0
    for number in range(repeats):
        both = pair(members, others, rng)
        scores = [learned_scores(*side, divisions=DIVISIONS) for side in both]
        gap = auc_equivalence(*scores)
        gaps.append(gap.value)
        errors.append((gap.high - gap.low) / 2 / 1.645)
        missed += not gap.low <= 0 <= gap.high
        if number < PERMUTED:
            permuted.append(learned_spread(*both))
    return {
        "members": members,
        "others": others,
        "data_sets": repeats,
        "spread": round(float(np.std(gaps, ddof=1)), 4),
        "delong": round(float(np.mean(errors)), 4),
        "permuted": round(float(np.mean(permuted)), 4),
        "zero_left_out": missed / repeats,
    }


def main() -> None:
    rows = [measured(*sizes) for sizes in SIZES]
    columns = ["members, others", "true spread", "DeLong", "permuted", "90 % interval without 0"]
    figures = ("spread", "delong", "permuted")
    shown = [
        [
            f"{row['members']}, {row['others']}",
            *(f"{row[name]:.3f}" for name in figures),
            f"{row['zero_left_out']:.0%}",
        ]
        for row in rows
    ]
    table = {"spread": {"columns": columns, "rows": shown}}
    write_json(OUT, {"versions": versions(), "rows": rows, "tables": table})


if __name__ == "__main__":
    main()
