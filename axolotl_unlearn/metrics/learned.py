"""A learned membership attack: a small classifier over what the model does to each token.

Cross-validated over documents: what an attacker with some labelled texts can do. Features of a text
are summaries of its tokens' log-probability, of the entropy there, of the standardised
log-probability (Min-K%++) and of their windows. Scores of one training fold depend on each other,
so no rank test holds for them; the classifier is linear in its labels, so labels are permuted and
the whole cross-validation is done again for each permutation, as one matrix product.

Shape letters: N members, M non-members, T = N + M texts, F features, n tokens, B permutations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from torch import Tensor

from axolotl_unlearn.metrics.intervals import numbered
from axolotl_unlearn.metrics.memorisation import TokenFacts, exact_memorisation, longest_run

Array = NDArray[np.float64]

QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARES = (0.1, 0.2, 0.4)
WINDOW = 8
#: Ridge penalty in units of the variance of a feature.
PENALTY = 0.3
#: Texts of a kind that it sees: its memory grows with their square.
MOST_TEXTS = 2000
#: F of `token_features`: so many of each of its four values.
FEATURES = 4 * (4 + len(QUANTILES) + len(SHARES))
#: Fewer texts of a kind than this train no classifier.
MIN_TEXTS = 20


def text_features(facts: TokenFacts) -> list[float]:
    """``[2 + F]`` of one text; its length is none of them, because that needs no model."""
    features = [exact_memorisation(facts), longest_run(facts) / len(facts)]
    columns = (facts.logp, facts.mean, facts.sd)
    return features + token_features(*(torch.as_tensor(c).double() for c in columns)).tolist()


def token_features(logp: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    """``[F]`` of a text from `TokenFacts` ``[n]``, with gradient; F is `FEATURES`."""
    apart = (logp - mean) / sd.clamp(min=1e-6)
    # The mean log-probability over the vocabulary is minus the entropy.
    values = torch.stack([logp, apart, mean, logp - mean]).clamp(-50.0, 50.0)  # [4, n]
    n = len(logp)
    ordered = values.sort(-1).values
    low = [ordered[:, : max(1, int(k * n))].mean(-1) for k in SHARES]
    windows = values.unfold(-1, min(WINDOW, n), 1).mean(-1)
    parts = [values.mean(-1), values.std(-1, correction=0)]
    for place in ((n - 1) * q for q in QUANTILES):  # `torch.quantile` sorts anew, and waits
        below, above = math.floor(place), math.ceil(place)
        parts.append(torch.lerp(ordered[:, below], ordered[:, above], place - below))
    return torch.stack([*parts, *low, windows.amin(-1), windows.amax(-1)], -1).flatten()


@dataclass(frozen=True)
class Learned:
    """What the attack finds.

    Attributes:
        members, nonmembers: Out-of-fold scores ``[N]``, ``[M]``, high = rather a member.
        auc: Of these scores; a little below 0.5 on average where nothing was learnt.
        p: One-sided, exact: the share of permutations of the labels with an AUC as large. None
            where no document of a member has as many texts as one of the others.
        each: ``[N]`` exact conformal p-values of "this member is one of the non-members": labelled
            as one, the share of the M + 1 that look as much like a member.
        null: ``[B]``: AUC of each permutation, the same ones for two attacks on the same texts.
    """

    members: Array
    nonmembers: Array
    auc: float
    p: float | None
    each: Array
    null: Array


def learned_attack(
    members: ArrayLike,
    nonmembers: ArrayLike,
    member_documents: Sequence[Hashable] | None = None,
    nonmember_documents: Sequence[Hashable] | None = None,
    *,
    folds: int = 5,
    repeats: int = 4,
    permutations: int = 4999,
    seed: int = 0,
    penalty: float = PENALTY,
) -> Learned | None:
    """Ridge regression of "member" on standardised features, cross-validated, with its exact test.

    Labels are permuted over documents with equally many texts; folds and standardisation do not see
    them (Phipson and Smyth 2010 for the + 1). What is on both sides, as an author is, is whole in
    one fold, and labels are permuted within it: over its documents (`Cluster`).

    Args:
        members, nonmembers: Features ``[N, F]`` and ``[M, F]``, or their differences from those of
            a retrained model.
        member_documents, nonmember_documents: Document or author of each text, with a name that
            says so on both sides; default: each its own.
        penalty: Of the ridge, in units of the variance of a feature.

    Returns:
        None with fewer than 20 texts of a kind, or where a feature is no finite number.
    """
    inside, outside = np.asarray(members, float), np.asarray(nonmembers, float)
    n, m = len(inside), len(outside)
    features = np.concatenate([inside, outside])
    if min(n, m) < MIN_TEXTS or not np.isfinite(features).all():
        return None
    sides = [
        [(side, i) for i in range(size)] if names is None else list(names)
        for side, names, size in (("m", member_documents, n), ("n", nonmember_documents, m))
    ]
    names, truth, both = [*sides[0], *sides[1]], np.arange(n + m) < n, set(sides[0]) & set(sides[1])
    groups = numbered(names)
    rng = np.random.default_rng(seed)
    predictor = _predictor(features, groups, folds, repeats, rng, penalty)
    # What is exchanged: whole groups, but of one on both sides its documents, within it.
    units = numbered([
        (name, bool(member), getattr(name, "document", i)) if name in both else name
        for i, (name, member) in enumerate(zip(names, truth, strict=True))
    ])  # fmt: skip
    _, one = np.unique(units, return_index=True)
    where = np.array([groups[i] if names[i] in both else -1 for i in one])
    # Labels of units, [U, 1 + B]; the first column is the truth.
    labels = np.repeat(truth[one][:, None], permutations + 1, 1)
    sizes, movable = np.bincount(units), False
    for place, size in np.unique(np.stack([where, sizes], 1), axis=0):
        alike = np.flatnonzero((where == place) & (sizes == size))
        movable |= len(np.unique(labels[alike, 0])) == 2
        labels[alike, 1:] = rng.permuted(labels[alike, 1:], axis=0)
    scores = predictor[:, :n].sum(1)
    # In parts, so that memory does not grow with texts times permutations.
    parts = np.array_split(labels, 1 + labels.shape[1] * (n + m) // 4_000_000, axis=1)
    areas = np.concatenate([_areas(predictor, part[units].astype(float)) for part in parts])
    p = float((1 + (areas[1:] >= areas[0] - 1e-12).sum()) / (permutations + 1))
    # Without the label of a member (and of the other members of its group) as a positive one.
    alike = truth[:, None] & (groups[:, None] == groups[None, :n])  # [T, N]
    others = scores[n:, None] - predictor[n:] @ alike  # [M, N]
    each = (1 + (others >= scores[:n] - 1e-12).sum(0)) / (m + 1)
    area = float(areas[0])
    return Learned(scores[:n], scores[n:], area, p if movable else None, each, areas[1:])


def some_texts(texts: Any) -> Any:
    """Those of a side that the attack sees: every second or third ... of many."""
    return texts[:: max(1, -(-len(texts) // MOST_TEXTS))]


def _areas(predictor: Array, labels: Array) -> Array:
    """AUC of the scores for each column of labels, ``[T, b]`` to ``[b]``; ties half."""
    inside = labels.sum(0)
    ranks = (rankdata(predictor @ labels, axis=0) * labels).sum(0)
    return (ranks / inside - (inside + 1) / 2) / (len(labels) - inside)


def _predictor(
    features: Array,
    groups: NDArray[np.int_],
    folds: int,
    repeats: int,
    rng: np.random.Generator,
    penalty: float = PENALTY,
) -> Array:
    """``[T, T]``: out-of-fold scores are this times the labels, whatever the labels are."""
    spread = features.std(0)
    x = (features - features.mean(0)) / np.where(spread > 1e-9, spread, np.inf)
    predictor = np.zeros((len(x), len(x)))
    documents = groups.max() + 1
    for _ in range(repeats):
        fold = rng.permutation(documents) % folds
        for number in range(folds):
            test = fold[groups] == number
            train = ~test
            # Centred columns: the labels' mean drops out.
            centre = x[train].mean(0)
            inputs = x[train] - centre
            given, ridge = x[test] - centre, penalty * train.sum()
            # The same weights by features or by texts, whichever are fewer.
            if x.shape[1] <= len(inputs):
                gram = inputs.T @ inputs + ridge * np.eye(x.shape[1])
                predictor[np.ix_(test, train)] += given @ np.linalg.solve(gram, inputs.T)
            else:
                gram = inputs @ inputs.T + ridge * np.eye(len(inputs))
                predictor[np.ix_(test, train)] += np.linalg.solve(gram, inputs @ given.T).T
    return predictor / repeats
