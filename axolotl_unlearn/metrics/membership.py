"""Can members of the forget set be told from texts the model never saw, and is that the model?

Scores are higher for "rather a member"; a loss is turned round first. An AUC above 0.5 means that
members can still be recognised (under-forgetting), below 0.5 that they stand out by unusually high
loss (over-forgetting). Sets that differ in words or length can be separated without any model: the
blind baselines find out (arXiv 2406.16201, 2406.17975).

Shape letters: N members, M non-members.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import false_discovery_control, mannwhitneyu

from axolotl_unlearn.metrics import memorisation
from axolotl_unlearn.metrics.intervals import (
    LEVEL,
    Clusters,
    Estimate,
    area_of,
    numbered,
    unlike,
)
from axolotl_unlearn.metrics.memorisation import TokenFacts

#: The attacks that every model is judged by; see `attack_scores`.
ATTACKS = ("loss", "zlib", "min_k_20", "min_k_plus_20", "entropy", "reference")
#: An AUC this near to the retrained model's (or to .5) counts as the same.
MARGIN = 0.1
#: Baselines that are trained need this many clusters of each kind.
MIN_TEXTS = 10
FOLDS, REPEATS = 5, 3


#: How well an attack that never sees the model separates the two sets: ``auc``; ``low``, ``high``,
#: such that all baselines together suspect one in twenty innocent sets; whether it ``separates``:
#: the interval excludes 0.5 (of a trained baseline: lies above).
Baseline = dict[str, Any]


def blind_baselines(
    members: Sequence[str], nonmembers: Sequence[str], clusters: Clusters = None, *, seed: int = 0
) -> dict[str, Baseline]:
    """Separate members from non-members by their texts alone: ``length`` (characters), ``zlib``
    (bytes after compression / bytes) and, with 10 clusters of a kind and words in some of each
    fold, ``bag_of_words`` (naive Bayes) and ``words_tfidf`` (logistic regression on words and word
    pairs), scored outside their training folds and averaged over `REPEATS` divisions.

    A cluster is whole in one fold, so that nobody is told by an author's name. Where texts have a
    ``prompt``, which the model reads, they are compared after it as well, and where clusters are
    of unlike sizes with one vote each as well (`area_of`): what separates counts.
    """
    texts, n = [*members, *nonmembers], len(members)
    read = [getattr(text, "prompt", "") + text for text in texts]
    seen = [_blind_scores(some, n, clusters, seed) for some in (texts, read)[: 1 + (read != texts)]]
    ways = [(scores, votes) for scores in seen for votes in (False, True)[: 1 + unlike(clusters)]]
    level = 1 - (1 - LEVEL) / sum(len(scores) for scores, _ in ways)
    found: dict[str, list[Baseline]] = {}
    for scores, votes in ways:
        for name, score in scores.items():
            area = area_of(score[:n], score[n:], clusters, votes)
            low, high = area.interval(level)
            separates = low > 0.5 or (high < 0.5 and name in ("length", "zlib"))
            one = {"auc": area.value, "low": low, "high": high, "separates": bool(separates)}
            found.setdefault(name, []).append(one)
    return {
        name: max(some, key=lambda one: (one["separates"], abs(one["auc"] - 0.5)))
        for name, some in found.items()
    }


def _blind_scores(
    texts: Sequence[str], n: int, clusters: Clusters, seed: int
) -> dict[str, NDArray]:
    raw = [text.encode("utf-8", errors="replace") for text in texts]
    return {
        "length": np.array([float(len(text)) for text in texts]),
        "zlib": np.array([len(zlib.compress(r, 9)) / max(1, len(r)) for r in raw]),
        **_trained_scores(texts, n, clusters, seed),
    }


def _trained_scores(
    texts: Sequence[str], n: int, clusters: Clusters, seed: int
) -> dict[str, NDArray]:
    """Out-of-fold log-odds of "member" for each text and classifier."""
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_predict
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    sides = n, len(texts) - n
    worded = np.array([re.search(r"\w", text) is not None for text in texts])
    names = [*clusters[0], *clusters[1]] if clusters else [*range(len(texts))]
    few = min(len(set(some)) for some in (names[:n], names[n:])) < MIN_TEXTS
    # One fold may hold all texts with words: then there is nothing to learn from.
    if few or sum(worded) <= sum(-(-side // FOLDS) for side in sides):
        return {}
    labels = np.array([1] * n + [0] * (len(texts) - n))
    words = {"token_pattern": r"(?u)\b\w+\b"}
    # Priors are taken out of the scores: they differ between folds, the folds are pooled.
    models = {
        "bag_of_words": make_pipeline(CountVectorizer(**words), MultinomialNB(fit_prior=False)),
        "words_tfidf": make_pipeline(
            TfidfVectorizer(**words, ngram_range=(1, 2), sublinear_tf=True),
            LogisticRegression(class_weight="balanced", max_iter=1000),
        ),
    }
    # The division must not follow the order of the files: sort by text first.
    order = np.array(sorted(range(len(texts)), key=lambda i: (labels[i], texts[i])))
    given = [texts[i] for i in order], labels[order]
    kind, groups = StratifiedKFold, ()
    if len({*names}) < len(names):
        kind, groups = StratifiedGroupKFold, (numbered([names[i] for i in order]),)
    scores = {name: np.zeros(len(texts)) for name in models}
    for repeat in range(REPEATS):
        cv = [*kind(FOLDS, shuffle=True, random_state=seed + repeat).split(*given, *groups)]
        # A large cluster may have all texts of a side, or all words.
        if not all(worded[order][train].any() and np.ptp(given[1][train]) for train, _ in cv):
            return {}
        for name, model in models.items():
            logp = cross_val_predict(model, *given, cv=cv, method="predict_log_proba")
            scores[name][order] += (logp[:, 1] - logp[:, 0]) / REPEATS
    return scores


def blind_sentence(baselines: Mapping[str, Baseline]) -> str | None:
    """The warning to print beside a membership figure, or None if no baseline separates."""
    separating = {name: b for name, b in baselines.items() if b["separates"]}
    if not separating:
        return None
    name, worst = max(separating.items(), key=lambda item: abs(item[1]["auc"] - 0.5))
    what = {"length": "their length", "zlib": "how well they compress"}.get(name, "their words")
    return (
        f"The membership figure means nothing here: without any model, {what} alone can tell "
        f"members from non-members (AUC {worst['auc']:.2f} [{worst['low']:.2f}, "
        f"{worst['high']:.2f}]). "
        "Take non-members from the same source as the members."
    )


def attack_losses(facts: TokenFacts, text: str, distributions: bool = True) -> dict[str, float]:
    """The attacks on one text, low = rather a member; two of them see whole distributions."""
    losses = {
        "loss": memorisation.loss(facts),
        "zlib": memorisation.zlib_ratio(facts, text),
        "min_k_20": -memorisation.min_k(facts, 0.2),
    }
    if distributions:
        losses["min_k_plus_20"] = -memorisation.min_k_plus(facts, 0.2)
        losses["entropy"] = memorisation.entropy(facts)
    return losses


def attack_scores(
    facts: Sequence[TokenFacts],
    texts: Sequence[str],
    reference: Sequence[TokenFacts] | None = None,
) -> dict[str, NDArray]:
    """The six attacks (`ATTACKS`) on one set of texts: ``[N]`` each, high = rather a member.

    Args:
        reference: Token facts under a model that never saw the members, for "reference".
    """
    rows = [attack_losses(one, text) for one, text in zip(facts, texts, strict=True)]
    scores = {name: [-row[name] for row in rows] for name in ATTACKS if name != "reference"}
    if reference is not None:
        both = zip(facts, reference, strict=True)
        scores["reference"] = [-memorisation.reference_difference(*one) for one in both]
    return {name: np.asarray(values, float) for name, values in scores.items()}


Pair = tuple[ArrayLike, ArrayLike]


def gap_of(
    first: Pair, second: Pair | None = None, clusters: Clusters = None
) -> tuple[Estimate, Estimate, float]:
    """The AUC of ``first``, what it has more than ``second`` (or 0.5), and the two-sided p-value of
    "nothing".

    Single texts are compared with 0.5 by Mann and Whitney (1947), exact without ties up to 50 a
    side, all else by DeLong's error. Where clusters are of unlike sizes there are two tests, of
    texts and of clusters with a vote each (`area_of`), and p is twice the smaller one's.

    Args:
        first, second: (members, non-members) scores of the same texts in the same order under
            the two models, high = rather a member.
    """
    areas = [area_of(*first, clusters, votes) for votes in (False, True)[: 1 + unlike(clusters)]]
    others = [0.5 if second is None else area_of(*second, clusters, i > 0) for i in range(2)]
    gaps = [area.minus(other) for area, other in zip(areas, others, strict=False)]
    p = min(1.0, len(gaps) * min(gap.p for gap in gaps))
    if second is None and all(len(set(side)) == len(side) for side in clusters or ()):
        values = np.concatenate([np.asarray(side, float) for side in first])
        few = max(map(len, first)) <= 50 and len(np.unique(values)) == len(values)
        p = float(mannwhitneyu(*first, method="exact" if few else "asymptotic").pvalue)
        p = p if math.isfinite(p) else 1.0  # all values equal
    return areas[0], gaps[0], p


def equivalence(gap: Estimate, texts: int, margin: float = MARGIN) -> dict[str, Any]:
    """Is an AUC where it should be? Two one-sided tests (Schuirmann 1987). Few texts never pass.

    Returns:
        ``value`` of the gap; ``low``, ``high``: its 90 % interval, ``equivalent`` where it lies
        inside the margin; ``p``, the larger of the two; ``needed``: texts of each kind with which a
        gap like this would on average be equivalent, None where it is as large as the margin.
    """
    half, room = gap.half(2 * LEVEL - 1), margin - abs(gap.value)
    low, high = gap.value - half, gap.value + half
    needed = math.ceil(texts * (half / room) ** 2) if half < 0.5 and room > 0 else None
    found = {"value": gap.value, "low": low, "high": high, "p": gap.margin_p(margin)}
    return found | {"equivalent": -margin < low and high < margin, "needed": needed}


@dataclass(frozen=True)
class Documents:
    """Which single documents can be told from texts that were never seen.

    Attributes:
        p: ``[N]``, all attacks together, two-sided, exact.
        side: ``[N]`` "under" (as if known) or "over" (as if pushed away), by the strongest attack.
        told: ``[N]`` at 5 % after Benjamini and Hochberg's correction over the documents.
    """

    p: NDArray[np.float64]
    side: list[str]
    told: NDArray[np.bool_]


def told_documents(
    members: Mapping[str, ArrayLike], nonmembers: Mapping[str, ArrayLike], *, paired: bool = False
) -> Documents:
    """For every member: can any attack still tell it from the held-out texts?

    Conformal p-values: a member is put among the M non-members, the strangeness of a text is its
    largest distance from the pool's median over the attacks (in units of the pool's median
    distance), and p is the share of the pool at least as strange as the member. Exact for
    exchangeable texts, and positively dependent, for which Benjamini and Hochberg's correction over
    documents holds (Bates et al., arXiv 2104.08279).

    Args:
        members, nonmembers: Scores by attack, high = rather a member; with a retrained model the
            differences of both models' scores.
        paired: They are such differences, in which what makes a text hard cancels. Beyond all but
            some non-members (`outer`) p then falls with the fourth power of the distance, as the
            tail of Student's t with four degrees of freedom does, and is doubled for the error of
            that distance: without it few documents could not be told, however far they are.
    """
    inside = np.stack([np.asarray(scores, float) for scores in members.values()])  # [K, N]
    held = np.stack([np.asarray(nonmembers[name], float) for name in members])  # [K, M]
    n, m = inside.shape[1], held.shape[1]
    # Some members at a time, so that memory does not grow with members times non-members.
    parts = np.array_split(inside, max(1, min(n, n * m // _PLACES)), axis=1)
    strange = [_strangeness(part, held, paired) for part in parts]
    p, signed = (np.concatenate(one, -1) for one in zip(*strange, strict=True))
    strongest = np.abs(signed).argmax(0)
    side = ["under" if signed[a, i] > 0 else "over" for i, a in enumerate(strongest)]
    told = false_discovery_control(p, method="bh") <= 1 - LEVEL if n else np.zeros(0, bool)
    return Documents(p, side, told)


def by_document(
    names: Sequence[str], members: Mapping[str, ArrayLike], nonmembers: Mapping[str, ArrayLike],
    paired: bool = False,
) -> dict[str, tuple[float, str]]:  # fmt: skip
    """p and side of each document by `told_documents`; of several texts of a document (``names``
    has that of each member) the smallest p times their number, of equal ones once."""
    tests = told_documents(members, nonmembers, paired=paired)
    scores = np.round([*members.values()], 6).T.tolist()  # equal texts have equal ones
    many = Counter(name for name, *_ in {*zip(names, map(tuple, scores), strict=True)})
    found: dict[str, tuple[float, str]] = {}
    for name, p, side in zip(names, tests.p.tolist(), tests.side, strict=True):
        own = min(1.0, p * many[name]), side
        found[name] = min(found.get(name, own), own)
    return found


#: Members times non-members that are compared at once.
_PLACES = 4_000_000
#: Power with which chances fall beyond the outer non-members.
TAIL = 4


def outer(nonmembers: int) -> int:
    """The non-member from which the tail is drawn, counted from the farthest: one that is out of
    place moves it little."""
    return min(nonmembers, max(3, math.ceil(0.02 * nonmembers)))


def alone_from(members: int, nonmembers: int, level: float) -> float:
    """How many times as far as the `outer` non-member a document must be to be told alone."""
    least = 2 * outer(nonmembers) / (nonmembers + 1) * members / level
    return max(1.0, least ** (1 / TAIL))


def _strangeness(inside: NDArray, held: NDArray, paired: bool) -> tuple[NDArray, NDArray]:
    """``[K, N]`` and ``[K, M]`` scores to p ``[N]`` and how far each member is from its pool's
    median ``[K, N]``."""
    (k, n), m = inside.shape, held.shape[1]
    signed, strange = np.empty((k, n)), np.zeros((n, m + 1))
    for a in range(k):
        pool = np.concatenate([np.broadcast_to(held[a], (n, m)), inside[a][:, None]], 1)
        pool -= np.median(pool, 1, keepdims=True)
        scale = np.median(np.abs(pool), 1, keepdims=True)
        pool /= np.where(scale > 0, scale, 1.0)
        signed[a] = pool[:, -1]
        np.maximum(strange, np.abs(pool), out=strange)
    own, k = strange[:, -1], outer(m)
    p = (strange >= own[:, None] - 1e-12).sum(1) / (m + 1)
    if paired:
        edge = np.partition(strange[:, :-1], m - k, 1)[:, m - k]
        beyond = np.divide(own, edge, out=np.ones(n), where=edge > 0).clip(min=1.0)
        p = np.where(beyond > 1, np.minimum(p, 2 * k / (m + 1) * beyond**-TAIL), p)
    return p, signed
