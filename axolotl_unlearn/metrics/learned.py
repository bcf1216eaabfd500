"""A learned membership attack: a small classifier over what the model does to each token.

Trained on other documents than it is asked about (cross-validated over documents), so it says
what an attacker with some labelled texts can do. Features of a text are summaries of its tokens'
log-probability, of the entropy there, of the standardised log-probability (Min-K%++) and of their
windows; all are functions of `TokenFacts`.

Shape letters: N texts, F features, n tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from axolotl_unlearn.metrics.memorisation import TokenFacts, exact_memorisation, standardised

QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARES = (0.1, 0.2, 0.4)
WINDOW = 8
#: Fewer texts of a kind than this train no classifier.
MIN_TEXTS = 20


def text_features(facts: TokenFacts) -> list[float]:
    """``[F]`` of one text; its length is none of them, because that needs no model."""
    found = [exact_memorisation(facts), _longest(facts.greedy) / len(facts)]
    # The mean log-probability over the vocabulary is minus the entropy.
    for values in (facts.logp, standardised(facts), facts.mean, facts.logp - facts.mean):
        values = np.clip(values, -50.0, 50.0)
        ordered = np.sort(values)
        found += [float(values.mean()), float(values.std())]
        found += [float(x) for x in np.quantile(values, QUANTILES)]
        found += [float(ordered[: max(1, int(k * len(values)))].mean()) for k in SHARES]
        kernel = min(WINDOW, len(values))
        windows = np.convolve(values, np.ones(kernel) / kernel, "valid")
        found += [float(windows.min()), float(windows.max())]
    return found


def _longest(flags: NDArray[np.bool_]) -> int:
    """Length of the longest run of true values."""
    ends = np.flatnonzero(~np.concatenate([[False], np.asarray(flags, bool), [False]]))
    return int(np.diff(ends).max()) - 1


def learned_scores(
    members: ArrayLike,
    nonmembers: ArrayLike,
    member_documents: Sequence[Hashable] | None = None,
    *,
    folds: int = 5,
    repeats: int = 3,
    seed: int = 0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Out-of-fold log-odds of "member", high = rather a member.

    Logistic regression on standardised features, with every document in one fold, averaged over
    ``repeats`` divisions. A classifier that learnt nothing scores held-out texts a little below
    an AUC of .5, so an AUC below .5 is no finding.

    Args:
        members, nonmembers: Features ``[N, F]`` and ``[M, F]``.
        member_documents: Document of each member; default: each its own.

    Returns:
        ``[N]`` and ``[M]``, or None with fewer than 20 texts of a kind.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    inside, outside = np.asarray(members, float), np.asarray(nonmembers, float)
    n, m = len(inside), len(outside)
    if min(n, m) < MIN_TEXTS:
        return None
    names = list(member_documents) if member_documents is not None else list(range(n))
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    groups = np.array([places[name] for name in names] + [n + i for i in range(m)])
    features, labels = np.concatenate([inside, outside]), np.repeat([1, 0], [n, m])
    scores = np.zeros(n + m)
    for repeat in range(repeats):
        division = StratifiedGroupKFold(folds, shuffle=True, random_state=seed + repeat)
        for train, test in division.split(features, labels, groups):
            model = make_pipeline(
                StandardScaler(),
                LogisticRegression(C=0.02, class_weight="balanced", max_iter=1000),
            ).fit(features[train], labels[train])
            scores[test] += model.decision_function(features[test]) / repeats
    return scores[:n], scores[n:]
