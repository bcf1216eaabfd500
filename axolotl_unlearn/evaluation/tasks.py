"""The lm-eval tasks of ``eval_tasks/``: documents, scores and aggregation; how to register them.

The YAML files beside ``eval_tasks/semeval_unlearn/utils.py`` name these functions. Every document
returns every metric key (None where it does not apply): lm-eval 0.4.11 gathers sparse keys of
several processes in a way that mixes their values.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, EvaluationSets, load_sets, no_utility
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.fluency import repetition
from axolotl_unlearn.metrics.memorisation import TokenFacts, all_likelihood_metrics

#: Version of the tasks: raised when a score of the same generations would change.
TASK_VERSION = "1.0"
GROUP = "semeval_unlearn"
MARKER = ".axolotl-unlearn.json"

#: Figures of unlearn_likelihood, for either side.
LIKELIHOOD_METRICS = ("loss", "probability", "exact_memorisation", "extraction_strength",
                      "extraction_strength_one_over_n", "zlib_ratio", "min_k_0.2",
                      "min_k_plus_0.2")  # fmt: skip

#: What ``--metadata`` may hold for us; the model's arguments are merged into it by lm-eval.
_OPTIONS = ("data_dir", "mmlu_dir", "mmlu_shots", "min_members")

logger = logging.getLogger(__name__)
Docs = dict[str, Any]


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time only: a task says it of every row."""
    logger.warning("%s", message)


# ---------------------------------------------------------------- documents


def tasks_documents(**metadata: Any) -> Docs:
    """Rows to be generated, interleaved over the 12 cells so that ``--limit`` has all of them."""
    sets = _sets(metadata, "tasks")
    return _dataset(
        [{"cell": r.cell, "input": r.record.input, "output": r.record.output} for r in sets.rows]
    )


def mia_documents(**metadata: Any) -> Docs:
    """Documents split after their first token, members and non-members in turn.

    Their loss is the log-likelihood of the rest given the first token, over its tokens: the mean
    cross-entropy of the whole document. (``loglikelihood_rolling`` would also score the first
    token, after an end-of-sequence token.)
    """
    sets = _sets(metadata, "mia")
    split = first_token_splitter(_tokenizer(metadata))
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
    return _dataset(rows)


def mmlu_documents(**metadata: Any) -> Docs:
    """Four-option questions; without any, one placeholder whose scores are NaN (printed "nan")."""
    sets = _sets(metadata, "mmlu")
    rows: list[dict[str, Any]] = [
        {"context": o.context, "continuations": list(o.continuations), "answer": o.answer}
        for o in sets.utility
    ]
    if not rows:
        logger.warning("%s", no_utility(sets.folder))
        rows = [{"context": "n/a", "continuations": [" n/a"], "answer": -1}]
    original = metadata.get("original_utility")
    return _dataset(
        [{**row, "original": math.nan if original is None else float(original)} for row in rows]
    )


def likelihood_documents(**metadata: Any) -> Docs:
    """Answers of the forget and retain rows after their prompts, the two sides in turn."""
    sets = _sets(metadata, "tasks")
    return _dataset(
        [
            {"side": r.side, "context": r.record.input, "answer": f" {r.record.output}"}
            for r in sets.rows
        ]
    )


def _sets(metadata: dict[str, Any], part: str) -> EvaluationSets:
    options = {k: metadata[k] for k in _OPTIONS if metadata.get(k) is not None}
    sets = load_sets(**options, parts=(part,))
    for note in sets.notes:
        if part != "mmlu":
            logger.warning("%s", note)
    return sets


def drop_cached_requests() -> None:
    """What `lm_eval --cache_requests` kept of our tasks: it knows requests by the task's name, so
    that another data folder would get the scores of the first (lm-evaluation-harness#4123)."""
    from lm_eval.caching.cache import FILE_SUFFIX, PATH

    for name in (GROUP, "unlearn_likelihood", "muse_", "tofu-"):
        for path in Path(PATH).glob(f"requests-{name}*{FILE_SUFFIX}"):
            path.unlink(missing_ok=True)


