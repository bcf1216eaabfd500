"""The criteria that read an entry by itself: collapse, gate, sides, answers, outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.stats import binomtest

from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.membership import LOW_FPR, MARGIN
from axolotl_unlearn.metrics.statistics import LEVEL
from axolotl_unlearn.metrics.verdict.reading import (
    CELLS,
    interval,
    number,
    part,
    share,
    show,
    side_mean,
)


class Threshold(NamedTuple):
    """A limit of the judgement and why it is where it is."""

    value: float
    reason: str


#: Every limit of the judgement, once.
THRESHOLDS: dict[str, Threshold] = {
    "alpha": Threshold(1 - LEVEL, "false alarms among models that do not differ: one in twenty"),
    "auc_margin": Threshold(
        MARGIN,
        "an AUC within .1 of the retrained model's: of 100 pairs (member, non-member) at most ten "
        "more are put in order than by a model that never saw the text",
    ),
    "tail_fpr": Threshold(LOW_FPR, "1 % false alarms, as in arXiv 2112.03570"),
    "forget_bar": Threshold(0.8, "without a retrained model: least score of the forget side"),
    "keep_share": Threshold(
        0.8, "without a retrained model: share of the original's retain score that has to be left"
    ),
    "retrained_tolerance": Threshold(
        0.1, "the sides may be this far below the retrained model's: as wide as the AUC's margin"
    ),
    "broken": Threshold(
        0.1,
        "share of repetition or nonsense on the forget set, above the retrained model's: each "
        "tells an observer what was removed",
    ),
    "unstopped": Threshold(
        0.05,
        "share of questions whose answer is said though exact match does not see it, above the "
        "retrained model's",
    ),
    "comes_back": Threshold(
        0.05, "share of the forget texts that an attack brings back above its control"
    ),
    "any_script": Threshold(
        0.05, "a cell whose official ROUGE-L (ASCII only) is off by this is judged by every script"
    ),
    "gate": Threshold(
        semeval.GATE_SHARE, "share of the original's utility, as .371 of .495 in SemEval-2025"
    ),
    "power": Threshold(0.8, "chance of finding a difference that is called findable"),
}


@dataclass(frozen=True)
class Finding:
    """One criterion.

    Attributes:
        id: Its name: one of the keys of `_STATUS_OF`.
        outcome: "pass", "fail" or "open".
        value, low, high: The figure with the interval that was compared with ``limit``.
        p: Corrected p-value where a test decided.
        needed: Texts (or rows) with which a value like this would pass; None if none would.
        says: One sentence without the model's name.
    """

    id: str
    title: str
    outcome: str
    says: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    p: float | None = None
    needed: int | None = None


def collapse(model: Mapping[str, Any]) -> Finding | None:
    report = part(model, "collapse")
    if not report:
        return None
    reasons = report.get("reasons")
    reasons = [str(r) for r in reasons] if isinstance(reasons, (list, tuple)) else []
    broken = bool(report.get("collapsed"))
    says = f"its outputs are broken ({'; '.join(reasons) or 'see the collapse figures'})"
    return Finding(
        "collapse",
        "Outputs on the retain set",
        "fail" if broken else "pass",
        says if broken else "its outputs on the retain set are whole",
    )


def gate(model: Mapping[str, Any]) -> Finding | None:
    gate = part(model, "gate")
    value, limit = number(model.get("utility")), number(gate.get("threshold"))
    if not gate or value is None:
        return None
    below = bool(gate.get("below_gate"))
    says = f"utility {show(value)}, at least {show(limit)} is asked"
    if (before := number(gate.get("original"))) is not None:
        says += f" (the original has {show(before)})"
    low, high = interval(model, "utility") or (None, None)
    return Finding(
        "gate", "Utility gate", "fail" if below else "pass", says, value, low, high, limit
    )


def chance(model: Mapping[str, Any]) -> Finding | None:
    """A utility that guessing explains: a model that lost everything, or a test it never passed."""
    value, n = share(model.get("utility")), number(part(model, "n").get("utility"))
    chance = number(model.get("utility_chance"))
    if value is None or chance is None or not n or n < 1 or not 0 < chance < 1:
        return None
    p = float(binomtest(round(value * n), int(n), chance, alternative="greater").pvalue)
    better = p < THRESHOLDS["alpha"].value
    says = f"utility {show(value)} of {int(n)} questions, guessing gives {show(chance)}"
    return Finding(
        "chance",
        "Better than guessing",
        "pass" if better else "fail",
        says,
        value,
        limit=chance,
        p=p,
    )


def sets(model: Mapping[str, Any]) -> Finding | None:
    lab = part(model, "membership")
    blind = lab.get("blind") if isinstance(lab.get("blind"), Mapping) else {}
    found = {
        name: one
        for name, one in blind.items()
        if isinstance(one, Mapping) and number(one.get("auc")) is not None
    }
    apart = {name: one for name, one in found.items() if one.get("separates")}
    if not found and lab.get("meaningful") is None:
        return None
    if not apart and lab.get("meaningful") is not False:
        says = "without a model the two sets cannot be told apart"
        return Finding("sets", "Members and non-members alike", "pass", says)
    says = "members and non-members differ without any model"
    if not apart:
        return Finding("sets", "Members and non-members alike", "fail", says)
    name, one = max(apart.items(), key=lambda item: abs(item[1]["auc"] - 0.5))
    low, high = number(one.get("low")), number(one.get("high"))
    says += f" ({name.replace('_', ' ')}: AUC {show(one['auc'])})"
    return Finding(
        "sets", "Members and non-members alike", "fail", says, one["auc"], low, high, 0.5
    )


def bars(
    original: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None
) -> tuple[float, float]:
    """The least forget score and retain score of a model that may be called good."""
    forget_bar, retain_bar = THRESHOLDS["forget_bar"].value, THRESHOLDS["keep_share"].value
    if original is not None:
        retain_bar *= side_mean(original, "retain") or 1.0
    if retrained is not None:
        tolerance = THRESHOLDS["retrained_tolerance"].value
        target_forget, target_retain = (side_mean(retrained, side) for side in semeval.SIDES)
        if target_forget is not None:
            forget_bar = target_forget - tolerance
        if target_retain is not None:
            retain_bar = target_retain - tolerance
    return forget_bar, retain_bar


def side(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    retrained: Mapping[str, Any] | None,
    side: str,
) -> Finding:
    name, word = {"forget": ("forgotten", "Forgotten"), "retain": ("kept", "Kept")}[side]
    value, bar = side_mean(model, side), bars(original, retrained)[side == "retain"]
    seen = _every_script(model, side)
    if value is not None and seen is not None:
        outcome = "pass" if seen >= bar else "fail"
        says = f"{name} {show(seen)} of 1, at least {show(bar)} is asked; the official "
        says += f"figure of {show(value)} does not see this script"
        return Finding(name, word, outcome, says, seen, limit=bar)
    if value is None:
        return Finding(name, word, "fail", f"no cell of the {side} side has a value", limit=bar)
    low, high = interval(model, side) or (value, value)
    gap = part(part(model, "distance"), side)
    if retrained is not None and number(gap.get("value")) is not None:
        ends = interval({"intervals": {side: gap.get("interval")}}, side)
        if ends:
            # Paired: what is hard for both models cancels.
            target = value - gap["value"]
            low, high = target + ends[0], target + ends[1]
    outcome = "pass" if low >= bar else "fail" if high < bar else "open"
    says = f"{name} {show(value)} of 1, at least {show(bar)} is asked"
    needed = None
    if outcome == "open" and value > bar:
        rows = sum(int(number(part(model, "n").get(c)) or 0) for c in CELLS if c.startswith(side))
        needed = math.ceil(rows * ((value - low) / (value - bar)) ** 2) if rows else None
    if outcome == "open":
        says += f" (interval {show(low)} to {show(high)})"
    return Finding(name, word, outcome, says, value, low, high, bar, needed=needed)


def _every_script(model: Mapping[str, Any], side: str) -> float | None:
    """The side's score by words of every script, where the official one sees too little."""
    better = {n: v for n, v in part(model, "any_script").items() if number(v) is not None}
    if not any(name.startswith(side) for name in better):
        return None
    return side_mean({"cells": {**part(model, "cells"), **better}}, side)


