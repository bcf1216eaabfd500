"""One honest sentence (or two) about a model, from its scores alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl_unlearn.report.results import (
    CELLS,
    LOW_FPR,
    broken,
    forgetting,
    interval,
    number,
    recognised,
    show,
    side_mean,
    status,
    unstopped_answers,
)


def verdict(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    retrained: Mapping[str, Any] | None = None,
) -> str:
    """What this model's scores mean, in words.

    A collapsed model, one below the utility gate, or one without a utility score is never called
    good. `original` and `retrained` may be None or the model itself.
    """
    return f"{model['name']}: {reading_of(model, original, retrained)}"


def reading_of(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    retrained: Mapping[str, Any] | None = None,
) -> str:
    """The verdict without the model's name."""
    kind = status(model, original, retrained)
    if kind == "collapsed":
        reasons = (model.get("collapse") or {}).get("reasons")
        reasons = reasons if isinstance(reasons, list) and reasons else ["see its figures"]
        return (
            f"Collapsed ({'; '.join(map(str, reasons))}): its outputs are broken, so "
            f"its Aggregate of {show(model.get('aggregate'))} says nothing about forgetting."
        )
    if kind == "below gate":
        gate = model.get("gate") or {}
        return (
            f"Below the utility gate: utility {show(model.get('utility'))} where at "
            f"least {show(gate.get('threshold'))} is asked (the original has "
            f"{show(gate.get('original'))}), so its Aggregate of {show(model.get('aggregate'))} "
            "was paid for with general ability."
        )
    if kind == "before":
        return (
            f"The starting point, before any unlearning: {_membership(model)}. "
            f"Every other row is read against it."
        )
    if kind == "target":
        return (
            "The true target, because it never saw the forget set: an unlearned model is good "
            f"when it cannot be told from this one ({_sides(model)}, AUC {_auc(model)})."
        )
    opening = {
        "no membership": "No membership score, so forgetting is only half measured",
        "over-forgets": "Over-forgets",
        "under-forgets": "Under-forgets",
        "recognisable": "Balanced on average only",
        "broken answers": "Balanced, but it answers the forget set with broken text",
        "still knows": "Balanced on membership, but still knows part of the forget set",
        "lost knowledge": "Balanced on membership, but lost part of what it should keep",
        "utility unknown": "Balanced, but its utility was not gated, so it is not called good",
        "good": "Forgets without standing out and keeps the rest",
    }[kind]
    parts = [f"{opening}: "]
    if number(model.get("mia_auc")) is not None:
        parts.append(f"{_membership(model, retrained)}; ")
    parts.append(f"{_sides(model)}")
    weakest = _weakest(model)
    if kind != "good" and weakest:
        parts.append(f" (weakest cell {weakest})")
    parts.append(f"; {_utility(model, original)}.")
    parts.extend(
        f" {100 * share:.0f} % of its answers about the {side} set hold the right one and go on, "
        f"which exact match counts as {word}."
        for side, word in (("forget", "forgotten"), ("retain", "lost"))
        if (share := unstopped_answers(model, side)) is not None
    )
    share = broken(model, retrained)
    if share is not None:
        parts.append(
            f" {100 * share:.0f} % of its outputs on the forget set are broken text, which tells "
            "an observer what was removed."
        )
    if retrained is not None and retrained is not model:
        distance = _distance(model, retrained)
        parts.append(f" {distance}" if distance else "")
    elif kind == "good":
        parts.append(
            " Without a retrained model in the table, how close this is to the true "
            "target stays open."
        )
    return "".join(parts)


def _auc(model: Mapping[str, Any]) -> str:
    pair = interval(model, "mia_auc")
    text = show(model.get("mia_auc"))
    return f"{text} [{pair[0]:.2f}, {pair[1]:.2f}]" if pair else text


def _membership(model: Mapping[str, Any], retrained: Mapping[str, Any] | None = None) -> str:
    meaning = {
        "over": "members stand out by unusually high loss, which itself tells what was removed",
        "under": "members can still be recognised by their low loss",
        "balanced": "members cannot be told from texts it never saw",
        None: "membership was not measured",
    }[forgetting(model)]
    tail = recognised(model, retrained)
    if tail and forgetting(model) == "balanced":
        return (
            f"{100 * tail[1]:.0f} % of the members can be picked out by their {tail[0]} loss at "
            f"{100 * LOW_FPR:.0f} % false alarms, although the AUC is {_auc(model)} (ideal 0.5)"
        )
    return f"{meaning} (AUC {_auc(model)}, ideal 0.5)" if forgetting(model) else meaning


def _sides(model: Mapping[str, Any]) -> str:
    return (
        f"forgotten {show(side_mean(model, 'forget'), 2)} and "
        f"kept {show(side_mean(model, 'retain'), 2)} of 1"
    )


def _utility(model: Mapping[str, Any], original: Mapping[str, Any] | None) -> str:
    if number(model.get("utility")) is None:
        return "utility was not measured"
    before = number((original or {}).get("utility"))
    text = f"utility {show(model['utility'])}"
    return text if before is None else f"{text} against {before:.3f} before"


def _weakest(model: Mapping[str, Any]) -> str:
    cells = model.get("cells") or {}
    rows = [(number(cells.get(cell)), cell) for cell in CELLS]
    rows = [row for row in rows if row[0] is not None]
    if not rows:
        return ""
    value, cell = min(rows)
    return f"{cell} {value:.2f}"


def _distance(model: Mapping[str, Any], retrained: Mapping[str, Any]) -> str:
    """How far the sides and the AUC are from the model that never saw the forget set."""
    parts = []
    for side, word in (("forget", "forgotten"), ("retain", "kept")):
        mine, target = side_mean(model, side), side_mean(retrained, side)
        if mine is not None and target is not None:
            parts.append(f"{word} {mine - target:+.2f}")
    auc, target_auc = number(model.get("mia_auc")), number(retrained.get("mia_auc"))
    if auc is not None and target_auc is not None:
        parts.append(f"AUC {auc - target_auc:+.2f}")
    return f"Distance from the retrained model: {', '.join(parts)}." if parts else ""
