"""Whole next-token distributions of policy and reference: KL, UNDIAL, CE-U."""

from __future__ import annotations

from torch import Tensor

from axolotl_unlearn.engine.needs import HEAD, Found, Needs
from axolotl_unlearn.engine.views.base import View
from axolotl_unlearn.objectives import Terms


class Distributions(View):
    """The objective is called chunk by chunk where the logits are formed.

    Of the reference it needs the hidden states at the head, from which the exact distribution
    follows (D numbers a position instead of V).
    """

    def of_reference(self) -> Needs:
        return Needs(states={HEAD: self.positions})

    weighed_at_head = True

    def of_policy(self, reference: Found | None, factor: Tensor) -> Needs:
        return Needs(valuations=(self.valuation(factor, reference=reference),))

    def terms(self, policy: Found, reference: Found | None) -> Terms:
        values = policy.values[self.entry.name]
        return Terms(values, {self.entry.objective.name: values})
