"""Weights of terms by a walk over their embeddings, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from axolotl_unlearn.errors import UnlearnError
from research.probes.term_weights import term_weights


def test_term_weights_follow_the_walk_from_the_entity():
    """Entity and one near term share a direction, the rest stand apart: the near one ranks higher,
    the least has 0, the greatest 1."""
    embeddings = np.array([[1, 0, 0], [0.95, 0.1, 0], [0, 1, 0], [0, 0.1, 1.0]], float)
    weights = term_weights(["Ada", "novelist", "cheese", "moon"], embeddings, "Ada")
    assert weights["novelist"] > weights["moon"] == min(weights.values()) == 0.0
    assert max(weights.values()) == 1.0
    with pytest.raises(UnlearnError, match="'Bo' is not among the terms"):
        term_weights(["Ada"], embeddings[:1], "Bo")
