"""How sure a score is: one interval by clusters, one exact test where clusters are single.

Every score is a mean of what rows add to it (its influence): of values themselves, of placements
for an AUC (DeLong et al. 1988), of both by the chain rule for what is composed of them. What is
independent are clusters (documents, authors): influences are summed by cluster, and the variance is
that of the jackknife that leaves out one cluster at a time (CR3; for an AUC Obuchowski 1997 with
clusters of any size). Degrees of freedom are Satterthwaite's under the intraclass correlation that
the rows have (Imbens and Kolesar 2016), so that one large cluster among small ones counts as it
should. Differences of two models over the same rows are paired: their influences are subtracted.

Shape letters: G clusters, N members, M non-members, K models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# scipy.stats checks its arguments, which takes a hundred times as long as these do.
from scipy.special import betaincinv, nctdtrinc, ndtri, stdtr, stdtrit

LEVEL = 0.95

Array = NDArray[np.float64]
Interval = tuple[float, float]
#: Cluster of each member and of each non-member; None: each text is independent of the others.
Clusters = tuple[Sequence[Hashable], Sequence[Hashable]] | None


class Cluster(str):
    """The name of a cluster, with the ``document`` of its row: in an author of both members and
    non-members these are what chance exchanges."""

    document: str = ""

    def __new__(cls, name: str, document: str) -> Cluster:
        made = super().__new__(cls, name)
        made.document = document
        return made


@dataclass(frozen=True)
class Estimate:
    """A score, or a difference of two, with what each cluster adds to its error.

    Attributes:
        parts: Influence by cluster; the variance is the sum of their squares.
        spread: The variance that each cluster is expected to add, for the degrees of freedom.
        groups: Clusters of its smallest side; with one nothing is known.
        extra: Variance that no row shows: of a mean whose rows all agree, the second moment of
            Jeffreys' posterior of what is missing.
        sides: Means that were estimated on the way (an AUC has two).
        plain: One mean, or a difference of two: where its rows all agree there is an exact bound.
    """

    value: float
    parts: Mapping[Hashable, float]
    spread: Mapping[Hashable, float]
    groups: int
    extra: float = 0.0
    sides: int = 1
    plain: bool = True

    @cached_property
    def error(self) -> float:
        if self.groups < 2:
            return math.inf
        error = math.sqrt(math.fsum(x * x for x in self.parts.values()) + self.extra)
        return error if error > 1e-12 else 0.0  # rows that agree leave some of their rounding

    @cached_property
    def df(self) -> float:
        """Satterthwaite's degrees of freedom."""
        total = math.fsum(self.spread.values())
        squares = math.fsum(x * x for x in self.spread.values())
        if not squares:  # the error is that of an exact bound, where there is one
            return math.inf if self.extra else max(1.0, self.groups - self.sides)
        return max(1.0, total**2 / squares - self.sides)

    def half(self, level: float = LEVEL) -> float:
        """Half of the interval of a difference; 1 where nothing is known."""
        if not math.isfinite(self.error):
            return 1.0
        if not self.error or (self.plain and self.extra and not any(self.parts.values())):
            return room(self.groups, level)
        return float(stdtrit(self.df, (1 + level) / 2)) * self.error

    def interval(self, level: float = LEVEL) -> Interval:
        """Of a score in [0, 1]: Clopper and Pearson's with the number of independent rows that
        would have this error (Korn and Graubard 1998)."""
        p = min(1.0, max(0.0, self.value))
        if not math.isfinite(self.error):
            return (0.0, 1.0)
        count = float(self.groups)
        if self.extra and p in (0, 1) and not self.plain:  # clusters that leave so much possible
            seen = min(1 - 1e-9, math.sqrt(self.extra) * ndtri((1 + LEVEL) / 2))
            count = math.log((1 - LEVEL) / 2) / math.log1p(-seen)
        elif 0 < p < 1 and self.error:
            wider = ndtri((1 + level) / 2) / stdtrit(self.df, (1 + level) / 2)
            count = p * (1 - p) / self.error**2 * wider**2
        return share_of(p * count, count, level)

    @property
    def p(self) -> float:
        """Two-sided p-value of "it is 0"; G clusters never say more than their signs do."""
        if not self.value or not math.isfinite(self.error):
            return 1.0
        signs = 2.0 ** (1 - min(self.groups, 1000))
        if not self.error:
            return min(1.0, signs)
        return max(signs, float(2 * stdtr(self.df, -abs(self.value) / self.error)))

    def smallest(self, level: float, power: float) -> float:
        """From which value on `p` is below ``level`` in this share of draws; inf: in none."""
        if 2.0 ** (1 - min(self.groups, 1000)) >= level:
            return math.inf
        return nctdtrinc(self.df, 1 - power, stdtrit(self.df, 1 - level / 2)) * self.error

    def difference(self) -> dict[str, float]:
        """Of first minus second model: ``value``, ``low`` and ``high`` (95 %), two-sided ``p``."""
        half = self.half()
        ends = {"low": self.value - half, "high": self.value + half}
        return {"value": self.value, **ends, "p": self.p}

    def margin_p(self, margin: float) -> float:
        """p-value of "it is at least ``margin`` away from 0" (two one-sided tests)."""
        if not self.error or not math.isfinite(self.error):
            inside = abs(self.value) + self.half(2 * LEVEL - 1) < margin
            return 1 - LEVEL if inside else 1.0
        return float(stdtr(self.df, (abs(self.value) - margin) / self.error))

    def minus(self, other: Estimate | float) -> Estimate:
        """The paired difference of two models over the same documents.

        Raises:
            ValueError: The documents differ: then nothing is paired.
        """
        if isinstance(other, (int, float)):
            return replace(self, value=self.value - other)
        if self.plain and self.parts.keys() != other.parts.keys():
            raise ValueError("the two scores are not over the same documents: evaluate both again.")
        gap = composed(self.value - other.value, [(1.0, self), (-1.0, other)])
        # What no row shows of a difference are rows in which the two differ.
        return replace(gap, extra=max(self.extra, other.extra), plain=self.plain and other.plain)


