"""The objectives of a config as the engine uses them, and what each sees: a class a view, chosen by
``sees=`` of its registration.

A view is one entry looking at one batch. It alone decides which rows and positions it looks at,
what it needs of the policy and of the reference, and which values follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.columns import KINDS, ROLES, task_number
from axolotl_unlearn.config import ObjectiveArgs
from axolotl_unlearn.engine.host import indices, on_host, sent, to_device
from axolotl_unlearn.engine.needs import (
    HEAD,
    ForwardResult,
    ForwardSpec,
    HeadLoss,
    Layer,
    States,
    label_positions,
)
from axolotl_unlearn.objectives import OBJECTIVES, LabelScores, Objective, Terms


@dataclass(frozen=True)
class Entry:
    """One line of ``forget:`` or ``retain:``: which rows, which objective, which weight.

    Attributes:
        unit: what its sum is divided by the number of: token, row or batch.
    """

    name: str
    side: str
    args: ObjectiveArgs
    objective: Objective
    unit: str


def make_entries(pairs: list[tuple[str, ObjectiveArgs]]) -> list[Entry]:
    """Name the objectives of a config; a repeated one gets its kinds, tasks or number added."""
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
        objective = OBJECTIVES[args.objective]
        entries.append(Entry(name, side, args, objective, objective.unit(args.parameters)))
    return entries


class View(ABC):
    """One entry looking at one batch.

    Attributes:
        rows: ``[R]`` bool, rows that the entry is for.
        positions: ``[R, T]`` bool, the positions it looks at.
        weight: ``[R]`` of what forget rows weigh; None where all weigh 1.
    """

    def __init__(self, entry: Entry, batch: dict[str, Tensor]) -> None:
        self.entry = entry
        self.weight = batch.get("weight") if entry.side == "forget" else None
        self.rows = rows_of(entry, batch)
        self.positions = sent(self.looks_at(batch) & on_host(self.rows)[:, None], self.rows.device)

    def looks_at(self, batch: dict[str, Tensor]) -> NDArray:
        """Positions of any row, ``[R, T]`` bool: those that predict a label, or all tokens."""
        if self.entry.args.positions == "all":
            return on_host(batch["attention_mask"]).astype(bool)
        return on_host(label_positions(batch))

    @property
    def units(self) -> float:
        """Units of this entry in the micro-batch: what its sum is divided by."""
        rows, positions = on_host(self.rows), on_host(self.positions)
        if self.entry.unit == "batch":
            return float(rows.any())
        if self.entry.unit == "row":
            return float(positions.any(-1).sum())
        if self.entry.args.divide_by_length:
            return float(rows.sum()) * self.entry.args.divide_by_length
        return float(positions.sum())

    @cached_property
    def count(self) -> Tensor:
        """`units` as a scalar."""
        return to_device(np.float32(self.units), self.rows.device)

    @property
    def weighed_at_head(self) -> bool:
        """Whether its values reach the loss by `ForwardResult.weighted`, at the logits."""
        return False

    @property
    def compares(self) -> bool:
        """Whether the objective compares with a reference."""
        return self.entry.objective.reference

    def valuation(self, factor: Tensor, **more: Any) -> HeadLoss:
        """This entry as something to be evaluated where the logits are formed."""
        entry = self.entry
        return HeadLoss(
            entry.name, entry.side, entry.objective, entry.args.parameters, self.positions, factor,
            **more,
        )  # fmt: skip

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
            return ForwardSpec(valuations=(self.valuation(factor, slope=self.slope),))
        return ForwardSpec(labels=self.positions)

    def terms(self, policy: ForwardResult, reference: ForwardResult | None) -> Terms:
        if self.weighed_at_head:
            return Terms(policy.values[self.entry.name])
        rows = self.rows_seen()
        if len(rows) == 0:
            return Terms(policy.zero)
        scores = self.scores_of(policy, reference, rows)
        terms = self.entry.objective.function(scores, **self.entry.args.parameters)
        if self.weight is None:
            return terms
        weight = self.weight[rows].view(-1, *[1] * (terms.values.dim() - 1))
        return terms._replace(values=terms.values * weight)

    def rows_seen(self) -> Tensor:
        """Rows with positions, ``[r]``."""
        return sent(on_host(self.positions).any(-1).nonzero()[0], self.positions.device)

    def scores_of(
        self, policy: ForwardResult, reference: ForwardResult | None, rows: Tensor
    ) -> LabelScores:
        mask = self.positions[rows]
        return LabelScores(
            logp=policy.logp[rows] * mask,
            mask=mask,
            ref_logp=None if reference is None else reference.logp[rows] * mask,
        )


class Distributions(View):
    """The objective is called chunk by chunk where the logits are formed.

    Of the reference it needs the hidden states at the head, from which the exact distribution
    follows (D numbers a position instead of V), and the labels' log-probs where these say which
    labels it sees.
    """

    weighed_at_head = True

    def __init__(self, entry: Entry, batch: dict[str, Tensor]) -> None:
        super().__init__(entry, batch)
        self.labels = None
        if entry.objective.picks:
            at_labels = on_host(label_positions(batch)) & on_host(self.positions)
            self.labels = sent(at_labels, self.rows.device)

    def of_reference(self) -> ForwardSpec:
        return ForwardSpec(labels=self.labels, states={HEAD: self.positions})

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        whole = self.valuation(factor, reference=reference)
        if self.labels is None:
            return ForwardSpec(valuations=(whole,))
        objective = self.entry.objective
        given = {name: one.default for name, one in objective.parameters.items()}
        given |= self.entry.args.parameters
        picked = objective.picks(reference.logp, self.labels, **given)
        others = replace(whole, positions=self.positions & ~picked, labelled=False)
        return ForwardSpec(valuations=(replace(whole, positions=picked), others))

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
        if not on_host(self.positions).any():
            return Terms(policy.zero)
        reference_states = None if reference is None else self._own(reference.states[self.layer])
        states = self._own(seen)
        return Terms(
            self.entry.objective.function(states, reference_states, **self.entry.args.parameters)
        )

    def _own(self, states: States) -> Tensor:
        """Of all positions that were asked for, this entry's, ``[P, D]`` in at least float32."""
        values = states.at(*indices(self.positions))
        return values.to(torch.promote_types(values.dtype, torch.float32))


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


