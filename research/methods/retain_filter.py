"""Retain rows that forgetting draws along are retained no longer (TARF, arXiv 2406.08288).

Rows near to those that are forgotten in the model change with them, so a change tells which retain
rows hold what is to go (def. 3.3, eq. 5): ``I = |l(theta_0) - l(theta_t)|``, l the mean NLL of a
row's labels; where I is among the largest, a row is left out for the rest of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Gt, Lt
from torch import nn

from axolotl_unlearn.columns import NOBODYS, ROLES
from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.reference.base import row_keys
from axolotl_unlearn.training.extensions import Batch, Run
from axolotl_unlearn.training.level import ScoredRows
from research.methods.weights import Stateful

LOG = logging.getLogger(__name__)


def most_changed(before: Sequence[float], now: Sequence[float], share: float) -> list[int]:
    """Places of the ``share`` of rows whose loss has changed most, at least one, in their order.

    Example: losses 1, 2, 3, 4 that become 1, 5, 2, 4; half of them: 1 and 2.
    """
    change = np.abs(np.asarray(now, float) - np.asarray(before, float))
    count = max(1, round(share * len(change)))
    return sorted(np.argsort(-change, kind="stable")[:count].tolist())


class RetainFilter(Stateful):
    """Watches the retain rows from the start, and leaves some out from a phase on.

    Args:
        share: Of the retain rows, those whose loss has changed most, that are left out.
        phase: Number of the phase with which that begins, from 1; not the first.
    """

    kept = ("before", "left_out")

    def __init__(
        self, *, share: Annotated[float, Gt(0), Lt(1)] = 0.1, phase: Annotated[int, Gt(1)] = 2
    ) -> None:
        self.share, self.phase = share, phase
        self.before: list[float] = []
        self.left_out: list[str] = []

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        faults = []
        if any(cfg.get(key) for key in ("fsdp", "fsdp_config", "deepspeed")):
            faults.append("`RetainFilter` asks the model about single rows; use DDP or one device.")
        for one in args.extensions:
            first = one.parameters.get("phase", 2) - 1
            if one.kind is cls and not any(later.retain for later in args.phases[first:]):
                faults.append(
                    "`RetainFilter` leaves out retain rows: give `phases` with `retain` from "
                    f"phase {first + 1} on."
                )
        return faults

    def begin(self, run: Run) -> None:
        roles = np.asarray(run.rows["role"][:])
        retain = [run.rows[int(i)] for i in np.flatnonzero(roles == ROLES["retain"])]
        self.rows = ScoredRows(retain, run.tokenizer)
        self.start = run.phases[self.phase - 1].start

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
        if state.global_step != self.start:
            return
        now = self.losses(model)
        chosen = most_changed(self.before, now, self.share)
        self.left_out = [self.rows.keys[i].hex() for i in chosen]
        least = min(abs(now[i] - self.before[i]) for i in chosen)
        LOG.info(
            "%d of %d retain rows, whose loss has changed by %.3f nats or more, are left out from "
            "step %d on.",
            *(len(chosen), len(now), least, state.global_step),
        )
