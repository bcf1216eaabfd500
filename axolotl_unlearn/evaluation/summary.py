"""From what a model did to what the results say of it: pure, no model and no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axolotl_unlearn.data.records import document_id
from axolotl_unlearn.evaluation.generic import drop
from axolotl_unlearn.evaluation.membership_lab import membership_lab
from axolotl_unlearn.evaluation.models import ModelSpec
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.membership import Baseline
from axolotl_unlearn.metrics.statistics import (
    Area,
    Mean,
    auc_interval,
    ideal_membership,
    interval,
    paired_difference,
    semeval_draws,
    widened,
)

if TYPE_CHECKING:
    from axolotl_unlearn.evaluation.measured import Measured


def summarise(
    spec: ModelSpec,
    found: Measured,
    sets: EvaluationSets,
    *,
    original: Measured | None = None,
    is_original: bool = False,
    collapse: dict[str, Any] | None = None,
    blind: Mapping[str, Baseline] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    with_text: bool = False,
) -> dict[str, Any]:
    """One entry of ``models`` in results.json."""
    rows = [row for row in sets.rows if row.key in found.values]
    cells, counts = semeval.cell_values((row.cell, found.values[row.key]) for row in rows)
    auc = semeval.mia_auc(found.member_loss, found.nonmember_loss)
    task = semeval.task_aggregate(cells)
    score = semeval.mia_score(auc)
    utility = semeval.mean(found.options)
    auc_bounds = _auc_bounds(found)
    intervals = {}
    if resamples:
        intervals = _intervals(found, sets, resamples, seed)
    intervals["mia_auc"] = list(auc_bounds)
    ideal = ideal_membership(len(sets.member), len(sets.nonmember))
    before = semeval.mean(original.options) if original is not None else None
    result = {
        "name": spec.name,
        "model": spec.source,
        "role": "original" if is_original else _role(spec.name),
        "cells": cells,
        "n": {
            **counts,
            "cells": sum(count > 0 for count in counts.values()),
            "member": len(sets.member),
            "nonmember": len(sets.nonmember),
            "utility": len(found.options),
        },
        "intervals": intervals,
        "task_aggregate": task,
        "mia_auc": auc,
        "mia_score": score,
        "utility": utility,
        "utility_source": sets.utility_source,
        "aggregate": semeval.aggregate(task, score, utility),
        "ideal": {"mia_score": ideal.expected, "mia_score_tail": ideal.tail},
        "collapse": collapse,
        "gate": semeval.gate(utility, before),
        "forgetting": semeval.forgetting(auc, auc_bounds),
        "answers": _answers(found, sets),
        "stopped": semeval.mean([float(value) for value in found.stopped.values()]),
        "seconds": found.seconds,
        "likelihood": {
            "member_loss": found.member_loss,
            "nonmember_loss": found.nonmember_loss,
            "extraction_strength_forget": found.extraction,
        },
    }
    if blind is not None:
        result["membership"] = _membership(found, sets, blind)
    if sets.utility_source == "general" and any(o.subject for o in sets.utility):
        result["utility_groups"] = _utility_groups(found, sets)
    if found.generic is not None:
        result["general"] = {k: v for k, v in found.generic.items() if k != "items"}
        if original is not None and original.generic is not None and not is_original:
            result["general"]["drop"] = drop(original.generic, found.generic)
    if with_text:
        result["examples"] = _examples(found, sets)
    return result


def _utility_groups(found: Measured, sets: EvaluationSets) -> dict[str, dict[str, float]]:
    """Utility of each group of the data folder's questions: value and n."""
    groups: dict[str, list[int]] = {}
    for question, right in zip(sets.utility, found.options, strict=True):
        groups.setdefault(question.subject or "other", []).append(right)
    return {name: {"value": semeval.mean(v), "n": len(v)} for name, v in sorted(groups.items())}


def _answers(found: Measured, sets: EvaluationSets) -> dict[str, dict[str, float]]:
    """Of each side's questions: number, share of exact answers, share that contain the answer.

    Exact match wants the whole generation; a model that says the answer and goes on gets 0.
    A side is left out where an earlier version of the cache does not know.
    """
    answers = {}
    for side in ("forget", "retain"):
        keys = [r.key for r in sets.rows if r.side == side and r.record.kind == "question"]
        if keys and all(key in found.contained for key in keys):
            answers[side] = {
                "n": len(keys),
                "exact": semeval.mean([found.values[key] for key in keys]),
                "contained": semeval.mean([float(found.contained[key]) for key in keys]),
            }
    return answers


