"""Forget rows whose gradient agrees with the retain rows' weigh less (GUARD, arXiv 2506.10946).

At the start of the run, a row's attribution is ``a_i = <grad l_i, mean over retain rows of
grad l>``, l the mean NLL of a row's labels, over the trained weights. Among N forget rows its loss
weighs ``N softmax(-a / T)_i``, 1 on average. The paper was not at hand: attribution, fall and T are
from its abstract and notes of it; the softmax is the usual form of such weights, unchecked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor

from axolotl_unlearn.columns import ROLES, SIDES
from axolotl_unlearn.config import ObjectiveArgs, UnlearnArgs
from axolotl_unlearn.engine.views import make_entries
from axolotl_unlearn.objectives import OBJECTIVES
from axolotl_unlearn.reference.base import row_keys
from axolotl_unlearn.training.extensions import Batch, Run
from research.methods.surgery import gradients
from research.methods.weights import Stateful

LOG = logging.getLogger(__name__)

#: The loss of a row of either side whose gradients tell what rows share.
LOSS_OF = {
    entry.side: entry
    for entry in make_entries([(side, ObjectiveArgs(objective="nll")) for side in SIDES])
}


def attribution_weights(attributions: Sequence[float], temperature: float) -> list[float]:
    """``N softmax(-a / T)``, float64.

    Example: attributions 0 and ln 3 at T = 1: softmax (3/4, 1/4), so 1.5 and .5.
    """
    negated = -torch.tensor(attributions, dtype=torch.float64) / temperature
    return (len(attributions) * negated.softmax(0)).tolist()


def attributions(
    forget: Iterable[Sequence[Tensor]], retain: Iterable[Sequence[Tensor]]
) -> list[float]:
    """``a_i`` of each forget row, from the gradients of single rows, taken one by one.

    Example: forget (2, 0) and (0, 1), retain (1, 3) and (3, 1), whose mean is (2, 2): 4 and 2.
    """
    retain = iter(retain)
    count, mean = 1, [g.float() for g in next(retain)]
    for gradient in retain:
        count += 1
        mean = [m + (g - m) / count for m, g in zip(mean, gradient, strict=True)]
    return [
        sum(float((g.double() * m).sum()) for g, m in zip(row, mean, strict=True)) for row in forget
    ]


class RowWeights(Stateful):
    """The weights of the forget rows by their content; they are a part of each checkpoint."""

    kept = ("known",)

    def __init__(self, *, temperature: Annotated[float, Gt(0)]) -> None:
        self.temperature = temperature
        self.known: dict[str, float] = {}

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        faults = []
        if any(cfg.get(key) for key in ("fsdp", "fsdp_config", "deepspeed")):
            faults.append("`RowWeights` asks the model about single rows; use DDP or one device.")
        if not args.retain:
            faults.append("`RowWeights` compares forget rows with retain rows: add `retain`.")
        for entry in args.forget:
            known = OBJECTIVES[entry.objective]
            if known.sees != "labels" or known.unit(entry.parameters) == "batch":
                faults.append(
                    f"`RowWeights` weighs the losses of single rows, and {entry.objective} is no "
                    "loss of the labels of one row; take one such as ga, npo, simnpo or wga."
                )
        return faults

    def on_start(self, run: Run, resumed: Path | None) -> None:
        """By the gradients of single rows at the start; each process takes all of them."""
        if resumed:
            return
        model = run.model.to(run.device).eval()
        weights = [p for p in model.parameters() if p.requires_grad]
        roles = np.asarray(run.rows["role"][:])
        rows = {
            side: [run.collate([run.rows[int(i)]]) for i in np.flatnonzero(roles == ROLES[side])]
            for side in SIDES
        }

        def each(side: str) -> Iterator[list[Tensor]]:
            for row in rows[side]:
                yield gradients(run.loss_of(model, row, LOSS_OF[side]), weights)

        self.fit(rows["forget"], attributions(each("forget"), each("retain")))

    def on_rows(self, batch: Batch) -> Batch:
        return batch | {"weight": self.of_rows(batch)}

    def fit(self, rows: Sequence[Batch], shares: Sequence[float]) -> None:
        """From the attributions of all forget rows."""
        weights = attribution_weights(shares, self.temperature)
        keys = [row_keys(row)[0].hex() for row in rows]
        self.known = dict(zip(keys, weights, strict=True))
        LOG.info(
            "attributions of %d forget rows: %.3g to %.3g; their weights: %.3g to %.3g.",
            *(len(shares), min(shares), max(shares), min(weights), max(weights)),
        )

    def of_rows(self, batch: Batch) -> Tensor:
        """Weight of each row ``[R]``; 1 for those that are not known."""
        weights = [self.known.get(key.hex(), 1.0) for key in row_keys(batch)]
        return torch.tensor(weights, device=batch["labels"].device)
