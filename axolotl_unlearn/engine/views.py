"""The objectives of a config as the engine uses them, and what each sees: a class a view, chosen by
``sees=`` of its registration.

A view is one entry looking at one batch. It alone decides which rows and positions it looks at,
what it needs of the policy and of the reference, and which values follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.columns import KINDS, ROLES, task_number
from axolotl_unlearn.config import ObjectiveArgs, ReferenceArgs, Sides
from axolotl_unlearn.engine.batch import Batch, indices, to_device
from axolotl_unlearn.engine.needs import (
    HEAD,
    Entry,
    ForwardResult,
    ForwardSpec,
    HeadLoss,
    Layer,
    States,
    called,
    label_positions,
)
from axolotl_unlearn.metrics.learned import token_features
from axolotl_unlearn.objectives import OBJECTIVES, LabelScores, Terms


def make_entries(
    pairs: list[tuple[str, ObjectiveArgs]], reference: ReferenceArgs | None = None
) -> list[Entry]:
    """Name the objectives of a config; a repeated one gets its kinds, tasks or number added.
    ``reference``: of those that name none."""
    entries: list[Entry] = []
    names: set[str] = set()
    for side, args in pairs:
        name = f"{side}/{args.objective}"
        if name in names:
            suffix = "+".join([*(args.kinds or []), *map(str, args.tasks or [])])
            name = f"{name}.{suffix or len(names)}"
        while name in names:
            name += "'"
        names.add(name)
        own = OBJECTIVES[args.objective]
        source = (args.reference or reference) if own.reference else None
        entries.append(Entry(name, side, args, own, own.unit(args.parameters), source))
    return entries


def tried(one: ObjectiveArgs) -> Any:
    """What the function of an objective, of model's scores, makes of made-up ones."""
    own, logp = OBJECTIVES[one.objective], torch.full((2, 3), 1 / 3).log()
    scores = LabelScores(logp, logp < 0, logp if own.reference else None)
    given = {"labels": (scores,), "pairs": (scores, scores), "hidden": (logp, scores.ref_logp)}
    given["distributions"] = (logp, scores.ref_logp, torch.tensor([0, 1]))
    return called(own, *given[own.sees], **one.parameters)


def logged(block: Sides) -> set[str]:
    """Names of what an evaluation logs of the objectives of a block, beside their sum."""
    names = set()
    for entry in make_entries(block.entries()):
        own = entry.objective
        names |= {entry.name, *(f"{role}_nll" for role in own.roles(entry.side))}
        names |= {own.name} if own.sees == "distributions" else set()
        with suppress(Exception):  # of the user's code, which `check --full` tells; or no `logs`
            names |= {*tried(entry.args).logs}
    return names


class View(ABC):
    """One entry looking at one batch.

    Attributes:
        rows: ``[R]`` bool, rows that the entry is for.
        positions: ``[R, T]`` bool, those that it looks at: that predict a label, or all tokens.
        weight: ``[R]`` of what forget rows weigh; None where all weigh 1.
    """

    def __init__(self, entry: Entry, batch: Batch) -> None:
        self.entry, self.device = entry, batch.device
        self.weight = batch.get("weight") if entry.side == "forget" else None
        self.rows = rows_of(entry, batch)
        everywhere = entry.args.positions == "all"
        looked = batch.on_host("attention_mask") != 0 if everywhere else label_positions(batch)
        self.positions = looked & self.rows[:, None]

    @property
    def units(self) -> float:
        """Units of this entry in the micro-batch: what its sum is divided by."""
        if self.entry.unit == "batch":
            return float(self.rows.any())
        if self.entry.unit == "row":
            return float(self.positions.any(-1).sum())
        if self.entry.args.divide_by_length:
            return float(self.rows.sum()) * self.entry.args.divide_by_length
        return float(self.positions.sum())

    @cached_property
    def count(self) -> Tensor:
        """`units` as a scalar."""
        return to_device(np.float32(self.units), self.device)

    @property
    def weighed_at_head(self) -> bool:
        """Whether its values reach the loss by `ForwardResult.weighted`, at the logits."""
        return False

    @abstractmethod
    def of_reference(self) -> ForwardSpec:
        """What it needs of the reference, if it compares with one."""

    @abstractmethod
    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        """What it needs of the policy, given what the reference found and what a value weighs in
        the loss."""

    @abstractmethod
    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        """Values of the objective, a number a unit, and what it logs; with gradient unless
        `weighed_at_head`."""


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
        return self.slope is not None and self.weight is None

    def of_reference(self) -> ForwardSpec:
        return ForwardSpec(labels=self.positions)

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        if self.weighed_at_head:
            own = HeadLoss(self.entry, self.positions, factor, slope=self.slope)
            return ForwardSpec(valuations=(own,))
        return ForwardSpec(labels=self.positions)

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        if self.weighed_at_head:
            return Terms(policy.values[self.entry.name])
        seen = self.positions.any(-1)
        if not seen.any():
            return Terms(policy.zero)
        scores = self.scores_of(policy, reference, seen)
        terms = called(self.entry.objective, scores, **self.entry.args.parameters)
        if self.weight is None:
            return terms
        rows = to_device(seen.nonzero()[0], self.device)
        weight = self.weight[rows].view(-1, *[1] * (terms.values.dim() - 1))
        return terms._replace(values=terms.values * weight)

    def scores_of(
        self, policy: ForwardResult, reference: ForwardResult | None, chosen: NDArray
    ) -> LabelScores:
        """Of some rows, ``[R]`` bool."""
        rows = to_device(chosen.nonzero()[0], self.device)
        mask = to_device(self.positions[chosen], self.device)
        return LabelScores(
            logp=policy.logp[rows] * mask,
            mask=mask,
            ref_logp=None if reference is None else reference.logp[rows] * mask,
        )


