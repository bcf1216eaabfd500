"""When to stop forgetting: as soon as no attack can tell forget documents from unseen ones."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from numpy.typing import NDArray

from axolotl_unlearn.metrics.statistics import auc

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
    found = {}
    for name in sorted(attacks):
        parts = [(forget[g][name], heldout[g][name]) for g in groups]
        total = sum(len(members) for members, _ in parts)
        found[name] = sum(len(m) * auc(m, n) for m, n in parts) / total
    return found


@dataclass
class Stopping:
    """The rule; a pure function of what is watched.

    Two-sided: documents that stand out by a high loss are told apart like those that are
    recognised. Retained rows come first: a state that has lost them is never the best.

    Attributes:
        margin: ``|AUC - .5|`` that counts as "cannot be told", for the strongest attack.
        tolerance: How far the mean loss of retained rows may lie above that of the start, nats.
        patience: Watches in a row that must be within both.
    """

    margin: float = 0.05
    tolerance: float = 0.1
    patience: int = 2
    start: float | None = None
    best: tuple[float, float] = (float("inf"), float("inf"))
    best_step: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    _within: int = 0

    def see(self, step: int, aucs: Mapping[str, float], retain_loss: float) -> tuple[bool, bool]:
        """Is this the best state so far, and may the run end?

        Args:
            aucs: By attack, of forget against held-out documents.
            retain_loss: Mean loss of retained rows, nats a token. The first call is the start.
        """
        if self.start is None:
            self.start = retain_loss
        strongest = max(abs(value - 0.5) for value in aucs.values())
        lost = max(0.0, retain_loss - self.start - self.tolerance)
        self.history.append({"step": step, **aucs, "retain_loss": retain_loss})
        better = (lost, strongest) < self.best
        if better:
            self.best, self.best_step = (lost, strongest), step
        self._within = self._within + 1 if strongest <= self.margin and not lost else 0
        return better, self._within >= self.patience
