"""How sure a score is: cluster bootstrap, DeLong intervals, and what chance alone would give.

Whole documents are resampled (cluster bootstrap; Cameron, Gelbach and Miller 2008, III.B), scores
that share documents together. The same seed and documents give the same resamples, so draws of two
models can be subtracted: that is the paired comparison. AUCs of texts in clusters have DeLong's
variance with the placements summed by cluster first (Obuchowski 1997, Biometrics 53).

Shape letters: B resamples, G documents (clusters), N members, M non-members, K models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit
from scipy.stats import norm, permutation_test, rankdata, t

LEVEL = 0.95
RESAMPLES = 10_000

Array = NDArray[np.float64]
Draws = dict[str, Array]
Interval = tuple[float, float]
#: Cluster of each member and of each non-member; None: each text is independent of the others.
Clusters = tuple[Sequence[Hashable], Sequence[Hashable]] | None


@dataclass(frozen=True)
class Mean:
    """A score that is the mean of per-row values.

    Attributes:
        values, clusters: One number and one document a row; a document needs a name that no other
            file's has.
    """

    values: Sequence[float]
    clusters: Sequence[Hashable]

    def __post_init__(self) -> None:
        _check(self.values, self.clusters, "values")


@dataclass(frozen=True)
class Area:
    """A score that is the AUC of members against non-members.

    Attributes:
        members, nonmembers: One number a text; higher means "rather a member" (e.g. -loss).
        member_clusters, nonmember_clusters: The document of each text; default: each its own.
    """

    members: Sequence[float]
    nonmembers: Sequence[float]
    member_clusters: Sequence[Hashable] | None = None
    nonmember_clusters: Sequence[Hashable] | None = None

    def __post_init__(self) -> None:
        for side in ("member", "nonmember"):
            values, clusters = getattr(self, side + "s"), getattr(self, side + "_clusters")
            if clusters is None:
                clusters = [(side, i) for i in range(len(values))]
                object.__setattr__(self, side + "_clusters", clusters)
            _check(values, clusters, side + "s")

    @property
    def texts(self) -> tuple[Sequence[float], Sequence[float]]:
        return (self.members, self.nonmembers)

    @property
    def clusters(self) -> Clusters:
        return (self.member_clusters, self.nonmember_clusters)


def _check(values: Sequence[float], clusters: Sequence[Hashable], name: str) -> None:
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} {name} but {len(clusters)} clusters: give one a row.")
    if len(values) == 0:
        raise ValueError(f"no {name}: leave the score out instead.")
    if not np.isfinite(np.asarray(values, dtype=float)).all():
        raise ValueError(f"{name} hold NaN or infinity; score those rows again or leave them out.")


def cluster_bootstrap(
    scores: Mapping[str, Mean | Area], *, n: int = RESAMPLES, seed: int = 0
) -> Draws:
    """Draw documents with replacement ``n`` times and recompute every score.

    Scores that have documents in common (directly or through a third score) are drawn from one
    pool, members and non-members from two. The order of rows and of scores changes nothing.

    Returns:
        For each score ``[B]`` values; NaN in a resample without any document of the score.
    """
    sides = {key: clusters for name in scores for key, clusters in _sides(name, scores[name])}
    draws = {name: np.empty(n) for name in scores}
    pools = _pools(sides)
    tables = [_sum_table(scores, keys, index) for keys, index in pools]
    # A pool is seeded by its documents alone, whatever else is resampled beside it.
    seeds = [zlib.crc32("\n".join(map(repr, index)).encode()) for _, index in pools]
    generators = [np.random.default_rng([seed, one]) for one in seeds]
    places = {
        key: (number, np.array([index[document] for document in sides[key]]))
        for number, (keys, index) in enumerate(pools)
        for key in keys
    }
    step = max(1, 4_000_000 // max(1, sum(len(index) for _, index in pools)))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        # How often each document of each pool was drawn, [b, G]. A mean needs only the sum and
        # the number of its rows a document, so resampling is a matrix product.
        weights = []
        for rng, (_, index) in zip(generators, pools, strict=True):
            size, clusters = rows.stop - start, len(index)
            picks = rng.integers(0, clusters, (size, clusters))
            picks += np.arange(size)[:, None] * clusters
            counted = np.bincount(picks.ravel(), minlength=size * clusters)
            weights.append(counted.reshape(size, -1).astype(float))
        for drawn, (names, sums, counts) in zip(weights, tables, strict=True):
            with np.errstate(invalid="ignore"):
                means = (drawn @ sums) / (drawn @ counts)
            for column, name in enumerate(names):
                draws[name][rows] = means[:, column]
        for name, score in scores.items():
            if isinstance(score, Area):
                sampled = (places[name, side] for side in ("member", "nonmember"))
                of_texts = [weights[number][:, documents] for number, documents in sampled]
                draws[name][rows] = _weighted_auc(score, *of_texts)
    return draws


def _sides(name: str, score: Mean | Area) -> list[tuple[tuple[str, str], Sequence[Hashable]]]:
    if isinstance(score, Mean):
        return [((name, "rows"), score.clusters)]
    return [((name, s), getattr(score, s + "_clusters")) for s in ("member", "nonmember")]


def _pools(
    sides: Mapping[tuple[str, str], Sequence[Hashable]],
) -> list[tuple[list[tuple[str, str]], dict[Hashable, int]]]:
    """Sides joined by common documents, each pool with a number for every document."""
    groups: list[tuple[list[tuple[str, str]], set[Hashable]]] = []
    for key, clusters in sides.items():
        keys, documents, apart = [key], set(clusters), []
        for group in groups:
            if documents.isdisjoint(group[1]):
                apart.append(group)
            else:
                keys, documents = keys + group[0], documents | group[1]
        groups = [*apart, (keys, documents)]
    return [
        (keys, {document: i for i, document in enumerate(sorted(documents, key=repr))})
        for keys, documents in groups
    ]


def _sum_table(scores, keys, index) -> tuple[list[str], Array, Array]:
    """Names of the pool's means with ``[G, names]`` sums and numbers of rows a document."""
    names = sorted(name for name, side in keys if side == "rows")
    sums, counts = np.zeros((len(index), len(names))), np.zeros((len(index), len(names)))
    for column, name in enumerate(names):
        documents = [index[c] for c in scores[name].clusters]
        np.add.at(sums[:, column], documents, np.asarray(scores[name].values, dtype=float))
        np.add.at(counts[:, column], documents, 1.0)
    return names, sums, counts


