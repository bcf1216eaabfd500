"""Scores over a grid of merges and along a path through weight space, on one resident model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import nn

from axolotl_unlearn.merging.recipe import Recipe
from research.merging.lab import Lab, Score


def sweep(
    lab: Lab,
    model: nn.Module,
    score: Score,
    recipes: Iterable[Recipe],
    *,
    log: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """One row a recipe: ``{"recipe": ..., "scores": ...}``; the model keeps the last merge."""
    rows = []
    for recipe in recipes:
        scores = dict(score(lab.load(model, recipe)))
        rows.append({"recipe": recipe.for_parents(len(lab.parents)).to_dict(), "scores": scores})
        log(f"{recipe.method} {recipe.space} {recipe.density:g} {recipe.scale}")
    return rows


def densities(recipe: Recipe, values: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0)) -> list[Recipe]:
    """Figure 5 of arXiv 2503.21088 used .6, .8 and 1."""
    return [replace(recipe, density=value) for value in values]


def table_two_recipes(recipe: Recipe, *, factors: bool) -> list[Recipe]:
    """The five methods of the paper's table 2, in each space and at both scales."""
    from axolotl_unlearn.merging.recipe import METHODS, SCALES

    spaces = ("delta", "factors") if factors else ("delta",)
    return [
        replace(recipe, method=method, space=space, scale=scale)
        for space in spaces
        for method in METHODS
        for scale in SCALES
    ]


def path(
    lab: Lab,
    model: nn.Module,
    score: Score,
    stops: Sequence[Recipe | int | None],
    *,
    names: Sequence[str] | None = None,
    points: int = 5,
) -> list[dict]:
    """Scores along straight lines between ``stops`` (a parent's number, a merge, None = base).

    Rows ``{"position": 0..len(stops) - 1, "stop": name or None, "scores": ...}``; ``points``
    steps a segment. The usual call: [0, Recipe(...), 1], from over through merged to under.
    """
    ends = []
    for stop in stops:
        if stop is None:
            ends.append(dict(lab.base_weights))
        elif isinstance(stop, Recipe):
            ends.append({**lab.base_weights, **dict(lab.weights(stop))})
        else:
            ends.append(dict(lab.parent_weights(stop)))
    labels = list(names) if names else [str(number) for number in range(len(stops))]
    rows = []
    for segment in range(len(ends) - 1):
        first, second = ends[segment], ends[segment + 1]
        for step in range(points + (segment == len(ends) - 2)):
            share = step / points
            mixed = {name: first[name].lerp(second[name], share) for name in first}
            stop = {0: labels[segment], points: labels[segment + 1]}.get(step)
            rows.append(
                {
                    "position": segment + share,
                    "stop": stop,
                    "scores": dict(score(lab.load(model, mixed))),
                }
            )
    return rows
