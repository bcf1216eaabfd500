"""Log-probs of the labels, the cheap and common case: NPO and its kin, NLL."""

from __future__ import annotations

from axolotl_unlearn.engine.needs import Found, Needs
from axolotl_unlearn.engine.views.base import View
from axolotl_unlearn.objectives import LabelScores, Terms


class Labels(View):
    """Calls the objective once, with the label log-probs of all its rows."""

    def of_reference(self) -> Needs:
        return Needs(labels=self.positions)

    def of_policy(self, reference: Found | None) -> Needs:
        return Needs(labels=self.positions)

    def terms(self, policy: Found, reference: Found | None) -> Terms:
        rows = self.positions.any(-1).nonzero()[:, 0]
        if len(rows) == 0:
            return Terms(policy.logp.sum() * 0.0)
        mask = self.positions[rows]
        scores = LabelScores(
            logp=policy.logp[rows] * mask,
            mask=mask,
            ref_logp=None if reference is None else reference.logp[rows] * mask,
        )
        return self.entry.objective.function(scores, **self.entry.args.parameters)