def _weighted_auc(score: Area, member_weights: Array, nonmember_weights: Array) -> Array:
    """AUC of each resample, ties half: ``[b, N]`` and ``[b, M]`` weights to ``[b]``."""
    others = np.asarray(score.nonmembers, dtype=float)
    order = np.argsort(others, kind="stable")
    below = np.pad(np.cumsum(nonmember_weights[:, order], axis=1), ((0, 0), (1, 0)))
    members = np.asarray(score.members, dtype=float)
    left = below[:, np.searchsorted(others[order], members, "left")]
    right = below[:, np.searchsorted(others[order], members, "right")]
    won = (member_weights * (left + right)).sum(1) / 2
    with np.errstate(invalid="ignore"):
        return won / (member_weights.sum(1) * nonmember_weights.sum(1))


def harmonic_mean(values: ArrayLike) -> Array:
    """Harmonic mean over the last axis, 0 where any value is 0; NaN is passed on."""
    values = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore"):
        mean = values.shape[-1] / (1 / values).sum(-1)
    return np.where((values == 0).any(-1) & ~np.isnan(values).any(-1), 0.0, mean)


def mia_score(auc: ArrayLike) -> Array:
    """`semeval.mia_score` of several."""
    return 1 - 2 * np.abs(np.asarray(auc, dtype=float) - 0.5)


