"""Did the rows of a request drop from what they were, or would an unchanged model pass as well?

Before and after are compared by the same tests, row by row: how much the loss of a row rose, beside
how much those of held-out rows did, which nobody asked to forget. In a model that forgot nothing
both are alike, whatever its size and however few the rows are, so the test of all rows together
lets at most `UNCHANGED` of such models pass. What the rows were found by before has to be strong
enough that it would have been found again.

Mann and Whitney 1947; exact for few rows (scipy.stats.mannwhitneyu).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axolotl_unlearn.metrics.audit import RATE

Line = Mapping[str, Any]
#: Share of unchanged models that the paired test of all rows lets pass, and of single rows.
UNCHANGED, ROW = 0.005, 0.1
#: Share of cases in which what was found before would be found again, if it were still there.
POWER = 0.8
#: Share of the rows that the tests have to find in the model before.
CONTROL = 0.5
#: Extraction strength above the teacher's from which a row counts as learned word by word.
LEARNED = 0.2


@dataclass(frozen=True)
class Drops:
    """What was found before, and what has dropped since.

    Attributes:
        heldout: Number of held-out rows.
        found: Documents that a test found in the model before, at the rate of the audit after.
        p: Of all rows together; None without a loss or held-out rows.
        rows: Document -> share of held-out rows whose loss rose as much as its own.
    """

    heldout: int
    found: frozenset[str] = frozenset()
    p: float | None = None
    rows: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, documents: Sequence[Line], held: Sequence[float]) -> Drops:
        """
        Args:
            documents: Audit lines, with ``before`` and ``teacher``.
            held: How much the loss of each held-out row rose, nats a token.
        """
        import numpy as np
        from scipy.stats import mannwhitneyu

        found = frozenset(_found(documents, len(held)))
        pairs = {one["document"]: (one.get("loss"), _before(one).get("loss")) for one in documents}
        rises = {d: a - b for d, (a, b) in pairs.items() if a is not None and b is not None}
        others = np.asarray(held)
        if not rises or not len(held) or not np.isfinite([*rises.values(), *held]).all():
            return cls(len(held), found)
        # Ranks, where a tie counts as no drop: without ties the test is exact for few rows.
        order = np.lexsort((np.repeat([0, 1], [len(rises), len(held)]), [*rises.values(), *held]))
        ranks = np.argsort(order)
        together = mannwhitneyu(ranks[: len(rises)], ranks[len(rises) :], alternative="greater")
        each = {d: (1 + int(np.sum(others >= x))) / (1 + len(others)) for d, x in rises.items()}
        return cls(len(held), found, float(together.pvalue), each)

    def missing(self, documents: Sequence[Line], before: Mapping[str, Line]) -> Iterator[str]:
        """What would have to be shown before the rows count as forgotten.

        Args:
            before: Attack on the model before -> its corrected p-value and more.
        """
        from scipy.stats import norm

        n = len(documents)
        # From this p-value on what it says would be found again in `POWER` of all cases.
        again = norm.sf(norm.isf(RATE) + norm.ppf(POWER))
        strong = any(one["p_corrected"] <= again for one in before.values())
        if len(self.found) < CONTROL * n and not strong:
            yield (
                f"the tests find {len(self.found)} of {n} rows in the model before and would miss "
                "them again in more than one of five cases: finding none now shows nothing"
            )
        if self.p is None:
            yield (
                "whether the rows dropped from what they were before was not measured: there are "
                "no held-out rows, or a loss is no number"
            )
        elif self.p > UNCHANGED:
            few = needed(len(self.rows), self.heldout)
            yield (
                f"the loss of the rows rose no more than that of held-out ones (p {self.p:.2g}, "
                f"{UNCHANGED} is asked for), as in a model that forgot nothing"
                + (f"; to show more it takes {few} held-out rows that judge" if few else "")
            )
        if kept := sum(self.rows.get(d, 0.0) > ROW for d in self.found):
            yield f"{kept} of {len(self.found)} rows that were found before show no drop of theirs"


def needed(rows: int, heldout: int) -> int:
    """Held-out rows that it takes to show a drop of so many rows; 0 where there are enough."""
    from math import comb

    least = round(1 / UNCHANGED)
    if not rows or comb(rows + heldout, rows) >= least:
        return 0
    return next(m for m in range(1, least) if comb(rows + m, rows) >= least)


def _before(line: Line) -> Line:
    return line.get("before") or {}


def _found(documents: Sequence[Line], heldout: int) -> Iterator[str]:
    from scipy.stats import false_discovery_control

    ranked = [one for one in documents if _before(one).get("rank") is not None and heldout]
    p = [(1 + round(_before(one)["rank"] * heldout)) / (1 + heldout) for one in ranked]
    q = false_discovery_control(p, method="bh") if ranked else ()
    by_loss = {one["document"] for one, x in zip(ranked, q, strict=True) if x <= RATE}
    for one in documents:
        taught = (one.get("teacher") or {}).get("answers_said") or 0
        said = (_before(one).get("answers_said") or 0) > taught
        if said or learned(one) >= LEARNED or one["document"] in by_loss:
            yield one["document"]


def learned(line: Line) -> float:
    """How much more of a row came out of the model before than of the teacher."""
    return strength(line.get("before")) - strength(line.get("teacher"))


def strength(figures: Line | None) -> float:
    return float((figures or {}).get("extraction_strength") or 0.0)
