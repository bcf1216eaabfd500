"""Whole layers from an unlearned model, the rest from the original: `python -m research analyse layers`.

CRU (ICML 2025 workshop "On the Fragility of Latent Knowledge"): score each layer of the unlearned
model put alone into the original, keep the best, no training. Embeddings and head are layers of
their own here (``embedding``, ``head``); tied ones are one weight and go with ``embedding``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from research.merging.lab import Lab, Score

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def layer_of(name: str) -> str:
    """The layer number of a weight as text, or ``embedding``, ``head``, ``other``."""
    if match := LAYER.search(name):
        return match.group(1)
    if "embed" in name or "wte" in name:
        return "embedding"
    return "head" if "head" in name else "other"


def layers(lab: Lab) -> list[str]:
    """Layers that some parent moves, in the model's order."""
    return list(dict.fromkeys(layer_of(name) for name in lab.names))


def patched(lab: Lab, donor: int, chosen: Collection[str]) -> dict[str, Tensor]:
    """The original with the ``chosen`` layers of ``donor`` (a parent's number)."""
    unknown = sorted(set(chosen) - set(layers(lab)))
    if unknown:
        raise UnlearnError(
            f"layer {unknown[0]!r} is not among those that moved: {', '.join(layers(lab))}."
        )
    taken = {name: weight for name, weight in lab.parent_weights(donor) if layer_of(name) in chosen}
    return {**lab.base_weights, **taken}


def layer_scores(lab: Lab, model: nn.Module, score: Score, donor: int = 0) -> list[dict]:
    """Scores with one layer of ``donor`` alone in the original, and with all but that one.

    Rows ``{"layer", "alone": scores, "without": scores}``: alone shows what the layer does by
    itself, without what is missing when it is put back.
    """
    names = layers(lab)
    return [
        {
            "layer": layer,
            "alone": dict(score(lab.load(model, patched(lab, donor, {layer})))),
            "without": dict(score(lab.load(model, patched(lab, donor, set(names) - {layer})))),
        }
        for layer in names
    ]


def rank_sum(rows: Sequence[Mapping], metrics: Sequence[str] = ("forget", "retain")) -> list[str]:
    """Layers from best to worst by the sum of their ranks in ``metrics`` (alone, high is good).

    Equal values share the mean of their ranks; equal sums keep the model's order.
    """
    from scipy.stats import rankdata

    for metric in metrics:
        if any(row["alone"].get(metric) is None for row in rows):
            raise UnlearnError(f"the layer scores hold no {metric!r}.")
    sums = sum(rankdata([-row["alone"][metric] for row in rows]) for metric in metrics)
    order = sorted(range(len(rows)), key=lambda index: (sums[index], index))
    return [rows[index]["layer"] for index in order]


def choose_layers(
    lab: Lab,
    model: nn.Module,
    score: Score,
    donor: int = 0,
    *,
    objective: Callable[[Mapping], float] = lambda scores: scores["aggregate"],
    metrics: Sequence[str] = ("forget", "retain"),
) -> dict:
    """CRU with k chosen on validation: the first k layers by rank sum, for the best k of all.

    Returns ``{"layers": chosen, "order", "rows", "path": [{"k", "scores"}], "scores"}``; ``model``
    holds the choice. k = 0 is the original, k = all the donor: neither is ever beaten by less.
    """
    rows = layer_scores(lab, model, score, donor)
    order = rank_sum(rows, metrics)
    path = []
    for k in range(len(order) + 1):
        scores = dict(score(lab.load(model, patched(lab, donor, set(order[:k])))))
        path.append({"k": k, "scores": scores})
    best = max(path, key=lambda point: objective(point["scores"]))
    chosen = order[: best["k"]]
    lab.load(model, patched(lab, donor, set(chosen)))
    return {"layers": chosen, "order": order, "rows": rows, "path": path, "scores": best["scores"]}