def mia_score_interval(
    members: ArrayLike, nonmembers: ArrayLike, level: float = LEVEL, clusters: Clusters = None
) -> Interval:
    """Interval of ``1 - 2 |AUC - .5|``; it reaches 1 exactly where that of the AUC holds .5.

    Not the image of the AUC's interval, which holds the truth too often near 0.5. The logit of the
    AUC is taken as normal and its absolute value gets the interval of Feldman and Cousins (1998,
    physics/9711021), which covers evenly wherever the AUC is.
    """
    value, error, df = _logit_error(members, nonmembers, clusters)
    if error is not None and df < math.inf:
        # The folding below is that of a normal error: as wide as Student's is at the end.
        error *= float(t.ppf((1 + level) / 2, df) / norm.ppf((1 + level) / 2))
    if error is None:
        ends = sorted(abs(b - 0.5) for b in auc_interval(members, nonmembers, level, clusters))
    elif not 0 < error < math.inf:
        return (0.0, 1.0)
    else:
        means, accepted = _folded_normal(level)
        z = abs(logit(value)) / error
        if z < 5:
            inside = means[accepted[:, int(z / _STEP)]]
        else:  # nothing is folded so far from .5
            inside = z + np.array([-1, 1]) * norm.ppf((1 + level) / 2)
        ends = expit(error * inside[[0, -1]]) - 0.5
    return (float(1 - 2 * ends[1]), float(1 - 2 * ends[0]))


#: Of the grid below, in standard errors.
_STEP = 0.01


@cache
def _folded_normal(level: float) -> tuple[Array, NDArray[np.bool_]]:
    """Absolute means, and for each (row) which absolute observations (columns) it accepts: in order
    of their likelihood relative to the best mean, up to ``level`` in all."""
    means, seen = np.arange(0, 8, _STEP), np.arange(0, 12, _STEP) + _STEP / 2
    density = norm.pdf(seen - means[:, None]) + norm.pdf(seen + means[:, None])
    order = np.argsort(-density / density.max(0), axis=1, kind="stable")
    mass = np.cumsum(np.take_along_axis(density, order, 1) * _STEP, axis=1)
    accepted = np.zeros(density.shape, bool)
    np.put_along_axis(accepted, order, mass <= level, 1)
    return means, accepted


_PARTS = ("task_aggregate", "mia_score", "utility")


