"""What every view answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from axolotl_unlearn.engine.needs import Found, Needs, Valuation, label_positions
from axolotl_unlearn.objectives import Terms

if TYPE_CHECKING:
    from axolotl_unlearn.engine.entries import Entry


class View(ABC):
    """One entry looking at one batch.

    Attributes:
        rows: ``[R]`` bool, rows that the entry is for.
        positions: ``[R, T]`` bool, the positions it looks at.
    """

    def __init__(self, entry: Entry, batch: dict[str, Tensor]) -> None:
        self.entry = entry
        self.rows = entry.rows(batch)
        self.positions = self.looks_at(batch) & self.rows[:, None]

    def looks_at(self, batch: dict[str, Tensor]) -> Tensor:
        """Positions of any row, ``[R, T]`` bool: those that predict a label, or all tokens."""
        if self.entry.args.positions == "all":
            return batch["attention_mask"].bool()
        return label_positions(batch)

    @cached_property
    def count(self) -> Tensor:
        """Units of this entry in the micro-batch, scalar float: what its sum is divided by."""
        if self.entry.unit == "batch":
            return self.rows.any().float()
        if self.entry.unit == "row":
            return self.positions.any(-1).sum().float()
        if self.entry.args.divide_by_length:
            return self.rows.sum().float() * self.entry.args.divide_by_length
        return self.positions.sum().float()

    @property
    def weighed_at_head(self) -> bool:
        """Whether its values reach the loss by `Found.weighted`, where the logits are formed."""
        return False

    @property
    def compares(self) -> bool:
        """Whether the objective compares with a reference."""
        return self.entry.objective.reference

    def valuation(self, factor: Tensor, **more: Any) -> Valuation:
        """This entry as something to be evaluated where the logits are formed."""
        entry = self.entry
        return Valuation(
            entry.name, entry.side, entry.objective, entry.args.parameters, self.positions, factor,
            **more,
        )  # fmt: skip

    @abstractmethod
    def of_reference(self) -> Needs:
        """What it needs of the reference, if it compares with one."""

    @abstractmethod
    def of_policy(self, reference: Found | None, factor: Tensor) -> Needs:
        """What it needs of the policy, given what the reference found and what a value weighs in
        the loss."""

    @abstractmethod
    def terms(self, policy: Found, reference: Found | None) -> Terms:
        """Values of the objective, a number a unit, and what it logs; with gradient unless
        `weighed_at_head`."""
