"""Numbers of positions by plain autograd: for heads that are trained."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.engine.head_losses import Group, moments_of, reference_logits, stack_numbers
from axolotl_unlearn.engine.needs import Head


def chunk_statistics(states: Tensor, group: Group, head: Head) -> tuple[Tensor, Tensor]:
    """The tensors of `GroupNumbers` for one chunk."""
    if group.labels and not group.valuations and not group.moments:
        label_logp = -F.cross_entropy(
            head(states).float(), group.next_ids, ignore_index=IGNORE, reduction="none"
        )
        return label_logp[:, None], label_logp.new_zeros(len(label_logp), 0)
    logp = head(states).float().log_softmax(-1)
    picked = logp.gather(1, group.next_ids.clamp(min=0)[:, None])[:, 0]
    label_logp = torch.where(group.next_ids != IGNORE, picked, torch.zeros_like(picked))
    values = [
        valuation.slope * label_logp
        if valuation.slope is not None
        else valuation.objective.function(
            logp,
            None if reference is None else reference.float().log_softmax(-1),
            valuation.seen(group.next_ids),
            **valuation.parameters,
        )
        for valuation, reference in zip(group.valuations, reference_logits(group), strict=True)
    ]
    moments = moments_of(logp, logp.exp()) if group.moments else None
    return stack_numbers(group, label_logp, values, moments)
