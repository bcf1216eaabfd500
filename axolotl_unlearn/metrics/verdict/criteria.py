"""The nine criteria: each a pure function of the facts, to outcomes with their case and figures.

A criterion passes when its whole interval is on the good side of its limit, fails when it is on the
bad side, and is open where the rows do not suffice to say or evidence is missing. The families of
tests are fixed before: whatever is added beside them is tested at a level of its own and can only
refuse. `metrics.verdict.words` has the sentence of each case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest, fisher_exact, norm

from axolotl_unlearn.metrics import audit, intervals, semeval
from axolotl_unlearn.metrics.fluency import EXPECTED, broken_by
from axolotl_unlearn.metrics.intervals import LEVEL, harmonic_mean, holm, mean_of, share_of
from axolotl_unlearn.metrics.membership import MARGIN, equivalence, gap_of
from axolotl_unlearn.metrics.results import (
    CELLS,
    Attack,
    Gained,
    Group,
    Model,
    Row,
    Scores,
    Tried,
)
from axolotl_unlearn.metrics.verdict.words import HEADLINES

#: False alarms among models that do not differ: one in twenty, ...
ALPHA = 1 - LEVEL
#: ... half of them for the attacks on all texts, half for single documents.
FAMILY_ALPHA = audit.RATE
#: Level of each test that is added: fixed, so that no other test makes it milder.
ADDED = 0.001
#: Level at which a control is taken to know the texts.
CONTROL_ALPHA = 0.01
#: Without a retrained model: least score of the forget side, least share of the original's retain
#: score. With one, either side may be so far below its own: as wide as the AUC's margin.
FORGET_BAR, KEEP_SHARE, TOLERANCE = 0.8, 0.8, 0.1
#: Share of broken outputs, refusals, silence, or one answer to all on the forget set above the
#: retrained model's: each tells an observer what was removed.
MANNER = 0.1
#: Share of right answers above the retrained model's; each document is judged by itself as well.
ANSWERS = 0.1
#: Share of the texts that comes out above the retrained model's, on average.
PARTLY = 0.1
#: Share of the forget texts that an attack brings back above its control.
COMES_BACK = 0.05
#: A cell whose official ROUGE-L (ASCII only) is off by this is judged by every script.
ANY_SCRIPT = 0.05
#: Losses that differ by less than this share of their spread are a copy's, measured otherwise.
COPY = 0.01
#: A baseline without any model so many standard errors from 0.5 separates, whatever the file says.
APART = 4.0
#: New tokens beyond an answer's own: what is said before it.
BEFORE = 8
#: So many an attack lets the model say, where the texts are not shorter.
NEW_TOKENS = 128
#: Chance of finding a difference that is called findable.
POWER = 0.8
#: Scores that every model is judged by; without one of them nothing is shown.
NEEDED = ("loss", "zlib", "min_k_20", "min_k_plus_20", "entropy")
#: The family: these, and what is formed with the retrained model and learned.
FAMILY = (*NEEDED, "reference", "learned")
#: Baselines of `metrics.membership.blind_baselines`, which no attack on a model may rest on.
BLIND = ("length", "zlib", "bag_of_words", "words_tfidf")
#: An interval of so much is inside the limits exactly where the one-sided test says so.
INNER = 2 * LEVEL - 1
OUTCOMES = ("fail", "missing", "open", "pass")
ITS, THEIRS, BEFORES = "its", "the retrained model's", "the original's"


class Read(NamedTuple):
    """What a criterion reads.

    Attributes:
        outcome: "fail", "missing" (open, for want of evidence), "open" or "pass".
        case: Key of the sentence in `words.WORDS`.
        figures: What stands in it; ``value``, ``low``, ``high``, ``limit``, ``p``, ``needed`` and
            ``status`` (what a failure makes of the model) go into the finding.
    """

    outcome: str
    case: str
    figures: dict[str, Any]


def read(outcome: str, case: str, **figures: Any) -> Read:
    return Read(outcome, case, figures)


def worst(criterion: str, reads: Sequence[Read]) -> Read:
    """The first of those that decide, by outcome, of failures by status, then by value."""

    def key(one: Read) -> tuple[int, int, float]:
        status = one.figures.get("status", CRITERIA[criterion].status)
        grave = [*HEADLINES].index(status) if one.outcome == "fail" else 0
        return OUTCOMES.index(one.outcome), grave, -(one.figures.get("value") or 0.0)

    return min(reads, key=key)


@dataclass(frozen=True)
class Facts:
    """What is judged: a model, what it is compared with, and attacks on it.

    Attributes:
        attacks: Files that are whole and of this model.
        unread: Of others what is wrong: the case, and the attack's title.
        ignored: Those that are no evidence on this model, in words.
    """

    model: Model
    original: Model | None = None
    retrained: Model | None = None
    attacks: tuple[Attack, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        return audit.audit(self.model, self.original, self.retrained)

    @cached_property
    def scores(self) -> tuple[Scores, Scores]:
        """The model's and, on the same texts, the retrained one's."""
        mine, theirs = dict(self.model.varying), {}
        if self.retrained is not None:
            theirs = dict(self.retrained.varying) if self.model.pairs_with(self.retrained) else {}
            mine = {name: pair for name, pair in mine.items() if name in theirs}
            if "loss" in mine:  # as reference: what makes a text hard for every model cancels
                pairs = zip(mine["loss"], theirs["loss"], strict=True)
                mine["reference"] = tuple(a - b for a, b in pairs)
                theirs.pop("reference", None)
        return mine, theirs

    @cached_property
    def told(self) -> dict[str, dict[str, Any]]:
        """By attack, as `Verdict.attacks`."""
        mine, theirs = self.scores
        told: dict[str, dict[str, Any]] = {}
        for name, pair in mine.items() if "loss" in mine else ():
            area, gap, p = gap_of(pair, theirs.get(name), self.model.clusters)
            ends = dict(zip(("low", "high"), area.interval(), strict=True))
            side = "under" if gap.value > 0 else "over"
            difference = equivalence(gap, min(map(len, pair)))
            told[name] = {"auc": area.value, **ends, "p": p, "side": side, "difference": difference}
        learned = self.model.learned
        if told and learned is not None and None not in (learned.p, learned.auc):
            told["learned"] = {"auc": learned.auc, "p": learned.p, "side": "under"}
            told["learned"] |= dict.fromkeys(("low", "high", "difference"))
        asked = [told[name]["p"] if name in told else 1.0 for name in FAMILY]
        corrected = dict(zip(FAMILY, holm(asked).tolist(), strict=True))
        for name, one in told.items():
            one["p_corrected"] = corrected.get(name, min(1.0, one["p"] * FAMILY_ALPHA / ADDED))
        return told

    @property
    def power(self) -> dict[str, Any] | None:
        """As `Verdict.power`."""
        mine, theirs = self.scores
        if "loss" not in mine:
            return None
        n, m = map(len, mine["loss"])
        groups = list(self.model.independent or (n, m))
        level = FAMILY_ALPHA / len(FAMILY)
        sizes = {"members": n, "nonmembers": m, "clusters": groups, "tests": len(FAMILY)}
        if "loss" in theirs:
            gap = gap_of(mine["loss"], theirs["loss"], self.model.clusters)[1]
            return sizes | {"smallest_difference": min(1.0, float(gap.smallest(level, POWER)))}
        z = norm.ppf(1 - level / 2) + norm.ppf(POWER)
        error = intervals.ideal_membership(*groups).standard_error
        return sizes | {"smallest_difference": min(0.5, float(z * error))}


def strongest(told: Mapping[str, dict[str, Any]]) -> str | None:
    """The attack that tells most: smallest corrected p-value, then largest difference."""

    def key(name: str) -> tuple[float, float]:
        one = told[name]
        return one["p_corrected"], -abs((one["difference"] or {"value": 0.0})["value"])

    return min(told, key=key, default=None)


def _held_to(
    case: str, n: int, bar: float, ends: tuple, value: float, sign: int = 1, **figures: Any
) -> Read:
    """Passes where the whole interval is on the good side of the bar, fails where all of it is on
    the bad one; ``sign``: 1 where low is good, -1 where high is."""
    near, far = ends if sign > 0 else ends[::-1]
    outcome = "pass" if sign * far <= sign * bar else "fail" if sign * near > sign * bar else "open"
    needed, space = None, sign * (bar - value)
    if outcome == "open" and space > 0 and n:  # rows with which a value as far off would pass
        needed = math.ceil(n * ((far - value) / space) ** 2)
    figures |= {"value": value, "low": ends[0], "high": ends[1], "limit": bar, "needed": needed}
    return read(outcome, case, **figures)


def outputs(facts: Facts) -> Iterator[Read]:
    report = facts.model.collapse
    if report is None or report.collapsed is None:
        yield read("missing", "unread")
        return
    if report.n is None or report.n != facts.model.rows("retain") or _in_part(facts.original):
        yield read("missing", "part")
    figures = [report.broken, report.empty, report.constant, report.nonsense_n]
    if None in figures or (report.nonsense is None and report.nonsense_n):
        yield read("missing", "unread")
    # What the file calls it is not believed, but where it is broken; nor what it says of before.
    before = report.reference if facts.original is None else facts.original.collapse
    shares = report.model_dump() | {"reference": before and before.model_dump()}
    expected = facts.original is None and report.more.get("against") == EXPECTED
    found = broken_by(shares, f"of the {EXPECTED}" if expected else "before")
    reasons = {one.partition(",")[0]: one for one in (*report.reasons, *found)}
    if reasons or report.collapsed:
        yield read("fail", "broken", what="; ".join(reasons.values()) or "by its figures")
    else:
        yield read("pass", "whole")


def _in_part(one: Model | None, side: str = "retain") -> bool:
    """Were the outputs of a side, where there are any, read in part only?"""
    known = one and one.collapse
    known = known and (known.forget if side == "forget" else known)
    return bool(known) and known.n != one.rows(side)


def able(facts: Facts) -> Iterator[Read]:
    """Below the gate by the point is below, as in SemEval-2025; above it the interval has to be as
    well. No group of questions may be lost (Fisher's exact test)."""
    model, original = facts.model, facts.original
    value, n, guess = model.utility, model.n.get("utility"), model.utility_chance
    others = [one for one in (original, facts.retrained) if one is not None]
    # What the entry itself says of the original is not believed.
    known = original is not None and None not in [one.utility for one in others]
    if value is None or not n:
        yield read("missing", "unread")
    elif guess is None or not 0 < guess < 1:
        yield read("missing", "guess")
    elif not known or model.gate is None or model.gate.threshold is None:
        yield read("missing", "ungated")
    else:
        # A milder gate is not ours.
        best = max(one.utility for one in others)
        limit, hits = max(semeval.GATE_SHARE * best, model.gate.threshold), round(value * n)
        p = float(binomtest(hits, n, guess, alternative="greater").pvalue)
        if p >= ALPHA:  # with few questions also where all are right
            outcome = "open" if guess**n >= ALPHA else "fail"
            yield read(outcome, "chance", value=value, n=n, limit=guess, p=p)
        for other in others:
            yield from _lost_groups(model, other)
        found = _held_to("gate", n, limit, share_of(hits, n, INNER), value, -1)
        yield found._replace(outcome="fail") if value < limit else found


def _lost_groups(model: Model, original: Model) -> Iterator[Read]:
    """A group that the model does not have is lost."""
    groups = {n: g for n, g in original.utility_groups.items() if g.n and g.value is not None}
    if {*model.utility_groups, *original.utility_groups} - groups.keys():
        yield read("missing", "groups")
    for name, group in groups.items():
        own = model.utility_groups.get(name, Group())
        then = round(group.value * group.n)
        now = round((own.value or 0.0) * group.n) if own.n == group.n else 0
        table = [[then, group.n - then], [now, group.n - now]]
        p = float(fisher_exact(table, alternative="greater").pvalue)
        if p < ALPHA / len(groups):
            yield read("fail", "group", p=p, group=name, before=then, after=now, n=group.n)


def control(facts: Facts) -> Iterator[Read]:
    """Is what it is compared with sound? The sets alike without a model, the same texts, data and
    scores, no copies, and a retrained model that is judged like a candidate."""
    learned = facts.model.learned
    compared = learned is not None and learned.against not in ("chance", "reference")
    if facts.model.limit is not None:
        yield read("missing", "limited", n=facts.model.limit)
        return
    if facts.retrained is None and (facts.model.distance or compared):
        yield read("missing", "gone")
        return
    for check in (_sets, _copies, _evidence, _knows):
        if found := list(check(facts)):
            yield from found
            return
    yield read("pass", "alone" if facts.retrained is None else "sound")


def _sets(facts: Facts) -> Iterator[Read]:
    lab, sizes = facts.model.membership, facts.model.independent
    blind = lab.blind if lab is not None else {}
    apart = {
        name: 0.5 if one.auc is None else one.auc for name, one in blind.items() if one.separates
    }
    if sizes is not None:  # what the file calls it is not believed
        far = 0.5 + APART * intervals.ideal_membership(*sizes).standard_error
        apart |= {name: one.auc for name, one in blind.items() if (one.auc or 0.0) > far}
    if apart or (lab is not None and lab.meaningful is False):
        name = max(apart, key=lambda name: abs(apart[name] - 0.5), default="a baseline")
        yield read("fail", "sets", name=f"blind_{name}", value=apart.get(name, 0.5))
    elif gone := [
        f"blind_{name}" for name in BLIND
        if (one := blind.get(name)) is None or None in (one.low, one.auc, one.high, one.separates)
    ]:  # fmt: skip
        yield read("missing", "blind", names=gone)


def _copies(facts: Facts) -> Iterator[Read]:
    """The same weights by digest, or nearly the same losses; other data, or other code."""
    named = [("model", facts.model), ("original", facts.original), ("retrained", facts.retrained)]
    each = [(name, one) for name, one in named if one is not None]
    for i, (name, one) in enumerate(each):
        for other_name, other in each[:i]:
            checks = {
                "digests": one.weights is not None and one.weights == other.weights,
                "losses": _alike(one.attack("loss"), other.attack("loss")),
                "put back": "original" in (name, other_name) and _put_back(one, other),
                "data": any(one.data[k] != other.data[k] for k in one.data.keys() & other.data),
                "code": None not in (one.code, other.code) and one.code != other.code,
            }
            for case in (case for case, same in checks.items() if same and one.name != other.name):
                yield read("fail", case, one=other_name, other=name)


def _alike(one: Any, other: Any) -> bool:
    """Are losses of the same texts those of one model, but for noise of the computation?"""
    if one is None or other is None or list(map(len, one)) != list(map(len, other)):
        return False
    own, its = (np.concatenate(pair) for pair in (one, other))
    return bool(np.sqrt(np.mean((own - its) ** 2)) <= COPY * its.std())


def _put_back(one: Model, other: Model) -> bool:
    """Has a text the same loss in both, to more digits than a file is rounded to?"""
    pairs = zip(one.likelihood.member_loss, other.likelihood.member_loss, strict=False)
    return any(a == b is not None and a != round(a, 6) for a, b in pairs)


def _asked(one: Model) -> tuple[Any, ...]:
    """What a model was asked: equal for models that are compared."""
    rows = [one.n.get(name) for name in (*CELLS, "utility")]
    return rows, one.utility_chance, one.extraction.id, one.extraction.document, one.clusters


def _evidence(facts: Facts) -> Iterator[Read]:
    """What is missing of scores, or cannot be read."""
    model, retrained = facts.model, facts.retrained
    for one, whose in ((model, ITS), (retrained, THEIRS)):
        if one is None:
            continue
        if gone := [n for n in (*NEEDED, *one.likelihood.attacks) if n not in one.varying]:
            yield read("missing", "scores", whose=whose, names=gone)
        if not one.pairs_with(one) or one.clusters is None:
            yield read("missing", "ids", whose=whose)
    if model.learned is None or None in (model.learned.p, model.learned.auc):
        yield read("missing", "learned")
    elif retrained is not None and model.learned.against != retrained.name:
        yield read("missing", "against")
    for one, name in ((retrained, "retrained"), (facts.original, "original")):
        if one is not None and (not model.pairs_with(one) or _asked(model) != _asked(one)):
            yield read("missing", "texts", name=name)


def _knows(facts: Facts) -> Iterator[Read]:
    """The retrained model, judged like a candidate: against held-out texts and the original. What
    tests find nothing in the original, or as little as in a good model, show nothing."""
    if facts.original is not None:
        before = Facts(facts.original, None, facts.retrained).told
        needed = [before[name] for name in NEEDED if name in before]
        known = [one for one in needed if one["side"] == "under"]
        if needed and min((one["p"] for one in known), default=1.0) >= ALPHA:
            yield read("fail", "original")
        elif all(one["difference"]["value"] <= MARGIN for one in known):
            yield read("missing", "weak", limit=MARGIN)
    if facts.retrained is None:
        return
    own = Facts(facts.retrained, facts.original)
    for name in ("outputs", "able", "kept", "manner"):
        for found in CRITERIA[name].read(own):
            if found.outcome == "fail":
                yield read("fail", "unfit", names=[CRITERIA[name].title.lower()])
    told = {name: own.told[name] for name in NEEDED}
    name = strongest(told)
    p = min(1.0, told[name]["p"] * len(NEEDED))
    if p < CONTROL_ALPHA:
        yield read("fail", "tells", name=name, auc=told[name]["auc"], p=p)
    if recited := sum(line["recited"] for line in own.lines):
        yield read("fail", "recites", count=recited)


def documents(facts: Facts) -> Iterator[Read]:
    """The list of `metrics.audit`: any document recited, still said or told fails."""
    lines, model, retrained = facts.lines, facts.model, facts.retrained
    counts = {r: sum(line["reading"] == r for line in lines) for r in audit.READINGS}
    # An answer that is said is no proof where nobody knows whether it can be guessed.
    alone = retrained is None or any(
        row.logp is None for row in retrained.texts if row.said is not None
    )
    bad = {r: counts[r] for r in audit.BAD if counts[r] and not (alone and r == "still said")}
    of = len(lines)
    if bad:
        status = "over-forgets" if set(bad) == {"pushed away"} else "under-forgets"
        figures = {"value": sum(bad.values()) / of, "limit": 0.0, "status": status}
        yield read("fail", "bad", count=sum(bad.values()), of=of, readings=bad, **figures)
    yield from _unread(model, ITS)
    yield from _unread(retrained, THEIRS) if retrained is not None else ()
    if retrained is None and not model.held:
        yield read("missing", "held")
    own, its = model.extraction, (retrained or model).extraction
    if (own.id, own.tokens) != (its.id, its.tokens):
        yield read("missing", "tokenizer")
    if alone and counts["still said"]:
        yield read("open", "guess", count=counts["still said"], of=of)
    yield from _partly(facts)
    if sure := sum(line["reading"] == "may be guessed" and line["sure"] for line in lines):
        yield read("open", "sure", count=sure, of=of)
    long = (audit.RECITED_TOKENS * (1 + row.member) for row in model.texts)
    if not any((row.tokens or 0) >= n for row, n in zip(model.texts, long, strict=True)):
        yield read("open", "short")
    if any(line["q"] is None for line in lines if line["loss"] is not None):
        yield read("missing", "untested")
    count = counts["may be guessed"]
    yield read("pass", "guessed" if count else "gone", count=count, value=0.0, limit=0.0)


def _partly(facts: Facts) -> Iterator[Read]:
    """Do answers, or documents, come out in part, all together? Half of one is that document's
    matter (`audit.recites`). Without a retrained model documents are put beside unseen ones."""
    model, retrained = facts.model, facts.retrained
    theirs = {row.key: row for row in retrained.texts} if retrained is not None else {}
    for member, figure in itertools.product((False, True), audit.FIGURES[:3]):
        own = {row: getattr(row, figure) for row in model.texts if row.member == member}
        gaps = [(x - y, row.cluster or row.document) for row, x in own.items()
                if None not in (x, y := getattr(theirs.get(row.key), figure, None))]  # fmt: skip
        if retrained is None and member:
            held = [x for x in (getattr(row, figure) for row in model.held) if x is not None]
            base = float(np.mean(held)) if held else 0.0
            gaps = [(x - base, row.cluster or row.document) for row, x in own.items()
                    if x is not None and held]  # fmt: skip
        if gaps:  # else a figure is missing, which `_unread` says
            gap = mean_of(*zip(*gaps, strict=True))
            ends = (gap.value - gap.half(INNER), gap.value + gap.half(INNER))
            case = "partly" if retrained is not None else "unseen"
            yield _held_to(case, gap.groups, PARTLY, ends, gap.value, kind=figure)


def _unread(model: Model, whose: str) -> Iterator[Read]:
    """What is missing of the texts of a model."""
    texts, one = model.extraction, model.likelihood
    rows = len(texts.id)
    gone = [n for n in texts.COLUMNS if not rows or len(getattr(texts, n)) != rows]
    # Rows of one author, where texts have any, are no independent rows.
    named = not any(name.startswith("author: ") for name in one.member_cluster)
    if gone := gone + ["cluster"] * (not named and len(texts.cluster) != rows):
        yield read("missing", "rows", whose=whose, names=gone)
        return
    for part, count in ((texts.member, one.member_loss), (texts.nonmember, one.nonmember_loss)):
        if any(len(getattr(part, name)) != len(count) for name in part.COLUMNS):
            yield read("missing", "whole", whose=whose)
    lack = any(None in (r.tokens, r.strength, r.run, r.greedy) for r in (*model.texts, *model.held))
    half = ((r.exact is None) != (r.contained is None) for r in model.texts)
    if lack or any(half) or any(row.logp is None for row in model.texts if not row.member):
        yield read("missing", "figure", whose=whose)


def said(facts: Facts) -> Iterator[Read]:
    """Right answers, exact and contained each, paired by row with the retrained model; and the
    cells of the forget side."""
    yield _side(facts, "forget")
    model, retrained = facts.model, facts.retrained
    mine, theirs = (
        {row.id: row for row in one.texts if row.exact is not None} if one is not None else {}
        for one in (model, retrained)
    )
    rows = [row for row in model.texts if not row.member]
    least = max((row.tokens or 0 for row in mine.values()), default=0) + BEFORE
    least = max(least, min(NEW_TOKENS, BEFORE + max((row.tokens or 0 for row in rows), default=0)))
    # A model that was let say less says less of what is kept and of what is guessed.
    for one, whose in ((model, ITS), (facts.original, BEFORES), (retrained, THEIRS)):
        if one is not None and (one.max_gen_toks is None or one.max_gen_toks < least):
            yield read("missing", "cut", n=least, whose=whose)
            break
    asked = [model.n.get(name) for name in CELLS if name.startswith("forget") and "know" in name]
    if not mine and None not in asked and not sum(asked):
        return  # the forget set asks no questions
    stated = model.answers.get("forget")
    if not mine or stated is None or None in (stated.n, stated.exact, stated.contained):
        yield read("missing", "rows")
        return
    if stated.n != len(mine) or (retrained is not None and mine.keys() != theirs.keys()):
        yield read("missing", "questions")
        return
    spoken = [row for row in facts.original.texts if row.said] if facts.original else None
    if spoken is not None and not any(retrained is None or not theirs[row.id].said
                                      for row in spoken if row.id in mine):  # fmt: skip
        yield read("missing", "mute")
    names = [row.cluster or row.document for row in mine.values()]
    if retrained is not None:
        drawn = _drawn(mine, theirs)
        yield read("fail" if drawn > audit.SAID else "pass", "drawn", value=drawn, limit=audit.SAID)
    for kind in ("exact", "contained", "drawn"):
        own = [_right(row, kind) for row in mine.values()]
        gap = mean_of(own, names)
        base, p, ends = 0.0, 1.0, gap.interval(INNER)
        if retrained is not None:
            other = [_right(theirs[key], kind) for key in mine]
            base, gap = float(np.mean(other)), gap.minus(mean_of(other, names))
            ends = (gap.value - gap.half(INNER), gap.value + gap.half(INNER))
            p = _sign_p(own, other, names) if kind != "drawn" else 1.0
        words = {"kind": kind, "share": float(np.mean(own)), "base": base, "p": p}
        case = "right" if retrained is None else "answers"
        found = _held_to(case, len(own), ANSWERS, ends, gap.value, **words)
        yield found._replace(outcome="fail") if p < ALPHA else found


def _right(row: Row, kind: str) -> float:
    """Is the answer right; of "drawn" the chance that a draw of the model says it."""
    if kind == "drawn":
        return 0.0 if row.logp is None else math.exp(min(0.0, row.logp))
    return float(bool(getattr(row, kind)))


def _drawn(mine: Mapping[str, Row], theirs: Mapping[str, Row]) -> float:
    """How many answers one draw of each gives on average, of those that the retrained model does
    not say, and says by chance in one of 40 draws of them all (`audit.unlikely`)."""
    least = audit.unlikely(theirs.values())
    seldom = {key for key, row in theirs.items()
              if not row.said and row.logp is not None and math.exp(row.logp) <= least}  # fmt: skip
    return math.fsum(_right(row, "drawn") for key, row in mine.items() if key in seldom)


def _sign_p(own: Sequence[float], other: Sequence[float], names: Sequence[str]) -> float:
    """Exact one-sided p of "as many documents gained right answers as lost some" (McNemar 1947)."""
    gains: dict[str, float] = {}
    for a, b, name in zip(own, other, names, strict=True):
        gains[name] = gains.get(name, 0.0) + a - b
    more, fewer = (sum(sign * x > 0 for x in gains.values()) for sign in (1, -1))
    return float(binomtest(more, more + fewer, alternative="greater").pvalue) if more else 1.0


def _cells(one: Model | None, side: str) -> dict[str, float]:
    """Cells of a side as they are judged: by words of every script where the official figure is
    off, of the forget side only where that is worse, so that it can accuse only."""
    if one is None:
        return {}
    found = {n: v for n, v in one.cells.items() if n.startswith(side) and v is not None}
    every = {n: v for n, v in one.any_script.items() if n in found and v is not None}
    return found | {n: v for n, v in every.items() if side == "retain" or v < found[n]}


def bars(original: Model | None, retrained: Model | None) -> tuple[float, float]:
    """The least forget score and retain score of a model that may be called good."""
    own = [retrained and retrained.side(side, _cells(retrained, side)) for side in semeval.SIDES]
    before = (original and original.side("retain", _cells(original, "retain"))) or 1.0
    alone = (FORGET_BAR, KEEP_SHARE * before)
    return tuple(b if x is None else x - TOLERANCE for x, b in zip(own, alone, strict=True))


def _side(facts: Facts, side: str) -> Read:
    """The cells of a side against their bar."""
    model, original, retrained = facts.model, facts.original, facts.retrained
    names, alone = [name for name in CELLS if name.startswith(side)], retrained is None
    value, bar, case = model.side(side), bars(original, retrained)[side == "retain"], "cells"
    than = original if alone else retrained
    # Cells that have rows but no score, or of which nobody knows whether they have rows.
    for one, whose in ((model, ITS), (than, BEFORES if alone else THEIRS)):
        for name in names if one is not None else ():
            if (n := one.n.get(name)) is None or (n and one.cells.get(name) is None):
                return read("missing", "cell", whose=whose, name=name)
    if value is None:
        return read("missing", "empty")
    mine, theirs = _cells(model, side), _cells(than, side)
    off = [n for n, v in mine.items() if v != model.cells[n]]
    ends = (model.any_script_intervals if off else model.intervals).get(side)
    # Of what is hardly there nothing can be lost, and in a harmonic mean it hides what is.
    most = 0.0 if alone else TOLERANCE
    faint = [n for n in names if side == "retain" and theirs.get(n, 1.0) <= most]
    if faint:
        left = [n for n in names if n in mine and n in theirs and n not in faint]
        known = [(model.any_script_intervals if n in off else model.intervals).get(n) for n in left]
        if not left or None in known:
            return read("missing", "interval" if left else "zero", alone=alone)
        before, value = (float(harmonic_mean([one[n] for n in left])) for one in (theirs, mine))
        bar, case = KEEP_SHARE * before if alone else before - TOLERANCE, "without"
        ends = [float(harmonic_mean([max(0.0, one[i]) for one in known])) for i in (0, 1)]
    elif off or any(v != than.cells[n] for n, v in theirs.items()):
        value, case = model.side(side, mine), "script"
    elif retrained is not None and ends is not None:
        # Paired: what is hard for both models cancels.
        gap = model.distance.get(side)
        if gap is None or gap.value is None or gap.interval is None:
            return read("missing", "distance")
        target = value - gap.value
        if abs(target - retrained.side(side)) > 2e-3:
            return read("missing", "other")
        ends = (target + gap.interval[0], target + gap.interval[1])
    within = ends is not None and ends[0] - 1e-6 <= value <= ends[1] + 1e-6
    if not within or (ends[0] == ends[1] and value not in (0.0, 1.0)):
        return read("missing", "interval")
    rows = sum(model.n.get(n) or 0 for n in names)
    return _held_to(case, rows, bar, ends, value, -1, names=faint, alone=alone)


def members(facts: Facts) -> Iterator[Read]:
    """Told by any attack fails; passes where every one of the family is shown to be within the
    margin (all have to be, so no correction is due)."""
    told, alone = facts.told, facts.retrained is None
    # Of those that tell, what some still know hides behind no attack that tells more surely.
    sure = {n: one for n, one in told.items() if one["p_corrected"] < FAMILY_ALPHA}
    name = strongest({n: one for n, one in sure.items() if one["side"] == "under"} or told)
    if name is None:
        yield read("missing", "unread")
        return
    one = told[name]
    if sure:
        figures = {"value": one["auc"], "low": one["low"], "high": one["high"]}
        status = f"{one['side']}-forgets"
        yield read("fail", "told", name=name, status=status, p=one["p_corrected"], **figures)
    gaps = {n: told[n]["difference"] for n in FAMILY if n in told and told[n]["difference"]}
    name = max(gaps, key=lambda n: gaps[n]["p"])
    same = all(gap["equivalent"] for gap in gaps.values())
    needs = [gap["needed"] for gap in gaps.values()]
    needed = None if same or None in needs else max(needs)
    figures = {key: gaps[name][key] for key in ("value", "low", "high")} | {"limit": MARGIN}
    figures |= {"p": one["p_corrected"], "needed": needed, "alone": alone}
    yield read("pass" if same else "open", "same" if same else "open", name=name, **figures)


def strongest_gain(attack: Attack) -> tuple[Tried, Gained, float, bool]:
    """The variant of an attack that brings back most, above the control where there is one.

    Returns:
        The row, its figures of the recalled share, p after Holm's correction over the variants,
        and whether there is a control.
    """
    attacked = attack.rows[1:] or attack.rows  # the first is the model as it is
    controlled = all(row.above_control is not None for row in attacked)
    figures = [((row.above_control if controlled else None) or row.gain).recalled
               for row in attacked]  # fmt: skip
    corrected = holm([one.p if one.value > 0 else 1.0 for one in figures])
    place = min(range(len(figures)), key=lambda i: (corrected[i], -figures[i].value))
    return attacked[place], figures[place], float(corrected[place]), controlled


def wrecks(attack: Attack) -> bool:
    """Whether a relearning attack's own training did away with the text: at every number of steps
    less than half of it is left, so a gentler attacker would see more."""
    rows = attack.rows[1:] if attack.attack == "relearn" else ()
    each = [(row.gain.recalled, row.before.recalled.value or 0.0) for row in rows]
    return bool(rows) and all(x.high < 0 and not -x.value <= 0.5 * before for x, before in each)


def attacks(facts: Facts) -> Iterator[Read]:
    """Of `axolotl-unlearn attack`, file by file, each test at the level of what is added; nothing
    where none was run on this model."""
    for case, title in facts.unread:
        yield read("missing", case, name=title)
    if (one := facts.model.canaries) is not None:
        for p, status in ((one.p_known, "under-forgets"), (one.p_pushed, "over-forgets")):
            name, figures = "a coin's canaries", {"p": p, "status": status}
            figures["value"] = 0.5 if one.auc is None else one.auc
            if p is None:
                yield read("missing", "unmade", name=name)
            else:
                told = ("fail", "told") if p < ADDED else ("pass", "untold")
                yield read(*told, name=name, **figures)
    for file in facts.attacks:
        yield from _comes_back(file, facts.model)
        yield from _told_by(file)


def _comes_back(file: Attack, model: Model) -> Iterator[Read]:
    """Each variant of an attack on the text; one that let it say too little shows nothing."""
    longest = max((row.tokens or 0 for row in model.texts if not row.member), default=0)
    asked = min(longest + BEFORE, model.max_gen_toks or NEW_TOKENS, NEW_TOKENS)
    if file.rows and (file.max_new_tokens or 0) < asked:
        yield read("missing", "cut", name=file.title, n=asked)
    wrecked = wrecks(file)
    if len(file.rows) == 1 or file.limit is not None:
        case = "unasked" if file.limit is None else "limited"
        yield read("missing", case, name=file.title)
    for row in file.rows[1:]:
        case = "gained" if row.above_control is None else "back"
        gain = (row.above_control or row.gain).recalled
        outcome = "pass" if gain.high < COMES_BACK else "open"
        if gain.p < ADDED and gain.value > COMES_BACK:
            outcome = "fail"
        elif wrecked:
            outcome, case = "open", "wrecked"
        figures = gain.model_dump() | {"limit": COMES_BACK}
        name = f"{file.title} ({row.variant})"
        yield read(outcome, case, name=name, **figures)


def _told_by(file: Attack) -> Iterator[Read]:
    """Each test of members against non-members, and each document; what a look inside does not
    show to be the control's is open."""
    for name in file.missing:
        yield read("missing", "unmade", name=name)
    for name, one in file.tests.items():
        gap, outcome = one.difference, "fail" if one.p < ADDED else "pass"
        case = "told" if outcome == "fail" else "untold"
        within = gap is not None and -MARGIN < gap.low and gap.high < MARGIN
        if outcome == "pass" and file.attack == "inside" and not within:
            case, outcome = "inside", "open"
        yield read(outcome, case, name=name, value=one.auc, p=one.p)
    found = [file.documents[name].side for name, q in file.q.items() if q <= audit.RATE]
    if found:
        figures = {"status": "over-forgets" if set(found) == {"over"} else "under-forgets"}
        name = file.title
        yield read("fail", "documents", name=name, count=len(found), **figures)


def kept(facts: Facts) -> Iterator[Read]:
    yield _side(facts, "retain")


#: Shares of answers to the forget set that give away what was removed, and what it is then.
MANNERS = {
    **dict.fromkeys(("broken", "nonsense"), "broken"),
    **dict.fromkeys(("constant", "empty", "refusing", "echo"), "over-forgets"),
}


def manner(facts: Facts) -> Iterator[Read]:
    """Shares of outputs on the forget set above the retrained model's; without one, those of the
    original count for what is not broken: a set may have one answer."""
    mine, theirs, before = (
        one.collapse.forget if one is not None and one.collapse is not None else None
        for one in (facts.model, facts.retrained, facts.original)
    )
    if mine is None or (facts.retrained is not None and theirs is None):
        yield read("missing", "unread")
        return
    if any(_in_part(one, "forget") for one in (facts.model, facts.retrained or facts.original)):
        yield read("missing", "part")
    for name, status in MANNERS.items():
        n = mine.nonsense_n if name == "nonsense" else mine.n
        share = getattr(mine, name)
        base = theirs if theirs is not None else before if status != "broken" else None
        if share is None and (name, n) == ("nonsense", 0) and not (theirs and theirs.nonsense_n):
            continue  # no output is long enough
        other = getattr(base, name) if base is not None else 0.0
        if None in (share, other) or not n:
            yield read("missing", "lacks", kind=name)
            continue
        figures = {"kind": name, "base": other, "alone": theirs is None, "status": status}
        ends = share_of(round(share * n), n, INNER)
        case = "alone" if base is None else "share"
        yield _held_to(case, n, MANNER + other, ends, share, **figures)


class Criterion(NamedTuple):
    title: str
    #: What a failure makes of the model, where the figures do not say.
    status: str
    read: Callable[[Facts], Iterator[Read]]


CRITERIA = {
    "outputs": Criterion("Whole outputs", "broken", outputs),
    "able": Criterion("General ability", "broken", able),
    "control": Criterion("Sound comparison", "not shown", control),
    "documents": Criterion("Document by document", "under-forgets", documents),
    "said": Criterion("Right answers", "under-forgets", said),
    "membership": Criterion("Members told", "under-forgets", members),
    "attacks": Criterion("Attacks", "under-forgets", attacks),
    "kept": Criterion("Kept", "over-forgets", kept),
    "manner": Criterion("Manner of answering", "over-forgets", manner),
}
