"""`val_set_size`: which rows a run evaluates, whole documents of each side.

Retain documents are held out from training. Forget documents are evaluated and trained: all that
is to be forgotten is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from axolotl_unlearn.columns import DOCUMENT, PAIR, ROLES
from axolotl_unlearn.errors import UnlearnError

LOG = logging.getLogger(__name__)


def evaluated(documents: Sequence[Any], share: float, seed: int) -> np.ndarray:
    """The rows of some documents that are about ``share`` of all, at least one: bool [row].

    Args:
        documents: The document of each row.
        share: Of the rows; documents are drawn until they have it.
    """
    names, owner, counts = np.unique(documents, return_inverse=True, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(names))
    enough = np.searchsorted(np.cumsum(counts[order]), share * len(documents))
    return np.isin(owner, order[: enough + 1])


def held_out(documents: Sequence[Any], size: float, total: int, seed: int) -> np.ndarray:
    """The retain rows that are not trained: bool [row].

    Args:
        documents: The document of each retain row.
        size: ``val_set_size``: a share of the rows of each side, or from 1 on the rows of all.
        total: Rows of all sides.

    Raises:
        UnlearnError: None would be left.
    """
    chosen = evaluated(documents, size if size < 1 else size / total, seed)
    if len(chosen) and chosen.all():
        raise UnlearnError(
            f"`val_set_size: {size:g}` would hold out all documents of the retain rows; set it to "
            "0, or give `test_datasets`.",
            code="data.val-set-size",
        )
    return chosen


def split(rows: Any, size: float, seed: int) -> tuple[Any, Any]:
    """A dataset of the columns of `axolotl_unlearn.data.table` as (training, evaluation) rows.

    Raises:
        UnlearnError: All retain documents would be held out.
    """
    role, documents, pair = (np.asarray(rows[name][:]) for name in ("role", DOCUMENT, PAIR))
    forget, retain, other = (
        np.flatnonzero(role == ROLES[side]) for side in ("forget", "retain", "alternative")
    )
    kept = retain[held_out(documents[retain].tolist(), size, len(rows), seed)]
    share = size if size < 1 else size / len(rows)
    asked = forget[evaluated(documents[forget].tolist(), share, seed)]
    answers = other[np.isin(pair[other], pair[asked])]  # an answer comes with its forget row
    LOG.warning(
        "val_set_size: %d retain rows are held out from training; %d forget rows are evaluated, "
        "and trained as all others.",
        len(kept), len(asked),
    )  # fmt: skip
    trained = np.setdiff1d(np.arange(len(rows)), kept)
    return rows.select(trained), rows.select(np.sort(np.concatenate([kept, asked, answers])))
