"""Log-probs of the labels, the cheap and common case: NPO and its kin, NLL."""

from __future__ import annotations

from torch import Tensor

from axolotl_unlearn.engine.needs import Found, Needs
from axolotl_unlearn.engine.views.base import View
from axolotl_unlearn.objectives import LabelScores, Terms


class Labels(View):
    """Calls the objective once, with the label log-probs of all its rows.

    Where a value is a constant times a label's log-prob (NLL), it is left to the head, where its
    gradient is formed together with those of others.
    """

    @property
    def slope(self) -> float | None:
        """That constant."""
        slope = self.entry.objective.slope
        return None if slope is None else slope(self.entry.args.parameters)

    @property
    def weighed_at_head(self) -> bool:
        return self.slope is not None

    def of_reference(self) -> Needs:
        return Needs(labels=self.positions)

    def of_policy(self, reference: Found | None, factor: Tensor) -> Needs:
        if self.weighed_at_head:
            return Needs(valuations=(self.valuation(factor, slope=self.slope),))
        return Needs(labels=self.positions)

    def terms(self, policy: Found, reference: Found | None) -> Terms:
        if self.weighed_at_head:
            return Terms(policy.values[self.entry.name])
        rows = self.positions.any(-1).nonzero()[:, 0]
        if len(rows) == 0:
            return Terms(policy.zero)
        mask = self.positions[rows]
        scores = LabelScores(
            logp=policy.logp[rows] * mask,
            mask=mask,
            ref_logp=None if reference is None else reference.logp[rows] * mask,
        )
        return self.entry.objective.function(scores, **self.entry.args.parameters)
