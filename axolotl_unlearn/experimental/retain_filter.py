"""Retain rows that forgetting draws along are retained no longer (TARF, arXiv 2406.08288).

Rows near to those that are forgotten in the model change with them, so a change tells which retain
rows hold what is to go (def. 3.3, eq. 5): ``I = |l(theta_0) - l(theta_t)|``, l the mean NLL of a
row's labels; where I is among the largest, a row is left out for the rest of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from axolotl_unlearn.reference.base import row_keys
from axolotl_unlearn.training.extensions import Batch, Stateful
from axolotl_unlearn.training.level import ScoredRows

LOG = logging.getLogger(__name__)

#: A role that no objective is for.
NOBODYS = -1


def most_changed(before: Sequence[float], now: Sequence[float], share: float) -> list[int]:
    """Places of the ``share`` of rows whose loss has changed most, at least one, in their order.

    Example: losses 1, 2, 3, 4 that become 1, 5, 2, 4; half of them: 1 and 2.
    """
    change = np.abs(np.asarray(now, float) - np.asarray(before, float))
    count = max(1, round(share * len(change)))
    return sorted(np.argsort(-change, kind="stable")[:count].tolist())


class RetainFilter(Stateful):
    """Watches the retain rows from the start, and chooses where a phase says ``leave_out``.

    Args:
        rows: All retain rows.
        shares: Step at which such a phase begins -> share of the rows to leave out from there on.
    """

    kept = ("before", "left_out")

    def __init__(self, rows: ScoredRows, shares: dict[int, float]) -> None:
        self.rows, self.shares = rows, shares
        self.before: list[float] = []
        self.left_out: list[str] = []

    @classmethod
    def of(cls, trainer: Any) -> RetainFilter:
        shares = {p.start: p.leave_out for p in trainer.phases if p.leave_out}
        return cls(ScoredRows(trainer.rows_with_role("retain"), trainer.processing_class), shares)

    def on_rows(self, batch: Batch) -> Batch:
        """The batch, where rows that are left out are no objective's."""
        if not self.left_out:
            return batch
        known = set(self.left_out)
        out = torch.tensor([key.hex() in known for key in row_keys(batch)])
        role = batch["role"]
        return batch | {"role": role.masked_fill(out.to(role.device), NOBODYS)}

    def losses(self, model: nn.Module) -> list[float]:
        """Mean NLL of each row's labels, nats; 0 without a label."""
        was_training = model.training
        model.eval()
        scored = (one.logp for one in self.rows.score(model))
        losses = [-float(np.mean(logp)) if len(logp) else 0.0 for logp in scored]
        model.train(was_training)
        return losses

    def on_train_begin(self, args, state, control, model=None, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        if not self.before:
            self.before = self.losses(model)

    def on_step_end(self, args, state, control, model=None, **_: Any) -> None:
        share = self.shares.get(state.global_step)
        if share is None:
            return
        now = self.losses(model)
        chosen = most_changed(self.before, now, share)
        self.left_out = [self.rows.keys[i].hex() for i in chosen]
        least = min(abs(now[i] - self.before[i]) for i in chosen)
        LOG.info(
            "%d of %d retain rows, whose loss has changed by %.3f nats or more, are left out from "
            "step %d on.",
            *(len(chosen), len(now), least, state.global_step),
        )