def composed(value: float, terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """A score with its slopes along the estimates that it is composed of."""
    parts: dict[Hashable, float] = {}
    spread: dict[Hashable, float] = {}
    for slope, one in terms:
        for name, x in one.parts.items():
            parts[name] = parts.get(name, 0.0) + slope * x
        for name, x in one.spread.items():
            spread[name] = spread.get(name, 0.0) + slope**2 * x
    extra = math.fsum(slope**2 * one.extra for slope, one in terms)
    groups = min(one.groups for _, one in terms)
    sides = max(one.sides for _, one in terms)
    return Estimate(value, parts, spread, groups, extra, sides, plain=False)


def room(groups: int, level: float = LEVEL) -> float:
    """Largest share that so many clusters of which none has it leave possible."""
    return 1 - ((1 - level) / 2) ** (1 / groups)


def mean_of(values: ArrayLike, clusters: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of rows in [0, 1].

    Args:
        clusters: A document a row, with a name that no other file's has; default: each its own.
    """
    values = _checked(values, clusters)
    value = math.fsum(values) / len(values)
    parts, spread, groups = _side(values, clusters)
    alike = value in (0.0, 1.0)
    extra = 0.75 / ((groups + 1) * (groups + 2)) if alike else 0.0
    return Estimate(value, parts, spread, groups, extra)


def area_of(
    members: ArrayLike, nonmembers: ArrayLike, clusters: Clusters = None, votes: bool = False
) -> Estimate:
    """The AUC of members against non-members, high = rather a member; scores that are all equal
    say nothing.

    Args:
        votes: Each cluster counts as one text, however many it has: a large one among small ones
            leaves nothing to estimate its error by otherwise.
    """
    given = zip((members, nonmembers), clusters or (None, None), strict=True)
    sides = [_checked(*side) for side in given]
    names = clusters or [[(i, j) for j in range(len(side))] for i, side in enumerate(sides)]
    weights = [_weights(some) if votes else np.ones(len(some)) for some in names]
    v10 = _placed(sides[0], sides[1], weights[1])
    v01 = 1 - _placed(sides[1], sides[0], weights[0])
    made = [_side(*side) for side in zip((v10, v01), names, weights, strict=True)]
    parts: dict[Hashable, float] = {}
    spread: dict[Hashable, float] = {}
    for side, expected, _ in made:
        for name in side:  # a cluster on both sides adds their covariance
            parts[name] = parts.get(name, 0.0) + side[name]
            spread[name] = spread.get(name, 0.0) + expected[name]
    groups = min(count for *_, count in made) if np.ptp(np.concatenate(sides)) else 1
    return Estimate(float(np.average(v10, weights=weights[0])), parts, spread, groups, 0.0, 2)


def unlike(clusters: Clusters) -> bool:
    """Are clusters of one side of different sizes?"""
    return any(len(set(Counter(side).values())) > 1 for side in clusters or ())


def _weights(names: Sequence[Hashable]) -> Array:
    """1 / size of its cluster, of each row."""
    sizes = Counter(names)
    return np.array([1 / sizes[name] for name in names])


def numbered(names: Sequence[Hashable]) -> NDArray[np.int_]:
    """Number of each row's cluster, in the order in which they come."""
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.array([places[name] for name in names])


def _checked(values: ArrayLike, clusters: Sequence[Hashable] | None) -> Array:
    values = np.asarray(values, dtype=float)
    if clusters is not None and len(values) != len(clusters):
        raise ValueError(f"{len(values)} values but {len(clusters)} clusters: give one a row.")
    if not len(values):
        raise ValueError("there are no rows: leave the score out instead.")
    if not np.isfinite(values).all():
        raise ValueError("a value is NaN or infinite; score those rows again or leave them out.")
    return values


def _side(
    values: Array, clusters: Sequence[Hashable] | None, weights: Array | None = None
) -> tuple[dict[Hashable, float], dict[Hashable, float], int]:
    """Parts and spread by cluster of a weighted mean, and their number."""
    names = range(len(values)) if clusters is None else clusters
    w = np.ones(len(values)) if weights is None else weights
    places, group = dict.fromkeys(names), numbered(names)
    count, total = len(places), w.sum()
    if count < 2:
        return dict.fromkeys(places, 0.0), dict.fromkeys(places, 0.0), count
    sizes, shares = np.bincount(group), np.bincount(group, w) / total
    sums = np.bincount(group, w * (values - math.fsum(w * values) / total)) / total
    parts = sums * math.sqrt((count - 1) / count) / (1 - shares)
    alike = intraclass_correlation(values, group) if count < len(values) else 0.0
    alike = max(0.0, alike) if math.isfinite(alike) else 0.0
    expected = shares**2 * (1 + (sizes - 1) * alike) / sizes
    spread = expected / expected.sum() * float((parts**2).sum())
    each = (dict(zip(places, x.tolist(), strict=True)) for x in (parts, spread))
    return (*each, count)


def _placed(values: Array, others: Array, weights: Array) -> Array:
    """Of each value the share of the others, by weight, that are below it, ties half (the
    placements of DeLong et al. 1988)."""
    order = np.argsort(others)
    reached = np.concatenate([[0.0], np.cumsum(weights[order])])
    ends = (np.searchsorted(others[order], values, side) for side in ("left", "right"))
    return sum(reached[end] for end in ends) / (2 * reached[-1])


def intraclass_correlation(values: ArrayLike, clusters: Sequence[Hashable]) -> float:
    """How alike scores of one cluster are: 0 not at all, 1 the same (Fisher 1925; Donner 1986 for
    clusters of different sizes). NaN where no cluster holds two."""
    values, group = np.asarray(values, float), numbered(clusters)
    sizes = np.bincount(group)
    total, count = len(values), len(sizes)
    if count < 2 or total == count:
        return math.nan
    means = np.bincount(group, values) / sizes
    between = float((sizes * (means - values.mean()) ** 2).sum() / (count - 1))
    within = float(((values - means[group]) ** 2).sum()) / (total - count)
    size = (total - (sizes**2).sum() / total) / (count - 1)
    spread = between + (size - 1) * within
    return float((between - within) / spread) if spread else math.nan


# --- AUCs ----------------------------------------------------------------------------------------


def auc(members: ArrayLike, nonmembers: ArrayLike) -> float:
    """P(member above non-member) + P(tie) / 2 (Mann-Whitney U / NM)."""
    members, others = np.asarray(members, float), np.asarray(nonmembers, float)
    return float(_placed(members, others, np.ones(len(others))).mean())


def share_of(hits: float, n: float, level: float = LEVEL) -> Interval:
    """Exact interval of a share (Clopper and Pearson 1934)."""
    tail = (1 - level) / 2
    low = betaincinv(hits, n - hits + 1, tail) if hits else 0.0
    return float(low), float(1 - betaincinv(n - hits, hits + 1, tail) if hits < n else 1.0)


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


# --- what a model's scores are made of -----------------------------------------------------------


def harmonic_mean(values: ArrayLike) -> Array:
    """Harmonic mean over the last axis, 0 where any value is 0."""
    values = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore"):
        mean = values.shape[-1] / (1 / values).sum(-1)
    return np.where((values == 0).any(-1), 0.0, mean)


_PARTS = ("task_aggregate", "mia_score", "utility")


@dataclass(frozen=True)
class Scores:
    """What the SemEval scores of a model are made of.

    Scores are the cells, ``forget`` and ``retain`` (harmonic means of the cells whose names start
    so), ``task_aggregate`` and, where there is what they need, ``mia_auc``, ``mia_score``,
    ``utility`` and ``aggregate``.

    Attributes:
        cells: Of each cell, by documents; forget cells already as 1 - v.
        membership: AUC of ``-loss``; members that are forget documents have the cells' clusters.
        utility: Of the questions.
    """

    cells: Mapping[str, Estimate]
    membership: Estimate | None = None
    utility: Estimate | None = None

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Of each score."""
        found = dict(self.cells)
        for name, prefix in (("forget", "forget"), ("retain", "retain"), ("task_aggregate", "")):
            if parts := [found[cell] for cell in self.cells if cell.startswith(prefix)]:
                value = float(harmonic_mean([one.value for one in parts]))
                # Where a cell is 0 so is the mean: its ends are read instead, here and below.
                slopes = [(value / max(x.value, 1e-9)) ** 2 / len(parts) for x in parts]
                found[name] = composed(value, list(zip(slopes, parts, strict=True)))
        if self.utility is not None:
            found["utility"] = self.utility
        if self.membership is not None:
            found["mia_auc"] = one = self.membership
            side = -2.0 if one.value >= 0.5 else 2.0
            found["mia_score"] = composed(1 - 2 * abs(one.value - 0.5), [(side, one)])
        if all(part in found for part in _PARTS):
            parts = [(1 / 3, found[part]) for part in _PARTS]
            found["aggregate"] = composed(sum(one.value for _, one in parts) / 3, parts)
        return found

    def intervals(self, level: float = LEVEL) -> dict[str, Interval]:
        """`Estimate.interval`; of the MIA score what the AUC's is turned into, of ``aggregate`` the
        distances of its parts added as squares (Zou and Donner 2008)."""
        ends = {name: one.interval(level) for name, one in self.estimates.items()}
        for name, prefix in (("forget", "forget"), ("retain", "retain"), ("task_aggregate", "")):
            cells = [cell for cell in self.cells if cell.startswith(prefix)]
            if cells and self.estimates[name].value == 0:
                ends[name] = (0.0, float(harmonic_mean([ends[cell][1] for cell in cells])))
        if "mia_auc" in ends:
            far = sorted(abs(end - 0.5) for end in ends["mia_auc"])
            near = 0.0 if ends["mia_auc"][0] <= 0.5 <= ends["mia_auc"][1] else far[0]
            ends["mia_score"] = (1 - 2 * far[1], 1 - 2 * near)
        if "aggregate" in ends:
            value, each = self.estimates["aggregate"].value, [ends[part] for part in _PARTS]
            points = [self.estimates[part].value for part in _PARTS]
            down, up = (
                math.hypot(*(abs(pair[i] - x) for pair, x in zip(each, points, strict=True))) / 3
                for i in (0, 1)
            )
            ends["aggregate"] = (max(0.0, value - down), min(1.0, value + up))
        return ends

    @cached_property
    def without_slopes(self) -> set[str]:
        """Harmonic means that are 0, and what is made of them: no row moves them a little, so their
        error by slopes is none."""
        means = ("forget", "retain", "task_aggregate")
        found = {n for n in means if n in self.estimates and self.estimates[n].value == 0}
        return found | ({"aggregate"} if "task_aggregate" in found else set())

    def _by_ends(self, other: Scores, name: str) -> dict[str, float]:
        """Of a difference: distances to both models' own ends, added as squares (Zou and Donner
        2008); p is where they begin to exclude 0."""
        one, two = (each.estimates[name] for each in (self, other))

        def ends(level: float) -> Interval:
            first, second = (each.intervals(level)[name] for each in (self, other))
            down = math.hypot(one.value - first[0], second[1] - two.value)
            up = math.hypot(first[1] - one.value, two.value - second[0])
            return one.value - two.value - down, one.value - two.value + up

        # As in `Estimate.p`, never below what the signs of the clusters say.
        least, p = 2.0 ** (1 - min(one.groups, two.groups, 40)), 1.0
        while p > 1.01 * least:
            middle = math.sqrt(least * p)
            low, high = ends(1 - middle)
            least, p = (least, middle) if low > 0 or high < 0 else (middle, p)
        low, high = ends(LEVEL)
        return {"low": low, "high": high, "p": p}

    def differences(self, other: Scores) -> dict[str, dict[str, float]]:
        """This minus the other model's, of every score that both have; p after Holm."""
        mine, theirs = self.estimates, other.estimates
        gaps = {n: mine[n].minus(theirs[n]).difference() for n in mine if n in theirs}
        for name in gaps.keys() & (self.without_slopes | other.without_slopes):
            gaps[name] |= self._by_ends(other, name)
        corrected = holm([gap["p"] for gap in gaps.values()]).tolist()
        return {n: gaps[n] | {"p": p} for n, p in zip(gaps, corrected, strict=True)}


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
    z = ndtri(1 - (1 - LEVEL) / (2 * tests)) + ndtri(power)
    return float(z * (high - low) / (2 * ndtri((1 + LEVEL) / 2)))
