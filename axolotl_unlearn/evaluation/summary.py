"""From what a model did to what the results say of it: pure, no model and no file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from axolotl_unlearn.data.documents import with_prompt
from axolotl_unlearn.data.records import document_id
from axolotl_unlearn.evaluation.sets import EvaluationSets, as_one, clusters_of
from axolotl_unlearn.metrics import intervals as metrics
from axolotl_unlearn.metrics import membership as lab
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.audit import audits, summary_of
from axolotl_unlearn.metrics.intervals import area_of, mean_of
from axolotl_unlearn.metrics.learned import learned_attack, some_texts
from axolotl_unlearn.metrics.results import Model, Texts, read
from axolotl_unlearn.metrics.verdict.criteria import ANY_SCRIPT
from axolotl_unlearn.metrics.words import words

if TYPE_CHECKING:
    from axolotl_unlearn.data.records import Record
    from axolotl_unlearn.evaluation.measurement import Measured, Settings


def summarise(
    measured: Measured, sets: EvaluationSets, settings: Settings, original: Measured | None,
    blind: Mapping[str, lab.Baseline] | None,
) -> dict[str, Any]:  # fmt: skip
    """An entry of ``models`` in results.json, but for what the model is called and its collapse."""
    cells, counts = _cells(measured.values, sets)
    texts = bool(measured.member_loss and measured.nonmember_loss)
    area = semeval.mia_auc(measured.member_loss, measured.nonmember_loss) if texts else None
    task = semeval.task_aggregate(cells)
    score = semeval.mia_score(area) if texts else None
    utility = semeval.mean(measured.options)
    intervals = scores_of(measured, sets).intervals()
    before = semeval.mean(original.options) if original is not None else None
    result = {
        "cells": cells,
        "n": {
            **counts,
            "cells": sum(count > 0 for count in counts.values()),
            "member": len(measured.member_loss),
            "nonmember": len(measured.nonmember_loss),
            "utility": len(measured.options),
        },
        "limit": settings.limit,
        "max_gen_toks": settings.max_gen_toks,
        "intervals": {name: list(ends) for name, ends in intervals.items()},
        "task_aggregate": task,
        "mia_auc": area,
        "mia_score": score,
        "utility": utility,
        "utility_chance": semeval.mean([1 / len(one.continuations) for one in sets.utility]),
        "aggregate": semeval.aggregate(task, score, utility),
        "gate": semeval.gate(utility, before),
        **_any_script(measured, sets),
        "answers": _answers(measured, sets),
        "seconds": measured.seconds,
        **text_facts(measured, sets, settings.samples),
    }
    if blind is not None and texts:
        result["membership"] = _membership(measured, sets, blind)
    if measured.options and any(one.subject for one in sets.utility):
        result["utility_groups"] = _utility_groups(measured, sets)
    return result


def _cells(values: Mapping[str, float], sets: EvaluationSets) -> tuple[dict, dict]:
    """Cells and their numbers of rows, from scores of rows."""
    rows = [row for row in sets.rows if row.key in values]
    return semeval.cell_values((row.cell, values[row.key]) for row in rows)


def _utility_groups(measured: Measured, sets: EvaluationSets) -> dict[str, dict[str, float]]:
    """Utility of each group of the data folder's questions: value and n."""
    groups: dict[str, list[int]] = {}
    for question, right in zip(sets.utility, measured.options, strict=True):
        groups.setdefault(question.subject or "other", []).append(right)
    return {name: {"value": semeval.mean(v), "n": len(v)} for name, v in sorted(groups.items())}


def text_clusters(sets: EvaluationSets, members: str = "member") -> tuple[list[str], list[str]]:
    """`clusters_of` the sets."""
    return clusters_of(sets.member, sets.nonmember, members)


def text_facts(measured: Measured, sets: EvaluationSets, samples: int = 0) -> dict[str, Any]:
    """Of an entry what is known text by text; ``samples`` as in `Settings`."""
    texts = bool(measured.member_loss and measured.nonmember_loss)
    clusters = text_clusters(sets) if texts else ([], [])
    ids = [[n for n, _ in side] if texts else [] for side in (sets.member, sets.nonmember)]
    rows, columns = sets.forget, Texts.COLUMNS
    keys = [f"forget/{row.id}" for row in rows]
    asked = [(key, key in measured.contained) for key in keys]
    drawn = [measured.said_of_samples.get(key, 0) / samples for key in keys] if samples else []
    return {
        "likelihood": {
            "member_loss": measured.member_loss,
            "nonmember_loss": measured.nonmember_loss,
            "member_id": ids[0],
            "nonmember_id": ids[1],
            "member_cluster": clusters[0],
            "nonmember_cluster": clusters[1],
            "member_document": [*map(document_id, ids[0])],
            "attacks": attack_losses(measured),
        },
        # What comes out of each forget row, and of members and non-members.
        "extraction": {
            "id": [row.id for row in rows],
            "document": [row.document for row in rows],
            "cluster": as_one(((row.input, row.output), row.cluster) for row in rows),
            **{name: [one[name] for one in measured.answers] for name in (*columns, "logp")},
            "exact": [bool(measured.values.get(key)) if is_so else None for key, is_so in asked],
            "contained": [measured.contained.get(key) for key in keys],
            "drawn": drawn,
            "derived": derived(sets),
            **{
                side: {name: [one[name] for one in getattr(measured, side)] for name in columns}
                for side in ("member", "nonmember")
            },
        },
    }