def _dataset(rows: list[dict[str, Any]]) -> Docs:
    from datasets import Dataset

    drop_cached_requests()
    return {"test": Dataset.from_list(rows)}


def _tokenizer(metadata: dict[str, Any]):
    from transformers import AutoTokenizer

    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise UnlearnError(
            "this task counts tokens and needs the tokenizer: run with `--model_args "
            'pretrained=...`, or give it in `--metadata \'{"tokenizer": "..."}\'`.'
        )
    keys = ("revision", "subfolder", "trust_remote_code", "gguf_file")
    options = {key: metadata[key] for key in keys if metadata.get(key)}
    return AutoTokenizer.from_pretrained(str(name), **options)


def first_token_splitter(tokenizer) -> Callable[[str, str], tuple[str, str, int]]:
    """A function (text, name) -> (first token's text, the rest, number of tokens in the rest).

    A tokenizer that puts a BOS before plain text gives ("", text, all tokens): lm-eval then
    scores the text after the BOS. Where the first token is only part of a character, the split
    moves behind the first token that ends one.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    def split(text: str, name: str) -> tuple[str, str, int]:
        ids = encode(text)
        if len(ids) < 2:
            raise UnlearnError(
                f"document {name!r} is a single token; nothing can be predicted of it: remove it."
            )
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) == len(plain) + 1 and ids[1:] == plain:
            return "", text, len(plain)
        for end in range(1, len(text)):
            if text[end - 1].isspace():  # lm-eval moves white space at the end to the rest
                continue
            first = encode(text[:end])
            if first == ids[: len(first)] and len(first) < len(ids):
                return text[:end], text[end:], len(ids) - len(first)
        raise UnlearnError(
            f"document {name!r} cannot be split after its first token with this tokenizer; remove "
            "it."
        )

    return split


# ---------------------------------------------------------------- scores of one document


def score_task_row(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    kind = "completion" if doc["cell"].endswith("regurgitation") else "question"
    value = semeval.row_score(kind, results[0], doc["output"])
    scores: dict[str, Any] = dict.fromkeys(semeval.CELLS)
    scores[doc["cell"]] = value
    pair = (doc["cell"], value)
    broken = float(not results[0].strip() or repetition(results[0]).broken)
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


def score_likelihood(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """All likelihood metrics of one answer, under names of its side; None for the other side, and
    without the facts of each token."""
    facts = facts_of(results[0], "unlearn_likelihood: its figures")
    values = {} if facts is None else all_likelihood_metrics(facts, doc["answer"], ks=(0.2,))
    return {
        f"{side}_{name}": values.get(name) if side == doc["side"] else None
        for side in ("forget", "retain")
        for name in LIKELIHOOD_METRICS
    }


def facts_of(result: Any, what: str) -> TokenFacts | None:
    """The facts of each token, which `hf-unlearn` gives; None (said once) from other models."""
    facts = getattr(result, "facts", None)
    if facts is None:
        warn_once(
            f"{what} are NaN: they need the facts of each token; run `axolotl unlearn tasks run "
            "--model hf-unlearn`."
        )
    return facts


def best_option(log_likelihoods: Sequence[float]) -> int:
    """Number of the most probable option, the first of equals."""
    return max(range(len(log_likelihoods)), key=lambda i: (log_likelihoods[i], -i))


# ---------------------------------------------------------------- aggregation over documents


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def mean_of_present(values: Sequence[float | None]) -> float:
    """Mean of the values that apply; NaN of none."""
    return _or_nan(semeval.mean([value for value in values if value is not None]))


def standard_error(values: Sequence[float | None]) -> float:
    """Of the mean of the values that apply, taken as independent; NaN of fewer than two."""
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return math.nan
    return statistics.stdev(present) / math.sqrt(len(present))


def above_gate(pairs: Sequence[tuple[float | None, float]]) -> float:
    """1 where utility is not below the gate, 0 where it is; NaN without ``original_utility``."""
    utility = semeval.mean([correct for correct, _ in pairs if correct is not None])
    original = pairs[0][1]
    found = semeval.gate(utility, None if math.isnan(original) else original)
    return math.nan if found is None else float(not found["below_gate"])


def forget_cell(values: Sequence[float | None]) -> float:
    """1 - mean."""
    return 1.0 - mean_of_present(values)


def cells_with_rows(pairs: Sequence[tuple[str, float]]) -> int:
    return len({name for name, _ in pairs})


def harmonic_mean_of_cells(pairs: Sequence[tuple[str, float]]) -> float:
    cells, _ = semeval.cell_values(tuple(pair) for pair in pairs)
    return _or_nan(semeval.task_aggregate(cells))


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
        raise UnlearnError(str(error)) from None


def mia_score_of_pairs(pairs: Sequence[tuple[Any, ...]]) -> float:
    return semeval.mia_score(auc_of_pairs(pairs))


# ---------------------------------------------------------------- where the tasks are


def task_folder() -> Path:
    """The folder to give to ``lm_eval --include_path`` (read by the ``lm_eval.tasks`` entry)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "eval_tasks", package.parent / "eval_tasks"):
        if (folder / GROUP).is_dir():
            return folder
    raise UnlearnError(
        "the folder eval_tasks is not beside the package; install axolotl-unlearn again."
    )