def _role(name: str) -> str:
    return "retrained" if name == "retrained" else "candidate"


def _auc_bounds(found: Measured) -> tuple[float, float]:
    members = [-value for value in found.member_loss]
    nonmembers = [-value for value in found.nonmember_loss]
    if min(len(members), len(nonmembers)) < 2:
        return (0.0, 1.0)
    return auc_interval(members, nonmembers)


def _intervals(
    found: Measured, sets: EvaluationSets, resamples: int, seed: int
) -> dict[str, list[float]]:
    """Percentile intervals over documents: rows of one document are drawn together."""
    cells, membership, utility = bootstrap_scores(found, sets)
    draws = semeval_draws(cells, membership, utility, n=resamples, seed=seed)
    bounds = {}
    for name, values in draws.items():
        low, high = interval(values)
        if name in cells:
            low, high = widened(cells[name], (low, high))
        elif name == "utility" and utility is not None:
            low, high = widened(utility, (low, high))
        if math.isfinite(low) and math.isfinite(high):
            bounds[name] = [low, high]
    return bounds


def bootstrap_scores(
    found: Measured, sets: EvaluationSets
) -> tuple[dict[str, Mean], Area, Mean | None]:
    """Row values with their documents, for intervals and for paired comparison of models."""
    grouped: dict[str, tuple[list[float], list[tuple[str, str]]]] = {}
    for row in sets.rows:
        if row.key not in found.values:
            continue
        value = found.values[row.key]
        values, clusters = grouped.setdefault(row.cell, ([], []))
        values.append(1 - value if row.side == "forget" else value)
        clusters.append((row.side, row.record.document))
    cells = {name: Mean(*grouped[name]) for name in semeval.CELLS if name in grouped}
    membership = Area(
        [-value for value in found.member_loss],
        [-value for value in found.nonmember_loss],
        # A member that is a forget document is drawn together with its rows.
        [("forget", document_id(name)) for name, _ in sets.member],
        [("nonmember", document_id(name)) for name, _ in sets.nonmember],
    )
    utility = None
    if found.options:
        questions = [("utility", number) for number in range(len(found.options))]
        utility = Mean([float(value) for value in found.options], questions)
    return cells, membership, utility


def _membership(
    found: Measured, sets: EvaluationSets, blind: Mapping[str, Baseline]
) -> dict[str, Any]:
    split = len(found.member_loss)
    return membership_lab(
        found.member_loss,
        found.nonmember_loss,
        [text for _, text in sets.member],
        [text for _, text in sets.nonmember],
        attacks={name: (all_[:split], all_[split:]) for name, all_ in found.attacks.items()},
        blind=blind,
    )


def add_distances(
    results: list[dict[str, Any]],
    measured: Mapping[str, Measured],
    sets: EvaluationSets,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> None:
    """``distance`` of each model from the retrained one: value, interval and p a metric.

    Paired: both models are resampled over the same documents. Nothing is added where no model of
    the role "retrained" was evaluated.
    """
    target = next((result for result in results if result["role"] == "retrained"), None)
    if target is None or not resamples:
        return
    draws = {
        result["name"]: semeval_draws(
            *bootstrap_scores(measured[result["name"]], sets), n=resamples, seed=seed
        )
        for result in results
    }

    def value(result: dict[str, Any], metric: str) -> float | None:
        return result["cells"][metric] if metric in semeval.CELLS else result[metric]

    for result in results:
        if result is target:
            continue
        result["distance"] = {}
        for metric, theirs in draws[target["name"]].items():
            ours = draws[result["name"]].get(metric)
            first, second = value(result, metric), value(target, metric)
            if ours is None or first is None or second is None:
                continue
            gap = paired_difference(ours, theirs, value=first - second)
            result["distance"][metric] = {
                "value": gap.value,
                "interval": [gap.low, gap.high],
                "p": gap.p,
            }


def _examples(found: Measured, sets: EvaluationSets, per_cell: int = 2) -> list[dict[str, Any]]:
    """The first rows of each cell with what the model wrote."""
    counts = dict.fromkeys(semeval.CELLS, 0)
    examples = []
    for row in sets.rows:
        if row.key not in found.texts or counts[row.cell] == per_cell:
            continue
        counts[row.cell] += 1
        examples.append(
            {
                "id": row.record.id,
                "kind": row.record.kind,
                "side": row.side,
                "prompt": row.record.input,
                "expected": row.record.output,
                "generated": found.texts[row.key],
            }
        )
    return examples
