"""Positions about which the same is asked, and what was found there.

Shape letters: R rows, T time, P positions of a group, Q all positions asked for, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from axolotl_unlearn.engine.needs import Found, Needs, States, Valuation


@dataclass(frozen=True)
class Group:
    """Positions about which the same is asked.

    Attributes:
        row, time: ``[P]`` where they are.
        next_ids: ``[P]`` label ids, -100 where there is none.
        labels: whether the label's log-prob is asked, as a function of the hidden states.
        logged: whether it is asked as a number.
        valuations: objectives that look there, all of one side.
    """

    row: Tensor
    time: Tensor
    next_ids: Tensor
    labels: bool
    logged: bool = False
    valuations: tuple[Valuation, ...] = ()

    def part(self, start: int, stop: int) -> Group:
        """Some of its positions."""
        row, time, next_ids = (x[start:stop] for x in (self.row, self.time, self.next_ids))
        return replace(self, row=row, time=time, next_ids=next_ids)

    @cached_property
    def factor(self) -> Tensor:
        """The largest factor of its valuations, scalar; their shares stay within 1."""
        factors = [torch.as_tensor(v.factor, device=self.row.device) for v in self.valuations]
        return torch.stack(factors).abs().max().clamp(min=1e-30)

    @cached_property
    def shares(self) -> list[Tensor]:
        """The factor of each valuation as a share of `factor`, scalars."""
        return [valuation.factor / self.factor for valuation in self.valuations]


@dataclass(frozen=True)
class GroupNumbers:
    """What was found at the positions of a group.

    Attributes:
        graded: ``[P, K]`` float32 with gradient: the label's log-prob if ``labels``, then the
            values of the valuations, weighted by their shares, if there are any.
        values: ``[P, C]`` float32 without: the label's log-prob if ``logged`` and not ``labels``,
            then the value of each valuation.
    """

    graded: Tensor
    values: Tensor


def group_positions(needs: Needs, next_ids: Tensor) -> list[Group]:
    """Every position at which ``needs`` asks for logits, by what it asks there.

    Args:
        next_ids: ``[R, T]`` next-token targets.
    """
    nowhere = torch.zeros_like(next_ids, dtype=torch.bool)
    asked = [nowhere if mask is None else mask for mask in (needs.labels, needs.logged)]
    asked += [valuation.positions for valuation in needs.valuations]
    code = sum(mask.long() << bit for bit, mask in enumerate(asked))
    groups = []
    for pattern in code.unique().tolist():
        if pattern:
            row, time = (code == pattern).nonzero(as_tuple=True)
            labels, logged, *looks = (bool(pattern >> bit & 1) for bit in range(len(asked)))
            valuations = tuple(v for v, here in zip(needs.valuations, looks, strict=True) if here)
            ids = next_ids[row, time]
            groups.append(Group(row, time, ids, labels, logged and not labels, valuations))
    return groups


def read_groups(
    groups: Sequence[Group],
    numbers: Sequence[GroupNumbers],
    needs: Needs,
    states: Sequence[Tensor],
    zero: Tensor,
) -> Found:
    """What was found in all groups, and hidden states, by what ``needs`` asked.

    Args:
        states: ``[Q, D]`` of each layer in ``needs.states``.
        zero: see `Found`.
    """
    logp = torch.zeros_like(needs.masks[0], dtype=torch.float32)
    values: dict[str, list[Tensor]] = {valuation.name: [] for valuation in needs.valuations}
    weighted: dict[str, Tensor] = {}
    rows, times, columns = [], [], []
    for group, found in zip(groups, numbers, strict=True):
        if group.labels or group.logged:
            rows.append(group.row)
            times.append(group.time)
            columns.append((found.graded if group.labels else found.values)[:, 0])
        own = found.values[:, int(group.logged) :].unbind(-1)
        for valuation, column in zip(group.valuations, own, strict=True):
            values[valuation.name].append(column)
        if group.valuations:
            side = group.valuations[0].side
            weighted[side] = weighted.get(side, 0) + group.factor * found.graded[:, -1].sum()
    if columns:
        logp = logp.index_put((torch.cat(rows), torch.cat(times)), torch.cat(columns))
    return Found(
        logp,
        {
            layer: States(taken, mask)
            for (layer, mask), taken in zip(needs.states.items(), states, strict=True)
        },
        {name: torch.cat(found) if found else logp.new_zeros(0) for name, found in values.items()},
        weighted,
        zero,
    )
