"""When to stop forgetting: as soon as no attack can tell forget documents from unseen ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from numpy.typing import NDArray

from axolotl_unlearn.metrics.intervals import auc
from axolotl_unlearn.metrics.membership import told_documents

#: Group of documents -> attack -> one score a document, high = rather a member.
Scores = Mapping[Hashable, Mapping[str, NDArray]]


def attack_aucs(forget: Scores, heldout: Scores) -> dict[str, float]:
    """AUC of each attack over all documents, comparing only within a group.

    Documents of different kinds have different losses whether they were seen or not; pooled, that
    would hide a small shift within each kind. Groups count by their forget documents; one without
    held-out documents is left out.
    """
    groups = [group for group in forget if group in heldout]
    attacks = {name for group in groups for name in forget[group]}
    aucs = {}
    for name in sorted(attacks):
        parts = [(forget[g][name], heldout[g][name]) for g in groups]
        total = sum(len(members) for members, _ in parts)
        aucs[name] = sum(len(m) * auc(m, n) for m, n in parts) / total
    return aucs


def told_apart(forget: Scores, heldout: Scores) -> int:
    """How many forget documents are told by themselves from the held-out ones of their group."""
    groups = [group for group in forget if group in heldout]
    return sum(int(told_documents(forget[g], heldout[g]).told.sum()) for g in groups)


def sampling_error(forget: Scores, heldout: Scores) -> float:
    """Standard error of the AUC where both are alike, sqrt((n + m + 1) / (12 n m)), of all groups.

    (Mann and Whitney 1947; groups count by their forget documents, as in `attack_aucs`.)
    """
    sizes = [
        (len(next(iter(forget[g].values()))), len(next(iter(heldout[g].values()))))
        for g in forget
        if g in heldout
    ]
    total = sum(n for n, _ in sizes)
    variance = sum((n / total) ** 2 * (n + m + 1) / (12 * n * m) for n, m in sizes)
    return math.sqrt(variance)


#: AUC by which the kept state may be worse than the one that attacks tell least.
WORSE = 0.2


@dataclass
class Stopping:
    """The rule; a pure function of what is watched.

    Two-sided: documents that stand out by a high loss are told apart like those that are
    recognised. Retained rows come first: a state that has lost them is never the best.

    Attributes:
        margin: ``|AUC - expected|`` that counts as "cannot be told", for the strongest attack.
        tolerance: How far the mean loss of retained rows may lie above ``start``, nats.
        said: Share of the retained rows that may no longer come out word by word.
        error: By which AUCs of so few documents differ by chance, as last seen.
        patience: Watches in a row that must be within both.
        stale: Watches in a row after the best state that end the run, once nobody is told in it and
            the strongest attack is within two margins, or errors: what comes later drifts.
        start, said_at_start: Loss and share of the model that is to be kept on retained rows; the
            first watch unless given.
    """

    margin: float = 0.05
    tolerance: float = 0.1
    patience: int = 2
    said: float = 1.0
    start: float | None = None
    said_at_start: float = 0.0
    best: tuple[float, float, float] = (float("inf"),) * 3
    best_step: int | None = None
    closest: tuple[float, int] = (float("inf"), 0)
    history: list[dict[str, float]] = field(default_factory=list)
    stale: int = 4
    error: float = 0.0
    _within: int = 0
    _worse: int = 0

    def forget_the_best(self) -> None:
        """No state so far is one to keep."""
        self.best, self.best_step = (float("inf"),) * 3, None

    def fault(self) -> str | None:
        """Why the state that is kept may be told, or None."""
        nearest, step = self.closest
        if self.best_step is None:
            return (
                "the run ended before its first look: nothing says whether attacks tell its forget "
                "documents; train longer, or look more often (`unlearn.level.every`)."
            )
        says = (
            f"the state of step {self.best_step} is kept, and an attack tells its forget documents "
            f"(AUC {self.best[2]:.2f} off its goal)"
        )
        if self.best[2] - nearest < WORSE:
            cure = "train longer, or see that the teacher and the held-out rows never saw them"
            return f"{says}: {cure}." if self.best[2] > 2 * max(self.margin, self.error) else None
        return (
            f"{says}: those that forgot more, as at step {step} "
            f"({nearest:.2f}), had lost retained rows (`unlearn.level.retain` allows "
            f"{self.tolerance:g} nats above {self.start:.2f}). Allow more, or train longer at a "
            "lower learning rate."
        )

    def see(
        self,
        step: int,
        aucs: Mapping[str, float],
        retain_loss: float,
        expected: Mapping[str, float] | None = None,
        *,
        said: float = 0.0,
        told: int = 0,
        error: float = 0.0,
    ) -> tuple[bool, bool]:
        """Is this the best state so far, and may the run end?

        Args:
            aucs: By attack, of forget against held-out documents.
            retain_loss: Mean loss of retained rows, nats a token. The first call is the start.
            expected: The AUC of an attack if nothing had been seen, where known (else .5): the
                forget documents may be harder than the held-out ones, or easier.
            said: Share of retained rows that come out word by word.
            told: Forget documents that are told by themselves.
            error: What an AUC may differ from that by chance, where that is more than the margin.
        """
        if self.start is None:
            self.start, self.said_at_start = retain_loss, said
        goal, self.error = expected or {}, error
        strongest = max(abs(value - goal.get(name, 0.5)) for name, value in aucs.items())
        lost = max(0.0, retain_loss - self.start - self.tolerance)
        lost += max(0.0, self.said_at_start - said - self.said)
        seen = {"step": step, **aucs, "retain_loss": retain_loss, "retain_said": said}
        self.history.append(
            seen
            | ({"told": told} if told else {})
            | ({"expected": dict(expected)} if expected else {})
        )
        better = (lost, told, strongest) < self.best
        self._worse = 0 if better else self._worse + 1
        if better:
            self.best, self.best_step = (lost, told, strongest), step
        if step:
            self.closest = min(self.closest, (strongest, step))
        within = strongest <= max(self.margin, error) and not lost and not told
        self._within = self._within + 1 if within else 0
        return better, self._within >= self.patience or self.stalled

    @property
    def stalled(self) -> bool:
        """Whether the run may end with what it has."""
        lost, told, strongest = self.best
        enough = not lost and not told and strongest <= 2 * max(self.margin, self.error)
        return self._worse >= self.stale and enough
