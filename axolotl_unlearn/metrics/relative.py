"""Which of two models is a third one nearer to? A relative test of three samples.

Two honest retrainings differ too. The relative test of arXiv 2601.19755 (Ribero, Schrab and
Gretton) asks whether an unlearned model is nearer to the one before unlearning than to the
retrained one, by regularised f-divergences; this one by the maximum mean discrepancy (Bounliphone
et al., arXiv 1511.04581). Neither was validated on language models.

Shape letters: N texts, K scores of each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist
from scipy.stats import t


@dataclass(frozen=True)
class Relative:
    """Squared discrepancy from the first model minus that from the second.

    Attributes:
        value, error: With the jackknife's standard error, by clusters.
        p_first: One-sided, of "it is at least as near to the second": small says nearer to the
            first. p_second: the reverse.
    """

    value: float
    error: float
    p_first: float
    p_second: float


def relative_test(
    own: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    clusters: Sequence[Hashable] | None = None,
) -> Relative:
    """Scores ``[N, K]`` of the same texts under three models.

    The mean of a text over the three is taken off, so that what makes it hard for every model
    cancels; a Gaussian kernel as wide as the median distance. With h_ij the kernel of the
    U-statistic of ``MMD^2(own, first) - MMD^2(own, second)``, pairs of one cluster are left out.

    Args:
        clusters: Document or author of each text; default: each its own.

    Returns:
        p-values of 1 with fewer than three clusters, or where nothing varies.
    """
    models = np.stack([np.asarray(one, float) for one in (own, first, second)])
    models = models - models.mean(0)
    spread = models.std((0, 1))
    models = models / np.where(spread > 0, spread, 1.0)
    names = list(clusters) if clusters is not None else list(range(models.shape[1]))
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    group = np.array([places[name] for name in names])
    distances = cdist(np.concatenate(models), np.concatenate(models), "sqeuclidean")
    width = float(np.median(distances[distances > 0])) if (distances > 0).any() else 0.0
    count = len(places)
    if count < 3 or not width:
        return Relative(0.0, math.inf, 1.0, 1.0)
    n = len(names)
    kernel = np.exp(-distances / width).reshape(3, n, 3, n)
    u_first, u_second = kernel[0, :, 1], kernel[0, :, 2]
    h = kernel[1, :, 1] - u_first - u_first.T - kernel[2, :, 2] + u_second + u_second.T
    member = np.eye(count)[group]  # [N, G]
    sums, pairs = member.T @ h @ member, np.outer(member.sum(0), member.sum(0))
    np.fill_diagonal(sums, 0.0)
    np.fill_diagonal(pairs, 0.0)
    value = sums.sum() / pairs.sum()
    left = (sums.sum() - 2 * sums.sum(0)) / (pairs.sum() - 2 * pairs.sum(0))
    error = math.sqrt((count - 1) / count * ((left - left.mean()) ** 2).sum())
    if not error:
        return Relative(float(value), 0.0, 1.0, 1.0)
    ratio = value / error
    # A large value: far from the first.
    p_values = float(t.cdf(ratio, count - 1)), float(t.sf(ratio, count - 1))
    return Relative(float(value), error, *p_values)