def unstopped_answers(model: Mapping[str, Any], side: str) -> float | None:
    """Share of questions whose answer is said without being an exact match, where it is large.

    A model that says the right answer and does not stop counts as forgotten for exact match.
    """
    share = _said(model, side)
    return share[0] if share and share[0] >= THRESHOLDS["unstopped"].value else None


def _said(model: Mapping[str, Any] | None, side: str) -> tuple[float, int] | None:
    answers = part(part(model or {}, "answers"), side)
    exact, contained = share(answers.get("exact")), share(answers.get("contained"))
    if exact is None or contained is None:
        return None
    return max(0.0, contained - exact), int(number(answers.get("n")) or 0)


def unstopped(model: Mapping[str, Any], retrained: Mapping[str, Any] | None) -> Finding | None:
    mine = _said(model, "forget")
    if mine is None:
        return None
    return _share_finding(
        "answers",
        "Answers said anyway",
        mine,
        _said(retrained, "forget"),
        THRESHOLDS["unstopped"].value,
        "of the forget questions get the right answer although exact match does not see it",
    )


def outputs(model: Mapping[str, Any], retrained: Mapping[str, Any] | None) -> Finding | None:
    """Repetition or nonsense on the forget set, whichever is more, above the retrained model's."""
    found = []
    for kind, count, words in (
        ("broken", "n", "of its outputs on the forget set are broken text"),
        ("nonsense", "nonsense_n", "of its longer outputs on the forget set are nonsense"),
    ):
        mine = _output_share(model, kind, count)
        if mine is not None:
            theirs = _output_share(retrained, kind, count)
            limit = THRESHOLDS["broken"].value
            found.append(_share_finding("outputs", "Forget outputs", mine, theirs, limit, words))
    order = ("fail", "open", "pass")
    return min(found, key=lambda f: (order.index(f.outcome), -f.value)) if found else None