class Profiles(Features):
    """As `Features`, of each row's hidden states."""

    def of_policy(self, reference: ForwardResult | None, factor: Tensor) -> ForwardSpec:
        return ForwardSpec(profiles=self.positions)

    def features(self, policy: ForwardResult, rows: Tensor) -> Tensor:
        return policy.profiles[rows]


VIEWS: dict[str, type[View]] = {
    "labels": Labels,
    "distributions": Distributions,
    "hidden": Hidden,
    "pairs": Pairs,
    "features": Features,
    "profiles": Profiles,
}


def view_of(entry: Entry, batch: dict[str, Tensor]) -> View:
    """What an entry sees of a batch."""
    return VIEWS[entry.objective.sees](entry, batch)


def unit_counts(entries: Sequence[Entry], batch: dict[str, Tensor]) -> Tensor:
    """Units of each entry in a micro-batch, ``[E]`` float; add them up over a whole step."""
    units = [view_of(entry, batch).units for entry in entries]
    return to_device(np.array(units, dtype=np.float32), batch["role"].device)


def rows_of(entry: Entry, batch: dict[str, Tensor]) -> Tensor:
    """Rows of the batch that an entry is for, ``[R]`` bool."""
    wanted = {"role": [ROLES[role] for role in entry.objective.roles(entry.side)]}
    if entry.args.kinds is not None:
        wanted["kind"] = [KINDS[kind] for kind in entry.args.kinds]
    if entry.args.tasks is not None:
        wanted["task"] = [task_number(task) for task in entry.args.tasks]
    chosen = [np.isin(on_host(batch[name]), numbers) for name, numbers in wanted.items()]
    return sent(np.logical_and.reduce(chosen), batch["role"].device)


def together(needs: Iterable[ForwardSpec]) -> ForwardSpec:
    """The union of what several views need."""
    masks: dict[str, Tensor | None] = dict.fromkeys(ForwardSpec.MASKS)
    states: dict[Layer, Tensor] = {}
    valuations: tuple[HeadLoss, ...] = ()
    for one in needs:
        for name, mask in masks.items():
            masks[name] = _either(mask, getattr(one, name))
        for layer, mask in one.states.items():
            states[layer] = _either(states.get(layer), mask)
        valuations += one.valuations
    return ForwardSpec(states=states, valuations=valuations, **masks)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return sent(on_host(first) | on_host(second), first.device)
