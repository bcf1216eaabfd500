"""The official scores of SemEval-2025 Task 4 as lm-eval tasks: documents, scores, aggregation.

Every document returns every metric key (None where it does not apply): lm-eval 0.4.11 gathers
sparse keys of several processes in a way that mixes their values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.lm_tasks import (
    UnlearnTask,  # noqa: F401
    context_in,
    dataset,
    first_token_splitter,
    forget_cell,  # noqa: F401
    mean_of_present,  # noqa: F401
    or_nan,
    sets_of,
    tokenizer_of,
    warn_once,
)
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, no_utility
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.fluency import repeats

Docs = dict[str, Any]


def tasks_documents(**metadata: Any) -> Docs:
    """Rows to be generated, interleaved over the 12 cells so that ``--limit`` has all of them."""
    sets = sets_of(metadata, "tasks")
    return dataset(
        [{"cell": r.cell, "input": r.record.input, "output": r.record.output} for r in sets.rows]
    )


def mia_documents(**metadata: Any) -> Docs:
    """Documents split after their first token, or their prompt, members and non-members in turn.

    Their loss is the log-likelihood of the rest given the first token, over its tokens: the mean
    cross-entropy of the whole document. (``loglikelihood_rolling`` would also score the first
    token, after an end-of-sequence token.)
    """
    sets = sets_of(metadata, "mia")
    split = first_token_splitter(tokenizer_of(metadata), context_in(metadata))
    rows = []
    for side, identifier, text in sets.documents:
        context, rest, tokens = split(text, identifier)
        rows.append(
            {
                "member": side == "member",
                "context": context,
                "rest": rest,
                "tokens": tokens,
                "least": int(metadata.get("min_members") or MIN_MEMBERS),
            }
        )
    return dataset(rows)


def mmlu_documents(**metadata: Any) -> Docs:
    """Four-option questions; without any, one placeholder whose scores are NaN (printed "nan")."""
    sets = sets_of(metadata, "mmlu")
    rows: list[dict[str, Any]] = [
        {"context": o.context, "continuations": list(o.continuations), "answer": o.answer}
        for o in sets.questions
    ]
    if not rows:
        warn_once(no_utility(sets.folder))
        rows = [{"context": "n/a", "continuations": [" n/a"], "answer": -1}]
    original = metadata.get("original_utility")
    return dataset(
        [{**row, "original": math.nan if original is None else float(original)} for row in rows]
    )


def score_task_row(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    kind = "completion" if doc["cell"].endswith("regurgitation") else "question"
    value = semeval.row_score(kind, results[0], doc["output"])
    scores: dict[str, Any] = dict.fromkeys(semeval.CELLS)
    scores[doc["cell"]] = value
    pair = (doc["cell"], value)
    broken = float(not results[0].strip() or repeats(results[0]))
    return {
        **scores,
        "cells": pair,
        "task_aggregate": pair,
        "aggregate": pair,
        "broken_outputs": broken,
    }


def score_document(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    loss = -results[0][0] / doc["tokens"]
    pair = (bool(doc["member"]), loss, doc["least"])
    return {
        "member_loss": loss if doc["member"] else None,
        "nonmember_loss": None if doc["member"] else loss,
        "mia_auc": pair,
        "mia_score": pair,
        "aggregate": pair,
    }


def score_option(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    if doc["answer"] < 0:
        return {"mmlu": None, "aggregate": None, "above_gate": (None, doc["original"])}
    correct = float(best_option([result[0] for result in results]) == doc["answer"])
    return {"mmlu": correct, "aggregate": correct, "above_gate": (correct, doc["original"])}


def best_option(log_likelihoods: Sequence[float]) -> int:
    """Number of the most probable option, the first of equals."""
    if any(map(math.isnan, log_likelihoods)):
        raise UnlearnError(
            "the log-likelihood of an option is NaN; check the model's weights and its precision.",
            code="tasks.not-finite",
        )
    return max(range(len(log_likelihoods)), key=lambda i: (log_likelihoods[i], -i))


def above_gate(pairs: Sequence[tuple[float | None, float]]) -> float:
    """1 where utility is not below the gate, 0 where it is; NaN without ``original_utility``."""
    utility = semeval.mean([correct for correct, _ in pairs if correct is not None])
    original = pairs[0][1]
    found = semeval.gate(utility, None if math.isnan(original) else original)
    return math.nan if found is None else float(not found["below_gate"])


def cells_with_rows(pairs: Sequence[tuple[str, float]]) -> int:
    return len({name for name, _ in pairs})


def harmonic_mean_of_cells(pairs: Sequence[tuple[str, float]]) -> float:
    cells, _ = semeval.cell_values(tuple(pair) for pair in pairs)
    return or_nan(semeval.task_aggregate(cells))


def auc_of_pairs(pairs: Sequence[tuple[Any, ...]]) -> float:
    """AUC of (member, loss, fewest of a side); NaN where ``--limit`` leaves fewer of one."""
    members = [pair[1] for pair in pairs if pair[0]]
    nonmembers = [pair[1] for pair in pairs if not pair[0]]
    least = max((pair[2] for pair in pairs if len(pair) > 2), default=1)
    if min(len(members), len(nonmembers)) < least:
        warn_once(
            f"the AUC of {len(members)} members and {len(nonmembers)} non-members is NaN: an AUC "
            f"needs {least} of each; raise --limit, or `min_members` of --metadata says otherwise."
        )
        return math.nan
    try:
        return semeval.mia_auc(members, nonmembers)
    except ValueError as error:
        raise UnlearnError(str(error), code="tasks.not-finite") from None


def mia_score_of_pairs(pairs: Sequence[tuple[Any, ...]]) -> float:
    return semeval.mia_score(auc_of_pairs(pairs))
