"""Views of pairs of answers, and of what tells a forgotten row from others."""

from __future__ import annotations

import torch
from torch import Tensor

from axolotl_unlearn.columns import ROLES
from axolotl_unlearn.engine.host import on_host, to_device
from axolotl_unlearn.engine.needs import ForwardResult, ForwardSpec
from axolotl_unlearn.engine.views import Entry, Labels, View
from axolotl_unlearn.objectives import Terms


class Pairs(Labels):
    """Calls the objective once, with the label log-probs of its forget rows and, in the same order,
    of their alternatives."""

    def __init__(self, entry: Entry, batch: dict[str, Tensor]) -> None:
        super().__init__(entry, batch)
        self.alternatives = on_host(self.rows) & (on_host(batch["role"]) == ROLES["alternative"])

    @property
    def units(self) -> float:
        return float(self.alternatives.sum())

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        forget, other = (
            to_device(mask.nonzero()[0], self.rows.device)
            for mask in (on_host(self.rows) & ~self.alternatives, self.alternatives)
        )
        if len(forget) == 0:
            return Terms(policy.zero)
        both = (self.scores_of(policy, reference, rows) for rows in (forget, other))
        return self.entry.objective.function(*both, **self.entry.args.parameters)


class Features(Labels):
    """Calls the objective once, with the features of each of its rows
    (`axolotl_unlearn.metrics.learned`) and what draws them towards those of held-out rows."""

    compares = True  # with held-out rows, and no model

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(labels=self.positions, moments=self.positions)

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        rows = self.rows_seen()
        features = self.features(policy, rows)
        where = reference.pull(rows, features)
        if len(rows) == 0:
            return Terms(policy.zero)
        return self.entry.objective.function(features, *where, **self.entry.args.parameters)

    def features(self, policy: ForwardResult, rows: Tensor) -> Tensor:
        """Features of rows of the batch, ``[r] -> [r, F]``."""
        from axolotl_unlearn.metrics.learned import token_features

        features = []
        for row in on_host(rows).tolist():
            where = self.positions[row]
            mean, sd = policy.moments[row, where].unbind(-1)
            features.append(token_features(policy.logp[row, where], mean, sd))
        return torch.stack(features) if features else policy.logp.new_zeros(0, 0)


class Inside(Features):
    """As `Features`, of what each row does inside the model: what the objective sees is what
    `ForwardSpec` and `ForwardResult` call it."""

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(**{self.entry.objective.sees: self.positions})

    def features(self, policy: ForwardResult, rows: Tensor) -> Tensor:
        return getattr(policy, self.entry.objective.sees)[rows]


OTHER_VIEWS: dict[str, type[View]] = {
    "pairs": Pairs,
    "features": Features,
    "profiles": Inside,
    "gradients": Inside,
}
