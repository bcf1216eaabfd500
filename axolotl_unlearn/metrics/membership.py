"""Can members of the forget set be told from texts the model never saw, and is that the model?

Scores here are higher for "rather a member"; a loss is turned round first. An AUC above .5 means
that members can still be recognised (under-forgetting), below .5 that they stand out by unusually
high loss (over-forgetting). Two sets of texts that differ in words or length can be separated
without any model: the blind baselines find out (arXiv 2406.16201, 2406.17975).

Shape letters: N members, M non-members.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta

from axolotl_unlearn.metrics.statistics import LEVEL, Interval, auc, auc_interval

Forgetting = Literal["over", "under", "balanced"]

#: Baselines that are trained need this many texts of each kind.
MIN_TEXTS = 10


def forgetting(bounds: Interval) -> Forgetting:
    """Name the interval of an AUC: "balanced" where it holds .5, "under" above, "over" below."""
    low, high = bounds
    if low <= 0.5 <= high:
        return "balanced"
    return "under" if low > 0.5 else "over"


def mia_score_interval(bounds: Interval) -> Interval:
    """Range of ``1 - 2 |AUC - .5|`` over an interval of the AUC; its top is 1 if .5 is inside."""
    ends = sorted(1 - 2 * abs(bound - 0.5) for bound in bounds)
    return (ends[0], 1.0 if bounds[0] <= 0.5 <= bounds[1] else ends[1])


def tpr_at_fpr(members: ArrayLike, nonmembers: ArrayLike, fpr: float) -> float:
    """Share of members found when at most ``fpr`` of non-members are called members.

    The threshold lies on a non-member's score, which itself is not called a member, so ties count
    against the attack. With fewer than 1 / fpr non-members no false alarm is allowed at all
    (Carlini et al., arXiv 2112.03570).
    """
    members, nonmembers = np.asarray(members, float), np.sort(np.asarray(nonmembers, float))
    allowed = math.floor(fpr * len(nonmembers) + 1e-9)
    if allowed >= len(nonmembers):
        return 1.0
    return float((members > nonmembers[-1 - allowed]).mean())


def share_interval(hits: int, n: int, level: float = LEVEL) -> Interval:
    """Exact binomial interval of a share (Clopper and Pearson 1934)."""
    tail = (1 - level) / 2
    low = beta.ppf(tail, hits, n - hits + 1) if hits else 0.0
    high = beta.ppf(1 - tail, hits + 1, n - hits) if hits < n else 1.0
    return (float(low), float(high))


def roc(members: ArrayLike, nonmembers: ArrayLike) -> tuple[NDArray, NDArray]:
    """Points (false positive rate, true positive rate) of the attack, from (0, 0) to (1, 1)."""
    members, nonmembers = (
        np.sort(np.asarray(members, float)),
        np.sort(np.asarray(nonmembers, float)),
    )
    steps = np.unique(np.concatenate([members, nonmembers]))[::-1]
    rates = [
        np.concatenate([[0.0], 1 - np.searchsorted(s, steps, "left") / len(s)])
        for s in (nonmembers, members)
    ]
    return rates[0], rates[1]


@dataclass(frozen=True)
class Baseline:
    """How well an attack that never sees the model separates the two sets.

    Attributes:
        auc: 1 if members score higher throughout.
        low, high: Interval; wider than the usual one, so that among all baselines together one
            in twenty innocent data sets is suspected.
        separates: The interval excludes .5 (for a trained baseline: lies above .5, since an AUC
            below .5 on held-out texts means that it learnt nothing).
    """

    auc: float
    low: float
    high: float
    separates: bool


def blind_baselines(
    members: Sequence[str],
    nonmembers: Sequence[str],
    *,
    folds: int = 5,
    repeats: int = 3,
    seed: int = 0,
    level: float = LEVEL,
) -> dict[str, Baseline]:
    """Separate members from non-members by their texts alone.

    ``length`` (characters), ``zlib`` (bytes after compression / bytes), ``bag_of_words`` (naive
    Bayes on word counts) and ``words_tfidf`` (logistic regression on words and word pairs). The
    last two are scored on texts outside their training folds and averaged over ``repeats``
    divisions into ``folds``.

    Returns:
        Nothing for the trained ones with fewer than 10 texts of a kind, or without any word.
    """
    texts, n = [*members, *nonmembers], len(members)
    raw = [text.encode("utf-8", errors="replace") for text in texts]
    scores: dict[str, NDArray] = {
        "length": np.array([float(len(text)) for text in texts]),
        "zlib": np.array([len(zlib.compress(r, 9)) / max(1, len(r)) for r in raw]),
    }
    trained = _trained_scores(texts, n, folds, repeats, seed)
    each = 1 - (1 - level) / (len(scores) + len(trained))
    found = {}
    for name, score in {**scores, **trained}.items():
        value = auc(score[:n], score[n:])
        low, high = auc_interval(score[:n], score[n:], each)
        separates = low > 0.5 or (high < 0.5 and name in scores)
        found[name] = Baseline(value, low, high, bool(separates))
    return found


def _trained_scores(
    texts: Sequence[str], n: int, folds: int, repeats: int, seed: int
) -> dict[str, NDArray]:
    """Out-of-fold log-odds of "member" for each text and classifier."""
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    if min(n, len(texts) - n) < MIN_TEXTS:
        return {}
    labels = np.array([1] * n + [0] * (len(texts) - n))
    words = r"(?u)\b\w+\b"
    # Priors are taken out of the scores: they differ between folds, the folds are pooled.
    makers = {
        "bag_of_words": lambda: make_pipeline(
            CountVectorizer(token_pattern=words), MultinomialNB(fit_prior=False)
        ),
        "words_tfidf": lambda: make_pipeline(
            TfidfVectorizer(token_pattern=words, ngram_range=(1, 2), sublinear_tf=True),
            LogisticRegression(class_weight="balanced", max_iter=1000),
        ),
    }
    if not any(any(c.isalnum() for c in text) for text in texts):
        return {}
    # The division must not follow the order of the files: sort by text first.
    order = np.array(sorted(range(len(texts)), key=lambda i: (labels[i], texts[i])))
    shuffled = [texts[i] for i in order]
    scores = {name: np.zeros(len(texts)) for name in makers}
    for repeat in range(repeats):
        division = StratifiedKFold(folds, shuffle=True, random_state=seed + repeat)
        for train, test in division.split(shuffled, labels[order]):
            for name, make in makers.items():
                model = make().fit([shuffled[i] for i in train], labels[order[train]])
                logp = model.predict_log_proba([shuffled[i] for i in test])
                scores[name][order[test]] += (logp[:, 1] - logp[:, 0]) / repeats
    return scores


def blind_sentence(baselines: Mapping[str, Baseline]) -> str | None:
    """The warning to print beside a membership figure, or None if no baseline separates."""
    found = {name: b for name, b in baselines.items() if b.separates}
    if not found:
        return None
    name, worst = max(found.items(), key=lambda item: abs(item[1].auc - 0.5))
    what = {
        "length": "their length",
        "zlib": "how well they compress",
        "bag_of_words": "their words",
        "words_tfidf": "their words",
    }[name]
    return (
        f"The membership figure means nothing here: without any model, {what} alone tells members "
        f"from non-members (AUC {worst.auc:.2f} [{worst.low:.2f}, {worst.high:.2f}]). "
        "Take non-members from the same source as the members."
    )