#: A word that so many retained answers have, and this share of them, is one of their form: rather
#: guessed than an answer that `metrics.audit.unlikely` calls no guess.
COMMON, COMMON_SHARE = 3, 0.05


def derived(sets: EvaluationSets) -> list[bool]:
    """Of each forget row: is half of its answer's words in its question, and is each of the others
    common among retained answers? An e-mail address is made of a name so."""
    kept = {(row.record.input, row.record.output) for row in sets.rows
            if (row.side, row.record.kind) == ("retain", "question")}  # fmt: skip
    counts = Counter(word for _, answer in kept for word in {*words(answer)})
    common = {w for w, n in counts.items() if n >= max(COMMON, COMMON_SHARE * len(kept))}

    def follows(row: Record) -> bool:
        answer, asked = words(row.output), {*words(row.input)}
        own = [word for word in answer if word not in asked]
        asks = row.kind == "question" and bool(answer)
        return asks and 2 * len(own) <= len(answer) and common.issuperset(own)

    return [follows(row) for row in sets.forget]


def _any_script(measured: Measured, sets: EvaluationSets) -> dict[str, dict[str, Any]]:
    """Cells whose official ROUGE-L, which sees ASCII only, is off; intervals of these and sides."""
    if not measured.any_script:
        return {"any_script": {}}
    values = measured.values | measured.any_script
    limit, official = ANY_SCRIPT, _cells(measured.values, sets)[0]
    known = {name: v for name, v in _cells(values, sets)[0].items() if v is not None}
    off = {name: v for name, v in known.items() if abs(v - official[name]) >= limit}
    if not off:
        return {"any_script": off}
    scores = scores_of(measured, sets).cells
    better = scores_of(replace(measured, values=values), sets).cells
    cells = {name: (better if name in off else scores)[name] for name in scores}
    bounds = metrics.Scores(cells).intervals()
    ends = {name: list(bounds[name]) for name in (*semeval.SIDES, *off) if name in bounds}
    return {"any_script": off, "any_script_intervals": ends}


def _answers(measured: Measured, sets: EvaluationSets) -> dict[str, dict[str, float]]:
    """Of each side's questions: number, share of exact answers, share that contain the answer."""
    answers = {}
    for side in ("forget", "retain"):
        keys = [r.key for r in sets.rows if r.side == side and r.record.kind == "question"]
        if keys:
            answers[side] = {
                "n": len(keys),
                "exact": semeval.mean([measured.values[key] for key in keys]),
                "contained": semeval.mean([float(measured.contained[key]) for key in keys]),
            }
    return answers


AUDIT_FILE = "audit.jsonl"
_RETRAINED = re.compile(r"retrained([-_]?\d+)?")


def role_of(name: str, names: Iterable[str]) -> str:
    """By name: retrained, else candidate; of several retrained ones (retrained-2 ...: other seeds)
    the first by name, the others are references: the order of models decides nothing."""
    retrained = sorted(filter(_RETRAINED.fullmatch, names))
    role = "retrained" if name in retrained[:1] else "reference"
    return role if name in retrained else "candidate"


def scores_of(measured: Measured, sets: EvaluationSets) -> metrics.Scores:
    """Row values with their documents, for intervals and for paired comparison of models."""
    grouped: dict[str, tuple[list[float], list[str]]] = {}
    rows = [row for row in sets.rows if row.key in measured.values]
    named = (f"author: {one.record.author}" if one.record.author
             else f"{one.side}: {one.record.document}" for one in rows)  # fmt: skip
    texts = ((one.side, one.record.input, one.record.output) for one in rows)
    for row, cluster in zip(rows, as_one(zip(texts, named, strict=True)), strict=True):
        value = measured.values[row.key]
        values, clusters = grouped.setdefault(row.cell, ([], []))
        values.append(1 - value if row.side == "forget" else value)
        clusters.append(cluster)
    cells = {name: mean_of(*grouped[name]) for name in semeval.CELLS if name in grouped}
    membership = None
    if measured.member_loss and measured.nonmember_loss:
        losses = (measured.member_loss, measured.nonmember_loss)
        # A member that is a forget document is drawn together with its rows.
        clusters = text_clusters(sets, "forget")
        membership = area_of(*([-value for value in side] for side in losses), clusters)
    utility = None
    if measured.options:
        asked = (((one.context, one.continuations), n) for n, one in enumerate(sets.utility))
        questions = [("utility", number) for number in as_one(asked)]
        utility = mean_of([float(value) for value in measured.options], questions)
    return metrics.Scores(cells, membership, utility)


