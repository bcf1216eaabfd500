"""Is one model better than another, or is it chance? Paired differences of every score.

Rows are paired by document: what is hard in a document for both cancels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import Difference, smallest_difference
from axolotl_unlearn.metrics.results import load_results


def compare(
    first: str,
    second: str,
    data_dir: str | os.PathLike[str] | None = None,
    out_dir: str | os.PathLike[str] = "out/eval",
) -> dict[str, Any]:
    """Compare two models that `evaluate` has measured, from its cache; no model is loaded.

    Settings and data are those of that evaluation unless given. A model that its results
    name is compared as it was then; others are named by path.

    Returns:
        ``{"first", "second", "differences": {metric: {"value", "low", "high", "p", "smallest"}},
        "sentence"}``, ``smallest`` the difference that these rows find in four of
        five data sets.

    Raises:
        UnlearnError: if one of them was not evaluated in this way.
    """
    from axolotl_unlearn.evaluation.cache import Cache
    from axolotl_unlearn.evaluation.measurement import Settings
    from axolotl_unlearn.evaluation.summary import scores_of
    from axolotl_unlearn.models import parse_models

    results = load_results(Path(out_dir, "results.json"))
    settings = Settings.read(results.more["settings"])
    known = {model.name: model for model in results.models}
    for name in (first, second):
        if name not in known and not set(name) & set("/=+") and not Path(name).exists():
            raise UnlearnError(
                f"{out_dir} holds no model {name!r}; it holds {', '.join(known)}.",
                code="eval.no-model",
            )
    sets = settings.load_sets(data_dir or results.data_dir)
    cache = Cache(Path(settings.store or Path(out_dir) / "cache"))
    names, scores = [], []
    for model in (first, second):
        stored = known.get(model)
        name, weights = model, stored and stored.weights
        if not weights:
            (spec,) = parse_models([f"{model}={stored.model}" if stored else model])
            name, weights = spec.name, cache.weights(spec)
        measured = cache.load(cache.key(weights, sets, settings), sets, settings)
        if measured is None:
            raise UnlearnError(
                f"{out_dir} holds no evaluation of {name!r} on these data; run "
                f"`axolotl-unlearn eval {model} --data {sets.folder} --out {out_dir}` first "
                "(with the same options, and without --no-cache).",
                code="eval.not-measured",
            )
        names.append(name)
        scores.append(scores_of(measured, sets))
    gaps = scores[0].differences(scores[1])
    figures = {
        metric: asdict(gap) | {"smallest": smallest_difference(gap.low, gap.high, len(gaps))}
        for metric, gap in gaps.items()
    }
    said = {"first": names[0], "second": names[1]}
    return said | {"differences": figures, "sentence": sentence(*names, gaps)}


def sentence(first: str, second: str, gaps: Mapping[str, Difference]) -> str:
    """In words which headline scores differ."""
    metrics = ("aggregate", "task_aggregate", "mia_score", "utility")
    differ = [m for m in metrics if m in gaps and gaps[m].significant]
    if not differ:
        return f"No headline score tells {first} from {second}: every interval holds 0."
    parts = []
    for metric in differ:
        gap = gaps[metric]
        word = "higher" if gap.value > 0 else "lower"
        parts.append(f"{word} in {metric} ({gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}])")
    return f"{first} is {', '.join(parts)} than {second}; the other headline scores do not differ."