def _output_share(
    model: Mapping[str, Any] | None, kind: str, count: str
) -> tuple[float, int] | None:
    forget = part(part(model or {}, "collapse"), "forget")
    value = share(forget.get(kind))
    n = number(forget.get(count)) or number(forget.get("n")) or 0
    return None if value is None else (value, int(n))


def broken(model: Mapping[str, Any], retrained: Mapping[str, Any] | None = None) -> float | None:
    """Share of broken or nonsensical outputs on the forget set where it is over its limit."""
    found = outputs(model, retrained)
    over = found is not None and found.value > found.limit
    return found.value if over else None


def _share_finding(
    identifier: str,
    title: str,
    mine: tuple[float, int],
    theirs: tuple[float, int] | None,
    limit: float,
    words: str,
) -> Finding:
    """Is a share at most ``limit`` above the retrained model's? 90 % interval (Newcombe 1998)."""
    value, n = mine
    target = theirs[0] if theirs else 0.0
    own = _share_bounds(value, n)
    other = _share_bounds(*theirs) if theirs else (0.0, 0.0)
    below = math.hypot(value - own[0], other[1] - target)
    above = math.hypot(own[1] - value, target - other[0])
    low, high = max(0.0, value - below), min(1.0, value + above)
    bar = limit + target
    outcome = "pass" if high <= bar else "fail" if low > bar else "open"
    says = f"{100 * value:.0f} % {words}"
    if theirs:
        says += f" ({100 * target:.0f} % of the retrained model's)"
    needed = None
    if outcome == "open" and value < bar and n:
        needed = math.ceil(n * ((high - value) / (bar - value)) ** 2)
    return Finding(identifier, title, outcome, says, value, low, high, bar, needed=needed)


def _share_bounds(share: float, n: int) -> tuple[float, float]:
    """90 % interval of a share; a share whose n is unknown is taken as it is."""
    if n < 1:
        return share, share
    bounds = binomtest(min(n, round(share * n)), n).proportion_ci(2 * LEVEL - 1, method="wilson")
    return float(bounds.low), float(bounds.high)
