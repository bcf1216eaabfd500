"""Unlearning Depth Score: is the knowledge gone, or only unspoken? (arXiv 2605.24614, section 3)

The original model runs on a forget row while the hidden states that predict the answer are
replaced, in one layer, by those of another model. How much less likely the answer becomes tells
what that model no longer knows in that layer. A model retrained without the forget set gives the
gap that complete forgetting leaves; the score is the share of the gap that the unlearned model
reaches.

Shape letters: N rows, L layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: A layer counts where the retrained model's states cost more than this, in nats a token.
TAU = 0.05


def erasure(retrained_drop: ArrayLike, unlearned_drop: ArrayLike) -> NDArray[np.float64]:
    """``clip(D2 / D1, 0, 1)`` for each row and layer, ``[N, L]``; 0 where D1 is not positive."""
    first, second = np.asarray(retrained_drop, float), np.asarray(unlearned_drop, float)
    ratio = np.divide(second, first, out=np.zeros_like(second), where=first > 0)
    return np.clip(ratio, 0, 1)


def depth_scores(
    retrained_drop: ArrayLike, unlearned_drop: ArrayLike, tau: float = TAU
) -> NDArray[np.float64]:
    """Score of each row: 1 erased as in the retrained model, 0 intact behind another output.

    ``UDS_i = sum_l D1 * clip(D2 / D1, 0, 1) / sum_l D1`` over the layers with ``D1 > tau``.

    Args:
        retrained_drop: D1, ``[N, L]``: fall of the mean log-prob of the answer tokens when the
            retrained model's states are put into the original.
        unlearned_drop: D2, the same with the unlearned model's states.

    Returns:
        ``[N]``; NaN for a row without any such layer, whose answer the retrained model knows as
        well: there is nothing to forget.
    """
    first, second = np.asarray(retrained_drop, float), np.asarray(unlearned_drop, float)
    if first.shape != second.shape or first.ndim != 2:
        raise ValueError(f"drops of shape {first.shape} and {second.shape}: both must be [N, L].")
    weight = np.where(first > tau, first, 0.0)
    total = weight.sum(1)
    score = (weight * erasure(first, second)).sum(1)
    return np.divide(score, total, out=np.full(len(total), np.nan), where=total > 0)
