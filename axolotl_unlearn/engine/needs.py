"""What is needed of a model about a batch, and what a forward found.

Views say what they need of the policy and of the reference in the same words, and both answer in
the same words.

Shape letters: R rows, T time, Q chosen positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import ObjectiveArgs, ReferenceArgs
from axolotl_unlearn.engine.batch import Batch, to_device
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import Objective, Terms

#: Hidden states to logits, ``[p, D] -> [p, V]``.
Head = Callable[[Tensor], Tensor]
#: Where hidden states are taken: the number of a decoder layer, or what goes into the LM head.
Layer = int | None
HEAD: Layer = None


@dataclass(frozen=True)
class Entry:
    """One line of ``forget:`` or ``retain:``: which rows, which objective, which weight.

    Attributes:
        unit: what its sum is divided by the number of: token, row or batch.
        source: what it is compared with; None if with no model.
    """

    name: str
    side: str
    args: ObjectiveArgs
    objective: Objective
    unit: str
    source: ReferenceArgs | None = None


def called(objective: Objective, *given: Any, **parameters: Any) -> Any:
    """What the function of an objective says of its arguments.

    Raises:
        UnlearnError: It is not one value a unit, or no `Terms` where they are due.
    """
    made = objective.function(*given, **parameters)
    bare = objective.sees in ("distributions", "hidden")
    dimensions = 1 if bare else {"batch": 0, "row": 1, "token": 2}[objective.unit(parameters)]
    shape = list(getattr(given[0], "logp", given[0]).shape[:dimensions])
    values = made if bare else getattr(made, "values", None)
    if isinstance(made, Terms) != bare and list(getattr(values, "shape", ())) == shape:
        return made
    what = f" of shape {list(made.shape)}" if hasattr(made, "shape") else ""
    what = what or (f" of values {list(values.shape)}" if hasattr(values, "shape") else "")
    raise UnlearnError(
        f"objective {objective.name}: its function returned {type(made).__name__}{what}; return "
        f"{'a tensor' if bare else '`Terms(values)` with values'} of shape {shape}, as in "
        "docs/add-objective.md.",
        code="objectives.result",
    )


def targets(batch: Mapping[str, Tensor]) -> NDArray:
    """Next-token targets, ``[R, T]``: position t predicts label t + 1."""
    labels = Batch.of(batch).on_host("labels")
    return np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], IGNORE)], 1)


def label_positions(batch: Mapping[str, Tensor]) -> NDArray:
    """Positions that predict a label, ``[R, T]`` bool."""
    return targets(batch) != IGNORE


@dataclass(frozen=True)
class States:
    """Hidden states at chosen positions of a batch.

    Attributes:
        values: ``[Q, D]``, in the order of ``positions.nonzero()``.
        positions: ``[R, T]`` bool.
    """

    values: Tensor
    positions: NDArray

    @cached_property
    def _place(self) -> Tensor:
        place = self.positions.ravel().cumsum().reshape(self.positions.shape) - 1
        return to_device(place, self.values.device)

    def at(self, row: Tensor, time: Tensor) -> Tensor:
        """Those of some of the positions, ``[p, D]``."""
        place = self._place
        return self.values[place[row.to(place.device), time.to(place.device)]]


@dataclass(frozen=True)
class ForwardResult:
    """What a forward found.

    Attributes:
        logp: ``[R, T]`` float32 log-prob of the label that each position predicts; 0 where it was
            not asked for.
        states: hidden states by layer.
        values: values of valuations by entry, ``[Q]`` float32 each, without gradient.
        weighted: by side, the sum of all values of its valuations times their factors, with
            gradient.
        zero: 0 with a (zero) gradient, for what nothing in the batch is asked about.
        logits: the model's own way from the states at `HEAD` to its logits; None unless asked.
        moments: ``[R, T, 2]`` float32 mean and standard deviation of ``log p(v)`` for v drawn from
            the distribution at each position; 0 where it was not asked for.
        profiles: ``[R, S]`` float32 mean, then standard deviation of a row's hidden states over the
            positions asked for, of all layers one after the other; 0 where there are none.
        pull: numbers ``[P]`` of rows, on the host, and their features ``[P, F]`` to ``[2, P, F]``:
            where those of held-out rows lie and the way there
            (`axolotl_unlearn.reference.heldout`).
        known: of a reference, ``logp`` on the host.
    """

    logp: Tensor
    states: dict[Layer, States] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    weighted: dict[str, Tensor] = field(default_factory=dict)
    zero: Tensor | None = None
    logits: Head | None = None
    moments: Tensor | None = None
    profiles: Tensor | None = None
    pull: Callable[[NDArray, Tensor], Tensor] | None = None
    known: NDArray | None = None


@dataclass(frozen=True)
class HeadLoss:
    """An entry whose objective has a value at each position, evaluated where the logits are formed.

    Attributes:
        positions: ``[R, T]`` bool.
        factor: what a value weighs in the loss, scalar.
        reference: what the reference found there, if the objective compares with it.
        slope: the value is this number times the label's log-prob; None: the objective says.
    """

    entry: Entry
    positions: NDArray
    factor: Tensor | float = 1.0
    reference: ForwardResult | None = None
    slope: float | None = None


@dataclass(frozen=True)
class ForwardSpec:
    """What is needed of a model about a batch; all masks are ``[R, T]`` bool on the host.

    Attributes:
        labels: positions whose label's log-prob is needed.
        states: positions whose hidden state is needed, by layer.
        logged: positions whose label's log-prob is needed as a number, without gradient.
        valuations: objectives by position (asked of the policy alone).
        moments: positions whose distribution's moments are needed (asked of the policy alone).
        profiles: positions whose hidden states make a row's profile, at every layer (asked of the
            policy alone).
    """

    #: The masks that are not of a layer or a valuation.
    MASKS: ClassVar = ("labels", "logged", "moments", "profiles")

    labels: NDArray | None = None
    states: dict[Layer, NDArray] = field(default_factory=dict)
    valuations: tuple[HeadLoss, ...] = ()
    logged: NDArray | None = None
    moments: NDArray | None = None
    profiles: NDArray | None = None

    @property
    def layers(self) -> list[int]:
        """The decoder layers that must be met on the way."""
        return sorted(layer for layer in self.states if layer is not HEAD)

    @property
    def reach_head(self) -> bool:
        """Whether the forward must go on to the LM head."""
        at_head = (self.labels, self.logged, self.moments, self.profiles, self.states.get(HEAD))
        return bool(self.valuations) or any(mask is not None for mask in at_head)
