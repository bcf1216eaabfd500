"""The judgement in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.results import CELLS, Model
from axolotl_unlearn.metrics.verdict.criteria import Finding, show, unstopped_answers

#: The first that applies, in this order.
STATUSES = (
    "collapsed",
    "below gate",
    "before",
    "target",
    "utility at chance",
    "over-forgets",
    "under-forgets",
    "recites",
    "recognisable",
    "sets differ",
    "still knows",
    "as before",
    "comes back",
    "known inside",
    "told by an attack",
    "lost knowledge",
    "broken answers",
    "silent",
    "no membership",
    "utility unknown",
    "not measured",
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
    "recites": "recites part of the forget set",
    "recognisable": "single members can be picked out",
    "sets differ": "members and non-members differ without any model: membership is not measurable",
    "still knows": "still knows part of the forget set",
    "as before": "nearer to the model before unlearning than to the retrained one",
    "comes back": "an attack brings the text back",
    "known inside": "its weights tell members, whatever it says",
    "told by an attack": "an attack of the registry tells its members",
    "lost knowledge": "lost part of what it should keep",
    "broken answers": "answers the forget set with broken text",
    "silent": "refuses or falls silent where the forget set is asked",
    "not measured": "nothing speaks against it, but not all that counts was measured",
    "utility unknown": "its utility was not gated, so it is not called good",
    "not enough texts": "nothing speaks against it, but what was measured is too little to say",
    "good": "forgets without standing out and keeps the rest",
}


#: What AUCs beside 0.5 cannot see.
ALONE = (
    " Without a retrained model in the table, how close this is to the true target stays open: "
    "members pushed both ways, or all to one loss, leave an AUC near 0.5."
)


def sentence_of(
    status: str,
    model: Model,
    original: Model | None,
    retrained: Model | None,
    findings: Sequence[Finding],
    told: Mapping[str, dict[str, Any]],
    attacked: bool = False,
) -> str:
    by_id = {finding.id: finding for finding in findings}
    if status == "collapsed":
        return (
            f"Collapsed: {by_id['collapse'].says}, so its Aggregate of "
            f"{show(model.aggregate)} says nothing about forgetting."
        )
    if status == "below gate":
        return (
            f"Below the utility gate: {by_id['gate'].says}, so its Aggregate of "
            f"{show(model.aggregate)} was paid for with general ability."
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
    elif status in ("good", "not measured", "not enough texts"):
        parts.append(ALONE)
    if not attacked and status in ("good", "not measured", "not enough texts"):
        parts.append(" No attack on its text or weights was run.")
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
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _auc(model: Model) -> str:
    pair = model.intervals.get("mia_auc")
    text = show(model.mia_auc)
    return f"{text} [{pair[0]:.2f}, {pair[1]:.2f}]" if pair else text


def _sides(model: Model) -> str:
    return f"forgotten {show(model.side('forget'))} and kept {show(model.side('retain'))} of 1"


def _utility(model: Model, original: Model | None) -> str:
    if model.utility is None:
        return "utility was not measured"
    before = original.utility if original is not None else None
    text = f"utility {show(model.utility)}"
    return text if before is None else f"{text} against {show(before)} before"


def _distance(model: Model, retrained: Model) -> str:
    """How far the sides and the AUC are from the model that never saw the forget set."""
    pairs = [
        ("forgotten", model.side("forget"), retrained.side("forget")),
        ("kept", model.side("retain"), retrained.side("retain")),
        ("AUC", model.mia_auc, retrained.mia_auc),
    ]
    parts = [f"{w} {a - b:+.2f}" for w, a, b in pairs if a is not None and b is not None]
    return f" Distance from the retrained model: {', '.join(parts)}." if parts else ""


def _weakest(model: Model) -> str:
    rows = [(value, cell) for cell in CELLS if (value := model.cells.get(cell)) is not None]
    return f"{semeval.score_title(min(rows)[1])} {min(rows)[0]:.2f}" if rows else ""