def installed_task_folder() -> Path:
    """``lm_eval/tasks`` of the installed lm-eval, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UnlearnError("lm-eval is not installed; run `pip install lm_eval==0.4.11`.")
    return Path(spec.origin).parent / "tasks"


def register_tasks(target: Path | None = None) -> list[Path]:
    """Copy our tasks into the installed lm-eval, so that `lm_eval --tasks semeval_unlearn` works.

    A real folder is made, because lm-eval's search does not follow linked ones. A marker file
    lists what was copied, so that `unregister_tasks` removes exactly that; running this again
    after an upgrade of either package refreshes the copies.

    Returns:
        The files written.

    Raises:
        UnlearnError: The folder is someone else's, or cannot be written.
    """
    target = installed_task_folder() if target is None else target
    written: list[Path] = []
    try:
        for source in sorted(path for path in task_folder().iterdir() if path.is_dir()):
            files = sorted(
                path for path in source.iterdir() if path.is_file() and path.name[0] != "."
            )
            if not any(path.suffix == ".yaml" for path in files):
                continue
            home = target / source.name
            if home.exists():
                _remove(home)
            home.mkdir(parents=True)
            for path in files:
                shutil.copyfile(path, home / path.name)
                written.append(home / path.name)
            marker = {
                "by": "axolotl unlearn tasks register",
                "version": TASK_VERSION,
                "files": {path.name: _sha256(path) for path in files},
            }
            write_json(home / MARKER, marker)
    except OSError as error:
        raise UnlearnError(
            f"{target} cannot be written ({error.strerror}); run lm_eval with "
            "`--include_path eval_tasks` instead."
        ) from error
    return written


def unregister_tasks(target: Path | None = None) -> list[Path]:
    """Remove what `register_tasks` copied; returns the folders removed."""
    target = installed_task_folder() if target is None else target
    removed = []
    for source in sorted(path for path in task_folder().iterdir() if path.is_dir()):
        home = target / source.name
        if home.exists():
            _remove(home)
            removed.append(home)
    return removed


def _remove(home: Path) -> None:
    """Remove a folder of ours, file by file; refuse one without our marker or with more in it."""
    marker = home / MARKER
    if not marker.is_file():
        raise UnlearnError(
            f"{home} exists but was not made by `axolotl unlearn tasks register`; move it away."
        )
    ours = set(json.loads(marker.read_text(encoding="utf-8"))["files"]) | {MARKER, "__pycache__"}
    others = sorted(path.name for path in home.iterdir() if path.name not in ours)
    if others:
        raise UnlearnError(f"{home} holds {others[0]!r}, which is not ours; move it away first.")
    shutil.rmtree(home)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
