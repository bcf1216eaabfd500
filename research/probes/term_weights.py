"""Weights of forget terms for PURGE's `pagerank` reward (arXiv 2601.20568)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axolotl_unlearn.errors import UnlearnError


def term_weights(terms: Sequence[str], embeddings: np.ndarray, entity: str) -> dict[str, float]:
    """Weights of terms by PageRank from the entity over their embeddings' similarity, in [0, 1].

    Similarities (cosine) below their upper quartile are no edges; the walk is personalised to the
    entity; ranks are scaled so that the least is 0 and the greatest 1.

    Args:
        terms: with the entity among them; ``embeddings``: ``[terms, D]``, a row a term.
    """
    import networkx

    if entity not in terms:
        raise UnlearnError(f"the entity {entity!r} is not among the terms; add it.")
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True).clip(1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -1.0)
    edges = similarity >= np.quantile(similarity, 0.75)
    np.fill_diagonal(edges, False)
    graph = networkx.from_numpy_array(edges.astype(float))
    start = {number: float(term == entity) for number, term in enumerate(terms)}
    ranks = networkx.pagerank(graph, personalization=start)
    values = np.array([ranks[number] for number in range(len(terms))])
    spread = values.max() - values.min()
    scaled = (values - values.min()) / spread if spread > 0 else np.ones_like(values)
    return dict(zip(terms, scaled.tolist(), strict=True))