class Distributions(View):
    """The objective is called chunk by chunk where the logits are formed.

    Of the reference it needs the hidden states at the head, from which the exact distribution
    follows (D numbers a position instead of V).
    """

    weighed_at_head = True

    def of_reference(self) -> ForwardSpec:
        return ForwardSpec(states={HEAD: self.positions})

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(valuations=(HeadLoss(self.entry, self.positions, factor, reference),))

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        values = policy.values[self.entry.name]
        return Terms(values, {self.entry.objective.name: values})


class Hidden(View):
    """Calls the objective once, with the states of all its positions.

    Where nobody asks for logits the forward ends at the layer.
    """

    @property
    def layer(self) -> int:
        """Number of the decoder layer whose output is seen, from 0."""
        return self.entry.args.parameter("layer")

    def of_reference(self) -> ForwardSpec:
        return ForwardSpec(states={self.layer: self.positions})

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(states={self.layer: self.positions})

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        seen = policy.states[self.layer]
        if not self.positions.any():
            return Terms(policy.zero)
        reference_states = None if reference is None else self._own(reference.states[self.layer])
        states = self._own(seen)
        return Terms(
            called(self.entry.objective, states, reference_states, **self.entry.args.parameters)
        )

    def _own(self, states: States) -> Tensor:
        """Of all positions that were asked for, this entry's, ``[P, D]`` in at least float32."""
        values = states.at(*indices(self.positions, self.device))
        return values.to(torch.promote_types(values.dtype, torch.float32))


class Pairs(Labels):
    """Calls the objective once, with the label log-probs of its forget rows and, in the same order,
    of their alternatives."""

    def __init__(self, entry: Entry, batch: Batch) -> None:
        super().__init__(entry, batch)
        self.alternatives = self.rows & (batch.on_host("role") == ROLES["alternative"])

    @property
    def units(self) -> float:
        return float(self.alternatives.sum())

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        sides = self.rows & ~self.alternatives, self.alternatives
        if not sides[0].any():
            return Terms(policy.zero)
        both = (self.scores_of(policy, reference, rows) for rows in sides)
        return called(self.entry.objective, *both, **self.entry.args.parameters)


class Features(Labels):
    """Calls the objective once, with the features of each of its rows
    (`axolotl_unlearn.metrics.learned`) and what draws them towards those of held-out rows."""

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(labels=self.positions, moments=self.positions)

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        rows = self.positions.any(-1).nonzero()[0]
        features = self.features(policy, rows)
        where = reference.pull(rows, features)
        if len(rows) == 0:
            return Terms(policy.zero)
        return called(self.entry.objective, features, *where, **self.entry.args.parameters)

    def features(self, policy: ForwardResult, rows: NDArray) -> Tensor:
        """Features of rows of the batch, ``[r] -> [r, F]``."""
        at = indices(self.positions, self.device)
        mean, sd = policy.moments[at].unbind(-1)
        lengths = self.positions.sum(-1)[rows].tolist()
        columns = (x.split(lengths) for x in (policy.logp[at], mean, sd))
        features = [token_features(*three) for three in zip(*columns, strict=True)]
        return torch.stack(features) if features else policy.logp.new_zeros(0, 0)


class Profiles(Features):
    """As `Features`, of each row's hidden states."""

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(profiles=self.positions)

    def features(self, policy: ForwardResult, rows: NDArray) -> Tensor:
        return policy.profiles[to_device(rows, self.device)]


VIEWS: dict[str, type[View]] = {
    "labels": Labels,
    "distributions": Distributions,
    "hidden": Hidden,
    "pairs": Pairs,
    "features": Features,
    "profiles": Profiles,
}


def view_of(entry: Entry, batch: Mapping[str, Tensor]) -> View:
    """What an entry sees of a batch."""
    return VIEWS[entry.objective.sees](entry, Batch.of(batch))


def unit_counts(entries: Sequence[Entry], batch: Mapping[str, Tensor]) -> Tensor:
    """Units of each entry in a micro-batch, ``[E]`` float; add them up over a whole step."""
    batch = Batch.of(batch)
    units = [view_of(entry, batch).units for entry in entries]
    return to_device(np.array(units, dtype=np.float32), batch.device)


def rows_of(entry: Entry, batch: Mapping[str, Tensor]) -> NDArray:
    """Rows of the batch that an entry is for, ``[R]`` bool."""
    batch = Batch.of(batch)
    wanted = {"role": [ROLES[role] for role in entry.objective.roles(entry.side)]}
    if entry.args.kinds is not None:
        wanted["kind"] = [KINDS[kind] for kind in entry.args.kinds]
    if entry.args.tasks is not None:
        wanted["task"] = [task_number(task) for task in entry.args.tasks]
    chosen = [np.isin(batch.on_host(name), numbers) for name, numbers in wanted.items()]
    return np.logical_and.reduce(chosen)


def together(needs: Iterable[ForwardSpec]) -> ForwardSpec:
    """The union of what several views need."""
    masks: dict[str, NDArray | None] = dict.fromkeys(ForwardSpec.MASKS)
    states: dict[Layer, NDArray] = {}
    valuations: tuple[HeadLoss, ...] = ()
    for one in needs:
        for name, mask in masks.items():
            masks[name] = _either(mask, getattr(one, name))
        for layer, mask in one.states.items():
            states[layer] = _either(states.get(layer), mask)
        valuations += one.valuations
    return ForwardSpec(states=states, valuations=valuations, **masks)


def _either(first: NDArray | None, second: NDArray | None) -> NDArray | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