def _membership(
    measured: Measured, sets: EvaluationSets, blind: Mapping[str, lab.Baseline]
) -> dict[str, Any]:
    """AUC of every attack with its interval, and whether the sets differ without any model: then
    the figures mean nothing."""
    losses = {name: tuple(sides.values()) for name, sides in attack_losses(measured).items()}
    losses = {"loss": (measured.member_loss, measured.nonmember_loss)} | losses
    clusters = text_clusters(sets)
    pairs = {name: [-np.asarray(side, float) for side in pair] for name, pair in losses.items()}
    warning = lab.blind_sentence(blind)
    return {
        "attacks": {
            name: {"auc": metrics.auc(*pair), "interval": area_of(*pair, clusters).interval()}
            for name, pair in pairs.items()
        },
        "blind": dict(blind),
        "meaningful": warning is None,
        "sentence": warning,
    }


def add_distances(
    results: list[dict[str, Any]],
    measured: Mapping[str, Measured],
    sets: EvaluationSets,
) -> None:
    """``distance`` of each model from the retrained one, if there is one, paired: value, interval
    and p a metric."""
    target = next((result for result in results if result["role"] == "retrained"), None)
    if target is None:
        return
    for result in results:
        if result is target:
            continue
        own, its = (scores_of(measured[one["name"]], sets) for one in (result, target))
        gaps = own.differences(its)
        result["distance"] = {
            metric: {"value": gap["value"], "interval": [gap["low"], gap["high"]], "p": gap["p"]}
            for metric, gap in gaps.items()
        }


def attack_losses(measured: Measured) -> dict[str, dict[str, list[float]]]:
    """Scores of every attack but the loss itself, by side, low = rather a member."""
    sides = {"member": measured.member, "nonmember": measured.nonmember}
    return {
        name: {side: [one["attacks"][name] for one in some] for side, some in sides.items()}
        for name in (measured.member[0]["attacks"] if all(sides.values()) else ())
    }


def add_learned(
    results: list[dict[str, Any]], measured: Mapping[str, Measured], sets: EvaluationSets
) -> None:
    """``learned`` of each candidate with as many texts as it needs: AUC and p of the learned
    attack, p of each document, and what it is ``against``: the features of the retrained model,
    from which it sees the differences, or chance."""
    other = next((one["name"] for one in results if one["role"] == "retrained"), None)
    names = [document_id(name) for name, _ in some_texts(sets.member)]
    texts = [with_prompt(text) for _, text in some_texts(sets.member)]
    many = Counter(name for name, _ in {*zip(names, texts, strict=True)})  # equal texts are one
    clusters = [*map(some_texts, text_clusters(sets))]
    for result in results:
        models = [measured[name] for name in (result["name"], other) if name is not None]
        sides = [[[text["features"] for text in getattr(one, side)] for one in models]
                 for side in ("member", "nonmember")]  # fmt: skip
        if result["role"] != "candidate" or not all(all(each) for each in sides):
            continue
        seen = [np.subtract(*each) if other is not None else np.array(each[0]) for each in sides]
        if (attack := learned_attack(*map(some_texts, seen), *clusters)) is not None:
            told: dict[str, float] = {}  # the smallest p of its texts, times their number
            for name, p in zip(names, attack.each.tolist(), strict=True):
                told[name] = min(told.get(name, 1.0), p * many[name])
            result["learned"] = {"auc": attack.auc, "p": attack.p, "against": other or "chance"}
            result["learned"]["documents"] = told


def add_audits(
    results: list[dict[str, Any]],
    measured: Mapping[str, Measured],
    sets: EvaluationSets,
    with_text: bool = False,
) -> list[dict[str, Any]]:
    """``audit`` (counts) of each candidate, and the lines of audit.jsonl of all of them.

    Args:
        with_text: also the prompts, expected and generated texts of the rows.
    """
    records = {record.id: record for record in sets.forget}
    tasks = {record.document: record.task for record in sets.forget}
    models = [read(Model, result, result["name"]) for result in results]
    each, lines = audits(models), []
    for result, model in zip(results, models, strict=True):
        if model.name not in each:
            continue
        documented = each[model.name]
        kinds = 2 if model.learned is not None else 1
        counts = summary_of(documented, len(sets.nonmember), kinds)
        result["audit"] = counts | {"file": AUDIT_FILE}
        for line in documented:
            if with_text:
                texts = measured[model.name].texts
                for row in line["rows"]:
                    record = records[row["id"]]
                    row |= {"prompt": record.input, "expected": record.output}
                    row["generated"] = texts.get(f"forget/{record.id}")
            lines.append({"model": model.name, "task": tasks.get(line["document"], ""), **line})
    return lines
