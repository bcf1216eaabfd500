"""A micro-batch in parts of at most so many tokens, pairs kept whole."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from axolotl_unlearn.columns import ROLES
from axolotl_unlearn.engine.host import on_host, sent


def in_parts(
    batch: dict[str, Tensor], budget: int | None, *, padded: bool
) -> list[dict[str, Tensor]]:
    """The batch cut between its pairs; one pair of more tokens is a part of its own.

    Args:
        batch: Of `PairCollator`: rows by role, those of a role in the order of the pairs.
        budget: Tokens of a part; None for the whole batch.
        padded: Whether padding counts, as where rows are not laid end to end.
    """
    roles = on_host(batch["role"])
    pairs = int((roles == ROLES["forget"]).sum())
    if budget is None or pairs < 2:
        return [batch]
    lengths = on_host(batch["attention_mask"]).sum(-1)
    rows = [np.flatnonzero(roles == role) for role in ROLES.values()]
    if any(len(members) % pairs for members in rows):
        return [batch]
    members = np.concatenate([of_role.reshape(pairs, -1) for of_role in rows], axis=1)
    parts, taken = [], [0]
    for pair in range(1, pairs):
        inside = lengths[members[[*taken, pair]]]
        if (inside.size * inside.max() if padded else inside.sum()) > budget:
            parts.append(taken)
            taken = []
        taken = [*taken, pair]
    parts.append(taken)
    return [_rows(batch, np.sort(members[part], axis=None), lengths) for part in parts]


def _rows(batch: dict[str, Tensor], rows: np.ndarray, lengths: np.ndarray) -> dict[str, Tensor]:
    """Some rows, without the padding that they share."""
    longest = lengths[rows].max()
    return {
        name: sent(on_host(value)[rows][..., : longest if value.ndim > 1 else None], value.device)
        for name, value in batch.items()
    }
