"""Scores of weights, kept under their content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from axolotl_unlearn.store import Store, content_key, versions


def remembered(
    score: Callable[[nn.Module], Mapping[str, Any]], store: Store, *settings: Any
) -> Callable[[nn.Module], dict[str, Any]]:
    """A score function that never scores the same weights twice.

    Args:
        score: from a model to scores.
        settings: whatever else the scores depend on: data, limits, versions.

    Returns:
        The same function; its values are kept in `store` under the content of the model's weights.
    """
    from axolotl_unlearn.reference.precompute import weights_digest

    def scored(model: nn.Module) -> dict[str, Any]:
        weights = weights_digest(model, without_adapter=False)
        key = content_key("scores", weights, settings, versions())
        known = store.get(key)
        if known is None:
            known = dict(score(model))
            store.put(key, known)
        return known

    return scored