@dataclass(frozen=True)
class Scores:
    """What the SemEval scores of a model are made of.

    Scores are the cells, ``forget`` and ``retain`` (harmonic means of the cells whose names start
    so), ``task_aggregate`` and, where there is what they need, ``mia_auc``, ``mia_score``,
    ``utility`` and ``aggregate``.

    Attributes:
        cells: Per-row values of each cell; forget cells already as 1 - v.
        membership: Scores, ``-loss``; members that are forget documents have the cells' clusters.
        utility: Per-question values.
    """

    cells: Mapping[str, Mean]
    membership: Area | None = None
    utility: Mean | None = None

    @property
    def parts(self) -> dict[str, Mean | Area]:
        """What is measured, by name."""
        more = {"mia_auc": self.membership, "utility": self.utility}
        return dict(self.cells) | {name: one for name, one in more.items() if one is not None}

    def composed(self, scores: dict[str, Any]) -> dict[str, Any]:
        """Values of the parts, or their draws, and what is computed from them."""
        sides = {
            side: [c for c in self.cells if c.startswith(side)] for side in ("forget", "retain")
        }
        for name, parts in {**sides, "task_aggregate": list(self.cells)}.items():
            if parts:
                scores[name] = harmonic_mean(np.stack([scores[c] for c in parts], -1))
        if "mia_auc" in scores:
            scores["mia_score"] = mia_score(scores["mia_auc"])
        if all(part in scores for part in _PARTS):
            scores["aggregate"] = sum(scores[part] for part in _PARTS) / 3
        return scores

    def points(self) -> dict[str, float]:
        """The scores themselves."""
        scores = self.composed({name: point(score) for name, score in self.parts.items()})
        return {name: float(value) for name, value in scores.items()}

    def draws(self, n: int = RESAMPLES, seed: int = 0) -> Draws:
        """``[B]`` resamples of each score."""
        draws = cluster_bootstrap(self.parts, n=n, seed=seed)
        for name, score in self.parts.items():
            if isinstance(score, Mean) and _all_alike(score):
                draws[name] = _unseen_draws(score, name, n, seed)
        return self.composed(draws)

    def intervals(self, n: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
        """Cells and utility as `mean_interval`, AUC by `auc_interval`, MIA score by
        `mia_score_interval`, composites by percentiles."""
        draws, ends, texts = self.draws(n, seed), {}, self.membership
        for name, values in draws.items():
            part = self.parts.get(name)
            if isinstance(part, Mean):
                ends[name] = widened(part, interval(values, documents=len(set(part.clusters))))
            elif name in ("mia_auc", "mia_score"):
                if min(map(len, texts.texts)) > 1:
                    make = auc_interval if name == "mia_auc" else mia_score_interval
                    ends[name] = make(*texts.texts, clusters=texts.clusters)
            elif name != "aggregate":
                prefix = "" if name == "task_aggregate" else name
                cells = {cell: one for cell, one in self.cells.items() if cell.startswith(prefix)}
                ends[name] = interval(values, documents=_effective_documents(cells, draws))
        ends = {name: pair for name, pair in ends.items() if all(map(math.isfinite, pair))}
        if set(_PARTS) <= set(ends):
            wider = mia_score_interval(*texts.texts, (1 + LEVEL) / 2, texts.clusters)
            ends["aggregate"] = _aggregate_interval(self.points(), ends, wider[1] == 1)
        return ends

    def differences(
        self, other: Scores, n: int = RESAMPLES, seed: int = 0
    ) -> dict[str, Difference]:
        """This minus the other model's, of every score that both have over the same documents; p
        after Holm over the scores."""
        both = (self, other)
        draws, points = [one.draws(n, seed) for one in both], [one.points() for one in both]
        gaps = {}
        for name in draws[0]:
            if name not in draws[1]:
                continue
            value, gap = points[0][name] - points[1][name], draws[0][name] - draws[1][name]
            if isinstance(part := self.parts.get(name), Mean):
                gaps[name] = _mean_difference(part, other.parts[name], value, gap, n, seed)
            elif name != "mia_auc":
                gaps[name] = draws_difference(gap, value, self._documents(name))
            elif min(map(len, part.texts)) > 1:
                gap = auc_gap(part.texts, other.membership.texts, part.clusters)
                gaps[name] = gap.difference
        corrected = holm([gap.p for gap in gaps.values()])
        each = zip(gaps.items(), corrected, strict=True)
        return {name: replace(gap, p=float(p)) for (name, gap), p in each}

    def _documents(self, name: str) -> tuple[int, int] | None:
        """Documents of the smallest part of a composite, and of all together."""
        parts: list[Mean | Area] = []
        if name in ("forget", "retain"):
            parts = [score for cell, score in self.cells.items() if cell.startswith(name)]
        if name in ("task_aggregate", "aggregate"):
            parts = list(self.cells.values())
        if name in ("mia_score", "aggregate"):
            parts.append(self.membership)
        if name == "aggregate":
            parts.append(self.utility)
        sets = [set(clusters) for score in parts for _, clusters in _sides("", score)]
        return (min(map(len, sets)), len(set().union(*sets))) if sets else None


def _all_alike(score: Mean) -> bool:
    """Is every row 0, or every row 1?"""
    values = np.asarray(score.values, dtype=float)
    return values[0] in (0.0, 1.0) and not (values != values[0]).any()


def _unseen_draws(score: Mean, name: str, n: int, seed: int) -> Array:
    """Of a mean whose rows all agree, so that composites are not certain of it either: of G
    documents ``Beta(G + 1/2, 1/2)``, Jeffreys' posterior (Brown, Cai and DasGupta 2001)."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    high = generator.beta(len(set(score.clusters)) + 0.5, 0.5, n)
    return high if score.values[0] else 1 - high


def interval(draws: ArrayLike, level: float = LEVEL, documents: float | None = None) -> Interval:
    """Percentile interval of bootstrap draws, NaN draws left out (NaN if all are).

    Args:
        documents: Number G of documents behind the draws: the percentiles are moved out by
            sqrt(G / (G - 1)) and to Student's tails (Hesterberg 2015, "expanded percentile").
    """
    draws = np.asarray(draws, dtype=float)
    draws = draws[~np.isnan(draws)]
    if not len(draws):
        return (math.nan, math.nan)
    tail = (1 - level) / 2
    if documents is not None and documents > 1:
        wider = math.sqrt(documents / (documents - 1)) * t.ppf(tail, documents - 1)
        tail = float(norm.cdf(wider))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return (float(low), float(high))


def mean_interval(score: Mean, **bootstrap: int) -> Interval:
    """Interval of one mean of values in [0, 1]; where every row is 0, or 1, the exact binomial
    bound over G documents, ``1 - ((1 - level) / 2) ** (1 / G)`` wide (Clopper and Pearson 1934)."""
    draws = cluster_bootstrap({"": score}, **bootstrap)[""]
    return widened(score, interval(draws, documents=len(set(score.clusters))))


def widened(score: Mean, bounds: Interval) -> Interval:
    """``bounds``, or the exact bound of `mean_interval` if all rows are 0 or all are 1."""
    if not _all_alike(score):
        return bounds
    room = _room(score)
    return (0.0, room) if not score.values[0] else (1 - room, 1.0)


def _room(score: Mean) -> float:
    return 1 - ((1 - LEVEL) / 2) ** (1 / len(set(score.clusters)))


def sign_flip_p(differences: ArrayLike, *, n: int = RESAMPLES, seed: int = 0) -> float:
    """Two-sided p-value of "the sign of each difference is a coin toss" (Fisher 1935): exact up to
    13 differences, else by ``n`` random signs. Two documents that agree give 0.5."""
    differences = np.asarray(differences, dtype=float)
    if len(differences) < 2 or not differences.any():
        return 1.0
    how = {"permutation_type": "samples", "n_resamples": n - 1, "vectorized": True}
    how |= {"batch": max(1, 2_000_000 // len(differences)), "rng": np.random.default_rng(seed)}
    return float(permutation_test((differences,), lambda x, axis: x.sum(axis), **how).pvalue)


def _aggregate_interval(
    points: Mapping[str, float], bounds: Mapping[str, Interval], chance: bool
) -> Interval:
    """Of the mean of Task Aggregate, MIA score and utility: the distances of their intervals are
    added as squares (Zou and Donner 2008), that of the MIA score from 1 as it is where the AUC may
    be 0.5 (``chance``): there its error has one sign, always."""
    low, high = ([abs(bounds[part][end] - points[part]) for part in _PARTS] for end in (0, 1))
    up = math.hypot(*high)
    if chance:
        up = math.hypot(high[0], high[2]) + 1 - points["mia_score"]
    value = points["aggregate"]
    return (max(0.0, value - math.hypot(*low) / 3), min(1.0, value + up / 3))


def _effective_documents(cells: Mapping[str, Mean], draws: Draws) -> float | None:
    """Documents that a harmonic mean of cells counts for (Welch 1947, Satterthwaite 1946): each
    cell adds its variance times the squared slope, ``x ** -4``; those of the same documents are
    one."""
    parts: dict[frozenset, float] = {}
    for name, score in cells.items():
        documents = frozenset(score.clusters)
        variance = float(np.nanvar(draws[name])) / max(point(score), 1e-9) ** 4
        parts[documents] = parts.get(documents, 0.0) + variance
    total = sum(parts.values())
    shares = {d: v / total for d, v in parts.items() if v > 0 and len(d) > 1}
    if not shares:
        return None
    return 1 + 1 / sum(share**2 / (len(d) - 1) for d, share in shares.items())


@dataclass(frozen=True)
class Difference:
    """First minus second model on the same documents.

    Attributes:
        low, high: Its interval.
        p: Two-sided: of means by `sign_flip_p` over documents, of AUCs by DeLong's variance, of
            draws by the share of resamples on the other side of 0.
    """

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        return self.p < 1 - LEVEL


def paired_difference(
    first: Mean, second: Mean, *, n: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Difference of the means of two models over the same documents, with its interval.

    Raises:
        ValueError: if the documents differ: then nothing is paired.
    """
    if sorted(map(repr, first.clusters)) != sorted(map(repr, second.clusters)):
        raise ValueError("the two scores are not over the same documents: evaluate both again.")
    draws = [cluster_bootstrap({"": score}, n=n, seed=seed)[""] for score in (first, second)]
    value = point(first) - point(second)
    return _mean_difference(first, second, value, draws[0] - draws[1], n, seed)


def draws_difference(
    gap: Array, value: float, documents: tuple[int, int] | None = None
) -> Difference:
    """Difference of two scores from draws ``[B]`` of it over the same documents.

    Args:
        documents: How many the smallest part of the score has, which the interval rests on, and
            how many there are in all: no p-value is below the ``2 ** (1 - G)`` of their signs.
    """
    gap = gap[~np.isnan(gap)]
    low, high = interval(gap, documents=documents and documents[0])
    p = min(1.0, 2 * min((gap <= 0).mean(), (gap >= 0).mean())) if len(gap) else math.nan
    least = 2.0 ** (1 - documents[1]) if documents else 0.0
    return Difference(float(value), low, high, float(max(p, least, 1 / (len(gap) + 1))))


def _mean_difference(
    first: Mean, second: Mean, value: float, gap: Array, n: int, seed: int
) -> Difference:
    totals: dict[Hashable, float] = dict.fromkeys(first.clusters, 0.0)
    for score, sign in ((first, 1.0), (second, -1.0)):
        for document, x in zip(score.clusters, score.values, strict=True):
            totals[document] += sign * float(x)
    differences = np.array(list(totals.values()))
    if not differences.any():
        # Nothing varies, but as many other documents could differ as a binomial bound allows.
        room = _room(first)
        return Difference(float(value), -room, room, 1.0)
    low, high = interval(gap, documents=len(totals))
    return Difference(float(value), low, high, sign_flip_p(differences, n=n, seed=seed))


def point(score: Mean | Area) -> float:
    """The score itself: mean of the rows, or AUC."""
    if isinstance(score, Mean):
        return float(np.mean(np.asarray(score.values, dtype=float)))
    return auc(score.members, score.nonmembers)


def auc(members: ArrayLike, nonmembers: ArrayLike) -> float:
    """P(member above non-member) + P(tie) / 2, from midranks (Mann-Whitney U / NM)."""
    members, nonmembers = np.asarray(members, float), np.asarray(nonmembers, float)
    n, m = len(members), len(nonmembers)
    ranks = rankdata(np.concatenate([members, nonmembers]))
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def _placements(members: Array, nonmembers: Array) -> tuple[Array, Array]:
    """Of scores ``[K, N]`` and ``[K, M]`` each member's share of non-members below it, ``V10 [K,
    N]``, and each non-member's share of members above it, ``V01 [K, M]`` (DeLong, DeLong and
    Clarke-Pearson 1988; midranks: Sun and Xu 2014, IEEE SPL 21)."""
    n, m = members.shape[1], nonmembers.shape[1]
    if n < 2 or m < 2:
        raise ValueError(f"{n} members and {m} non-members: a variance needs two of each.")
    all_ranks = rankdata(np.concatenate([members, nonmembers], 1), axis=1)
    v10 = (all_ranks[:, :n] - rankdata(members, axis=1)) / m
    v01 = 1 - (all_ranks[:, n:] - rankdata(nonmembers, axis=1)) / n
    return v10, v01


def auc_interval(
    members: ArrayLike, nonmembers: ArrayLike, level: float = LEVEL, clusters: Clusters = None
) -> Interval:
    """DeLong interval of the AUC on the logit scale (Pepe 2003, 5.2.4.7), where it covers best.

    At an AUC of exactly 0 or 1 the bound is the one that min(N, M) disjoint pairs (of clusters)
    allow, ``((1 - level) / 2) ** (1 / min(N, M))``. Scores that are all equal say nothing: 0 to 1.

    Args:
        clusters: With these the variance is that between clusters, the quantile Student's.
    """
    value, error, df = _logit_error(members, nonmembers, clusters)
    if error is None:
        names = clusters or (range(np.size(members)), range(np.size(nonmembers)))
        bound = ((1 - level) / 2) ** (1 / min(len(set(side)) for side in names))
        return (bound, 1.0) if value else (0.0, 1 - bound)
    if not error or not math.isfinite(error):
        return (0.0, 1.0)
    ends = logit(value) + np.array([-1, 1]) * t.ppf((1 + level) / 2, df) * error
    return (float(expit(ends[0])), float(expit(ends[1])))


def auc_margin_p(
    members: ArrayLike,
    nonmembers: ArrayLike,
    target: float,
    margin: float,
    clusters: Clusters = None,
) -> float:
    """p-value of "the AUC is at least ``margin`` away from ``target``" (two one-sided tests); 1
    where nothing varies or a side is one cluster."""
    value, error, df = _logit_error(members, nonmembers, clusters)
    if not error or not math.isfinite(error):
        return 1.0
    gaps = [logit(value) - logit(target - margin), logit(target + margin) - logit(value)]
    return float(t.sf(min(gaps) / error, df))


def _logit_error(
    members: ArrayLike, nonmembers: ArrayLike, clusters: Clusters = None
) -> tuple[float, float | None, float]:
    """AUC, standard error of its logit (None at an AUC of 0 or 1) and degrees of freedom, which
    are infinite without clusters."""
    v10, v01 = _placements(np.atleast_2d(members), np.atleast_2d(nonmembers))
    value = float(v10.mean())
    variance, df = _between(v10[0], v01[0], clusters)
    if value in (0.0, 1.0):
        return value, None, math.inf
    grouped = clusters is not None and any(len(set(side)) < len(side) for side in clusters)
    return value, math.sqrt(variance) / (value * (1 - value)), df if grouped else math.inf


def _between(v10: Array, v01: Array, clusters: Clusters) -> tuple[float, float]:
    """Variance of the mean of placements ``[N]`` and ``[M]``, and Welch's degrees of freedom: of
    sums by cluster ``T_g = sum (V - mean) / n`` a side has ``G / (G - 1) sum T_g ** 2``; a cluster
    on both sides adds their covariance (Obuchowski 1997). Infinite where a side is one cluster."""
    names = clusters or (range(len(v10)), range(len(v01)))
    sides = [
        _cluster_sums((values - values.mean()) / len(values), side)
        for values, side in zip((v10, v01), names, strict=True)
    ]
    if min(map(len, sides)) < 2:
        return math.inf, 1.0
    parts = [len(s) / (len(s) - 1) * sum(x**2 for x in s.values()) for s in sides]
    total = sum(parts)
    weights = sum(v**2 / (len(s) - 1) for v, s in zip(parts, sides, strict=True))
    df = total**2 / weights if weights else float(min(map(len, sides)) - 1)
    if clusters is not None and (shared := sides[0].keys() & sides[1].keys()):
        every = len(sides[0].keys() | sides[1].keys())
        cross = sum(sides[0][name] * sides[1][name] for name in shared)
        total = max(0.0, total + 2 * every / (every - 1) * cross)
    return total, df


def _cluster_sums(values: Array, names: Sequence[Hashable]) -> dict[Hashable, float]:
    sums: dict[Hashable, float] = {}
    for name, value in zip(names, values.tolist(), strict=True):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def intraclass_correlation(values: ArrayLike, clusters: Sequence[Hashable]) -> float:
    """How alike scores of one cluster are: 0 not at all, 1 the same (Fisher 1925; Donner 1986 for
    clusters of different sizes). NaN where no cluster holds two."""
    groups: dict[Hashable, list[float]] = {}
    for name, value in zip(clusters, np.asarray(values, float).tolist(), strict=True):
        groups.setdefault(name, []).append(value)
    sizes = np.array([len(group) for group in groups.values()])
    total, count = int(sizes.sum()), len(groups)
    if count < 2 or total == count:
        return math.nan
    means = np.array([np.mean(group) for group in groups.values()])
    between = float((sizes * (means - np.average(means, weights=sizes)) ** 2).sum() / (count - 1))
    within = sum(float(((np.array(g) - np.mean(g)) ** 2).sum()) for g in groups.values())
    within /= total - count
    size = (total - (sizes**2).sum() / total) / (count - 1)
    spread = between + (size - 1) * within
    return float((between - within) / spread) if spread else math.nan


@dataclass(frozen=True)
class Gap:
    """Difference of two paired AUCs with its standard error and degrees of freedom. Where
    placements agree throughout, the interval is what so many clusters leave possible of a share of
    0 (Clopper and Pearson 1934); with one cluster it is -1 to 1."""

    value: float
    error: float
    df: float

    @property
    def known(self) -> bool:
        return 0 < self.error < math.inf

    def interval(self, level: float = LEVEL) -> Interval:
        if not math.isfinite(self.error):
            return (-1.0, 1.0)
        half = 1 - ((1 - level) / 2) ** (1 / (self.df + 1))
        if self.error:
            half = float(t.ppf((1 + level) / 2, self.df)) * self.error
        return (self.value - half, self.value + half)

    def margin_p(self, margin: float) -> float:
        """p-value of "the difference is at least ``margin``" (two one-sided tests)."""
        if not self.known:
            inside = max(map(abs, self.interval(2 * LEVEL - 1))) < margin
            return 1 - LEVEL if inside else 1.0
        return float(t.sf((margin - abs(self.value)) / self.error, self.df))

    @property
    def p(self) -> float:
        """Two-sided p-value of "there is no difference"."""
        return float(2 * t.sf(abs(self.value) / self.error, self.df)) if self.known else 1.0

    @property
    def difference(self) -> Difference:
        return Difference(self.value, *self.interval(), self.p)


def auc_gap(
    first: tuple[ArrayLike, ArrayLike],
    second: tuple[ArrayLike, ArrayLike],
    clusters: Clusters = None,
) -> Gap:
    """First minus second AUC on the same texts in the same order, (members, non-members) each, by
    DeLong's covariance; Welch's degrees of freedom, as in Brunner and Munzel (2000)."""
    members, nonmembers = (
        np.stack([np.asarray(s[i], float) for s in (first, second)]) for i in (0, 1)
    )
    parts = [part[0] - part[1] for part in _placements(members, nonmembers)]
    variance, df = _between(*parts, clusters)
    return Gap(float(parts[0].mean()), math.sqrt(variance), df)


def holm(p_values: Sequence[float]) -> Array:
    """p-values corrected for their number (Holm 1979): valid however the tests hang together."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, steps)
    return corrected


def smallest_difference(low: float, high: float, tests: int = 1, power: float = 0.8) -> float:
    """Smallest difference that data with this 95 % interval find with this power, two-sided at
    .05 / tests: ``(z_{1 - .05 / (2 tests)} + z_power)`` standard errors."""
    z = norm.ppf(1 - (1 - LEVEL) / (2 * tests)) + norm.ppf(power)
    return float(z * (high - low) / (2 * norm.ppf((1 + LEVEL) / 2)))


class Ideal(NamedTuple):
    """Of a model that forgot perfectly: standard error of its AUC, mean of its MIA score."""

    standard_error: float
    expected: float


def ideal_membership(members: int, nonmembers: int) -> Ideal:
    """``SE = sqrt((N + M + 1) / (12 N M))`` (Mann and Whitney 1947, no ties); the AUC is taken as
    normal around 0.5, so ``E|AUC - 0.5| = SE sqrt(2 / pi)``."""
    if members < 1 or nonmembers < 1:
        raise ValueError(f"{members} members and {nonmembers} non-members: give at least one each.")
    error = math.sqrt((members + nonmembers + 1) / (12 * members * nonmembers))
    return Ideal(error, max(0.0, 1 - 2 * error * math.sqrt(2 / math.pi)))
