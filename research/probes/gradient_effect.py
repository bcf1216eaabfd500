"""G-effect: does a step on an unlearning objective help or hurt what is to be kept, and where?

arXiv 2502.19301 and its code: ``e = <grad L, grad R>`` for an objective L on forget rows and a
metric R, in the code the NLL. A step along -grad L changes R by -e times its size, so e above 0 on
retained rows and below 0 on forget rows is wanted. The code smooths over steps (.6, .4) and sums
over blocks of layers (0-9, 10-19, 20 and more); here a checkpoint is one point, and blocks are
thirds of the layers, embeddings and head by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from axolotl_unlearn.attacks.target import collate
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives.base import LabelScores, Objective
from research.merging.layers import layer_of

Rows = Sequence[tuple[list[int], list[int]]]


def label_logp(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``[R, T - 1]`` log-probs of the labels (0 where there is none), and where there are any."""
    labels = batch["labels"][:, 1:]
    seen = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**seen, use_cache=False).logits[:, :-1].float()
    mask = labels != -100
    logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return logp * mask, mask


def gradients(
    model: Any, rows: Rows, objective: Objective | None, reference: Any, size: int
) -> dict:
    """Mean gradient over rows (a row's value its mean over labels where units are tokens)."""
    model.zero_grad(set_to_none=True)
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        batch = collate(some, model.device)
        logp, mask = label_logp(model, batch)
        before = None
        if objective is not None and objective.reference:
            with torch.no_grad():
                before = label_logp(reference, batch)[0]
        scores = LabelScores(logp, mask, before)
        values = -logp if objective is None else objective.function(scores).values
        if values.dim() == 2:
            values = (values * mask).sum(-1) / scores.lengths
        (values.sum() * (len(some) / len(rows) if values.dim() == 0 else 1 / len(rows))).backward()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def block_of(name: str, count: int) -> str:
    """``embedding``, ``head``, ``other``, or the third of the layers that a weight is in."""
    layer = layer_of(name)
    if not layer.isdigit():
        return layer
    return ("shallow", "middle", "deep")[min(2, int(layer) * 3 // count)]


def effects(
    model: Any,
    reference: Any,
    objectives: Sequence[Objective],
    forget: Rows,
    retain: Rows,
    size: int = 8,
) -> dict[str, dict[str, dict[str, float]]]:
    """Objective -> block (and ``all``) -> ``{"forget": e, "retain": e}``.

    Raises:
        UnlearnError: An objective that sees more than label log-probs.
    """
    count = model.config.get_text_config().num_hidden_layers
    model.requires_grad_(True).eval()
    metric = {
        "forget": gradients(model, forget, None, None, size),
        "retain": gradients(model, retain, None, None, size),
    }
    found: dict[str, Any] = {}
    for objective in objectives:
        if objective.sees != "labels":
            raise UnlearnError(f"{objective.name} sees more than label log-probs; leave it out.")
        step = gradients(model, forget, objective, reference, size)
        rows: dict[str, dict[str, float]] = {}
        for name, gradient in step.items():
            for block in (block_of(name, count), "all"):
                row = rows.setdefault(block, {"forget": 0.0, "retain": 0.0})
                for side, other in metric.items():
                    row[side] += float((gradient * other[name]).sum())
        found[objective.name] = rows
    return found
