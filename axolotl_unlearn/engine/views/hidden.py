"""Hidden states of one decoder layer: RMU and its kin."""

from __future__ import annotations

import torch
from torch import Tensor

from axolotl_unlearn.engine.needs import Found, Needs, States
from axolotl_unlearn.engine.views.base import View
from axolotl_unlearn.objectives import Terms


class Hidden(View):
    """Calls the objective once, with the states of all its positions.

    Where nobody asks for logits the forward ends at the layer.
    """

    @property
    def layer(self) -> int:
        """Number of the decoder layer whose output is seen, from 0."""
        default = self.entry.objective.parameters["layer"].default
        return self.entry.args.parameters.get("layer", default)

    def of_reference(self) -> Needs:
        return Needs(states={self.layer: self.positions})

    def of_policy(self, reference: Found | None, factor: Tensor) -> Needs:
        return Needs(states={self.layer: self.positions})

    def terms(self, policy: Found, reference: Found | None) -> Terms:
        seen = policy.states[self.layer]
        if not bool(self.positions.any()):
            return Terms(policy.zero)
        reference_states = None if reference is None else self._own(reference.states[self.layer])
        states = self._own(seen)
        return Terms(
            self.entry.objective.function(states, reference_states, **self.entry.args.parameters)
        )

    def _own(self, states: States) -> Tensor:
        """Of all positions that were asked for, this entry's, ``[P, D]`` in at least float32."""
        values = states.at(*self.positions.nonzero(as_tuple=True))
        return values.to(torch.promote_types(values.dtype, torch.float32))
