"""The judgement in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.verdict.criteria import Finding, unstopped_answers
from axolotl_unlearn.metrics.verdict.reading import (
    CELLS,
    interval,
    number,
    part,
    show,
    side_mean,
)

#: The first that applies, in this order.
STATUSES = (
    "collapsed",
    "below gate",
    "before",
    "target",
    "no membership",
    "utility at chance",
    "over-forgets",
    "under-forgets",
    "recognisable",
    "sets differ",
    "still knows",
    "comes back",
    "known inside",
    "lost knowledge",
    "broken answers",
    "utility unknown",
    "not enough texts",
    "good",
)

HEADLINES = {
    "collapsed": "collapsed: its outputs are broken",
    "below gate": "below the utility gate",
    "before": "before unlearning",
    "target": "never saw the forget set: the target",
    "no membership": "no membership score, so forgetting is only half measured",
    "utility at chance": "general ability is no better than guessing",
    "over-forgets": "over-forgets: members stand out",
    "under-forgets": "under-forgets: members are still recognised",
    "recognisable": "single members can be picked out",
    "sets differ": "members and non-members differ without any model: membership is not measurable",
    "still knows": "still knows part of the forget set",
    "comes back": "an attack brings the text back",
    "known inside": "its weights tell members, whatever it says",
    "lost knowledge": "lost part of what it should keep",
    "broken answers": "answers the forget set with broken text",
    "utility unknown": "its utility was not gated, so it is not called good",
    "not enough texts": "nothing speaks against it, but what was measured is too little to say",
    "good": "forgets without standing out and keeps the rest",
}


def sentence_of(
    status: str,
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    retrained: Mapping[str, Any] | None,
    findings: Sequence[Finding],
    told: Mapping[str, dict[str, Any]],
) -> str:
    by_id = {finding.id: finding for finding in findings}
    if status == "collapsed":
        return (
            f"Collapsed: {by_id['collapse'].says}, so its Aggregate of "
            f"{show(model.get('aggregate'))} says nothing about forgetting."
        )
    if status == "below gate":
        return (
            f"Below the utility gate: {by_id['gate'].says}, so its Aggregate of "
            f"{show(model.get('aggregate'))} was paid for with general ability."
        )
    if status == "before":
        return (
            f"The starting point, before any unlearning: {_membership(told, by_id)}. Every other "
            "row is read against it."
        )
    if status == "target":
        return (
            "The true target, because it never saw the forget set: an unlearned model is good "
            f"when it cannot be told from this one ({_sides(model)}, AUC {_auc(model)})."
        )
    headline = HEADLINES[status]
    failed = [f for f in findings if f.outcome == "fail"]
    opened = [f for f in findings if f.outcome == "open"]
    parts = [f"{headline[0].upper()}{headline[1:]}: " if failed or opened else f"{headline}. "]
    shown = failed or opened
    if shown:
        parts.append("; ".join(f.says for f in shown) + ". ")
    else:
        parts[0] = f"{headline[0].upper()}{headline[1:]}: "
        parts.append("; ".join(by_id[k].says for k in ("told", "same") if k in by_id) + ". ")
    weakest = _weakest(model)
    parts.append(f"{_sides(model)}".capitalize())
    if status != "good" and weakest:
        parts.append(f" (weakest cell {weakest})")
    parts.append(f"; {_utility(model, original)}.")
    share = unstopped_answers(model, "retain")
    if share is not None:
        parts.append(
            f" {100 * share:.0f} % of its answers about the retain set hold the right one and go "
            "on, which exact match counts as lost."
        )
    if retrained is not None:
        parts.append(_distance(model, retrained))
    elif status in ("good", "not enough texts"):
        parts.append(
            " Without a retrained model in the table, how close this is to the true target stays "
            "open."
        )
    return "".join(parts)


def _membership(told: Mapping[str, Any], by_id: Mapping[str, Finding]) -> str:
    return by_id["told"].says if told else "membership was not measured"


def name_of(attack: str) -> str:
    """The attack in words: "min_k_plus_20" to "Min-K%++ 20"."""
    return {
        "loss": "loss",
        "zlib": "loss per compressed byte",
        "min_k_20": "Min-K% 20",
        "min_k_plus_20": "Min-K%++ 20",
        "reference": "loss ratio to a reference",
        "learned": "learned attack",
    }.get(attack, attack.replace("_", " "))


def p_value(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< .001"


def _auc(model: Mapping[str, Any]) -> str:
    pair = interval(model, "mia_auc")
    text = show(model.get("mia_auc"))
    return f"{text} [{pair[0]:.2f}, {pair[1]:.2f}]" if pair else text


def _sides(model: Mapping[str, Any]) -> str:
    return (
        f"forgotten {show(side_mean(model, 'forget'))} and "
        f"kept {show(side_mean(model, 'retain'))} of 1"
    )


def _utility(model: Mapping[str, Any], original: Mapping[str, Any] | None) -> str:
    if number(model.get("utility")) is None:
        return "utility was not measured"
    before = number((original or {}).get("utility"))
    text = f"utility {show(model['utility'])}"
    return text if before is None else f"{text} against {show(before)} before"


def _distance(model: Mapping[str, Any], retrained: Mapping[str, Any]) -> str:
    """How far the sides and the AUC are from the model that never saw the forget set."""
    pairs = [
        ("forgotten", side_mean(model, "forget"), side_mean(retrained, "forget")),
        ("kept", side_mean(model, "retain"), side_mean(retrained, "retain")),
        ("AUC", number(model.get("mia_auc")), number(retrained.get("mia_auc"))),
    ]
    parts = [f"{w} {a - b:+.2f}" for w, a, b in pairs if a is not None and b is not None]
    return f" Distance from the retrained model: {', '.join(parts)}." if parts else ""


def _weakest(model: Mapping[str, Any]) -> str:
    cells = part(model, "cells")
    rows = [(value, cell) for cell in CELLS if (value := number(cells.get(cell))) is not None]
    return f"{semeval.score_title(min(rows)[1])} {min(rows)[0]:.2f}" if rows else ""
