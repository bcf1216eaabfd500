"""What attacks tell: membership by scores and by weights, and texts that come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from scipy.stats import norm, t

from axolotl_unlearn.metrics import membership
from axolotl_unlearn.metrics.membership import Tail
from axolotl_unlearn.metrics.statistics import LEVEL, auc, auc_gap, auc_interval, holm
from axolotl_unlearn.metrics.verdict.criteria import THRESHOLDS, Finding
from axolotl_unlearn.metrics.verdict.reading import number, part, scores_of, share, show
from axolotl_unlearn.metrics.verdict.words import name_of, p_value

#: Scores that no rank test judges: Min-K% 40 is there for PrivLeak; those of the learned attack, in
#: results of earlier versions, depend on each other through its training folds.
UNJUDGED = ("min_k_40", "learned")


def membership_attacks(
    model: Mapping[str, Any], retrained: Mapping[str, Any] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Every attack tested against chance or the retrained model, corrected for their number."""
    mine = scores_of(model)
    for name in UNJUDGED:
        mine.pop(name, None)
    theirs = scores_of(retrained) if retrained is not None else {}
    theirs = {n: pair for n, pair in theirs.items() if n in mine and _same_texts(mine[n], pair)}
    if theirs and "loss" in theirs:
        # The retrained model as reference: what makes a text hard for every model cancels.
        mine = {n: pair for n, pair in mine.items() if n in theirs}
        ratio = tuple(a - b for a, b in zip(mine["loss"], theirs["loss"], strict=True))
        mine["reference"] = ratio
        theirs.pop("reference", None)
    elif retrained is not None and mine:
        theirs = {}
    if not mine:
        return {}, None
    tests: dict[str, tuple[float, Tail]] = {}
    for name, pair in mine.items():
        if name in theirs:
            # The tail of the differences: each model's own cut is noise that its members share.
            apart = [a - b for a, b in zip(pair, theirs[name], strict=True)]
            tests[name] = (_gap_p(pair, theirs[name]), membership.tail_test(*apart))
        else:
            tests[name] = (membership.rank_test(*pair), membership.tail_test(*pair))
    p_values = [p for rank, tail in tests.values() for p in (rank, tail.p)]
    learned = part(model, "learned")
    learned_p = share(learned.get("p"))
    corrected = holm(p_values if learned_p is None else [*p_values, learned_p])
    found = {}
    for i, (name, (p, tail)) in enumerate(tests.items()):
        pair = mine[name]
        same = membership.auc_equivalence(pair, theirs.get(name))
        area, bounds = auc(*pair), auc_interval(*pair)
        # The tail is only named where the AUC itself shows nothing.
        by_rank = corrected[2 * i] < THRESHOLDS["alpha"].value or (
            corrected[2 * i] <= corrected[2 * i + 1]
        )
        side = (
            ("under" if same.value > 0 else "over")
            if by_rank
            else ("under" if tail.end == "low" else "over")
        )
        found[name] = {
            "auc": area,
            "low": bounds[0],
            "high": bounds[1],
            "p": p,
            "p_corrected": float(min(corrected[2 * i : 2 * i + 2])),
            "by": "rank" if by_rank else "tail",
            "side": side,
            "tail": asdict(tail),
            "difference": {**asdict(same), "equivalent": same.equivalent},
        }
    if learned_p is not None and "loss" in found:
        # Which side its pattern is on it does not say: that of the loss.
        found["learned"] = {
            "auc": number(learned.get("auc")),
            "p": learned_p,
            "p_corrected": float(corrected[-1]),
            "by": "permutation",
            "side": found["loss"]["side"],
        } | dict.fromkeys(("low", "high", "tail", "difference"))
    return found, _power(mine, theirs, len(corrected))


def _same_texts(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    return [len(side) for side in first] == [len(side) for side in second]


def _gap_p(first: tuple[Any, Any], second: tuple[Any, Any]) -> float:
    gap = auc_gap(first, second)
    return float(2 * t.sf(abs(gap.value) / gap.error, gap.df)) if gap.error else 1.0


def _power(mine: Mapping[str, Any], theirs: Mapping[str, Any], tests: int) -> dict[str, Any]:
    n, m = (len(side) for side in mine["loss"])
    power = THRESHOLDS["power"].value
    if "loss" in theirs:
        error = auc_gap(mine["loss"], theirs["loss"]).error
        z = norm.ppf(1 - THRESHOLDS["alpha"].value / (2 * tests)) + norm.ppf(power)
        smallest = min(1.0, float(z * error))
    else:
        smallest = membership.detectable(n, m, tests, power)
    return {"members": n, "nonmembers": m, "tests": tests, "smallest_difference": smallest}


def strongest(told: Mapping[str, dict[str, Any]]) -> str | None:
    """The attack that tells most: smallest corrected p-value, then largest difference."""
    order = {
        name: (one["p_corrected"], -abs((one["difference"] or {"value": 0})["value"]))
        for name, one in told.items()
    }
    return min(order, key=order.get) if order else None


def tells_members(told: Mapping[str, dict[str, Any]], against: str) -> Finding | None:
    if not told:
        return None
    name = strongest(told)
    attack = told[name]
    tells = attack["p_corrected"] < THRESHOLDS["alpha"].value
    if attack["by"] == "tail":
        tail = attack["tail"]
        beside = ", beside the retrained model's" if against == "retrained" else ""
        says = (
            f"{100 * tail['share']:.0f} % of the members can be picked out by their {tail['end']} "
            f"{name_of(name)}{beside}, where chance explains {100 * tail['expected']:.0f} %"
        )
    elif attack["by"] == "permutation":
        says = (
            f"{name_of(name)} tells members from texts it never saw: AUC {show(attack['auc'])} on "
            "documents it was not trained on"
        )
    else:
        word = "higher" if attack["difference"]["value"] > 0 else "lower"
        says = (
            f"{name_of(name)} tells members from texts it never saw: AUC {attack['auc']:.2f} "
            f"[{attack['low']:.2f}, {attack['high']:.2f}], {word} by "
            f"{abs(attack['difference']['value']):.2f} than it should be"
        )
    if not tells:
        says = f"none of {len(told)} attacks tells members from texts it never saw"
    return Finding(
        "told",
        "Attacks",
        "fail" if tells else "pass",
        f"{says} (p {p_value(attack['p_corrected'])}, corrected)",
        attack["auc"],
        attack["low"],
        attack["high"],
        p=attack["p_corrected"],
    )


def as_if_never_seen(told: Mapping[str, dict[str, Any]], against: str) -> Finding | None:
    """All attacks within the margin; all have to pass, so no correction is due.

    The learned attack has no interval, so it is no part of this: it can only tell.
    """
    told = {name: attack for name, attack in told.items() if attack["difference"]}
    if not told:
        return None
    name = max(told, key=lambda attack: told[attack]["difference"]["p"])
    gap = told[name]["difference"]
    passed = all(attack["difference"]["equivalent"] for attack in told.values())
    target = "the retrained model's" if against == "retrained" else ".5"
    margin = THRESHOLDS["auc_margin"].value
    where = f"{gap['value']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}] at {name_of(name)}"
    needs = [attack["difference"]["needed"] for attack in told.values()]
    needed = None
    if passed:
        says = f"every attack's AUC is within {margin:.2g} of {target} (largest doubt: {where})"
    elif None in needs:
        says = f"an AUC is not within {margin:.2g} of {target}: {where}"
    else:
        needed = max(needs)
        says = (
            f"these texts do not show that every AUC is within {margin:.2g} of {target} ({where}); "
            f"about {needed} of each kind would"
        )
    return Finding(
        "same",
        "As if never seen",
        "pass" if passed else "open",
        says,
        gap["value"],
        gap["low"],
        gap["high"],
        margin,
        gap["p"],
        needed,
    )


def strongest_gain(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], dict, float, bool]:
    """The variant of an attack that brings back most, by what counts: above the control.

    Args:
        rows: ``rows`` of an attack's result; the first is the model as it is.

    Returns:
        The row, its figures ``{value, low, high, p}`` of the recalled share (above the control
        where there is one, else against the unattacked model), p after Holm's correction over
        the variants, and whether there is a control. Files of earlier versions have no p; then it
        is that of a normal figure with this interval.
    """
    attacked = list(rows[1:]) or list(rows)
    controlled = all("above_control" in row for row in attacked)
    figures = [row["above_control" if controlled else "gain"]["recalled"] for row in attacked]
    p_values = [_p_of(one) if one["value"] > 0 else 1.0 for one in figures]
    corrected = holm(p_values)
    place = min(range(len(attacked)), key=lambda i: (corrected[i], -figures[i]["value"]))
    return attacked[place], dict(figures[place]), float(corrected[place]), controlled


def _p_of(figure: Mapping[str, Any]) -> float:
    p = number(figure.get("p"))
    if p is not None:
        return max(p, 0.0)
    error = (figure["high"] - figure["low"]) / (2 * norm.ppf((1 + LEVEL) / 2))
    return float(2 * norm.sf(abs(figure["value"]) / error)) if error > 0 else 1.0


def wrecks(attack: Mapping[str, Any]) -> bool:
    """Whether a relearning attack's own training did away with the text: at every number of steps
    less than half of it is left, so a gentler attacker would see more.

    Example: .72 recalled before, .05 after 20 steps.
    """
    if attack.get("attack") != "relearn":
        return False
    rows = attack["rows"][1:]
    return bool(rows) and all(
        row["gain"]["recalled"]["high"] < 0
        and -row["gain"]["recalled"]["value"]
        > 0.5 * (number(part(part(row, "before"), "recalled").get("value")) or math.inf)
        for row in rows
    )


def comes_back(model: Mapping[str, Any], attacks: Sequence[Mapping[str, Any]]) -> Finding | None:
    limit = THRESHOLDS["comes_back"].value
    mine = [a for a in attacks if a.get("model") == model.get("name") and whole(a.get("rows"))]
    if not mine:
        return None
    best = []
    for attack in mine:
        row, gain, p, controlled = strongest_gain(attack["rows"])
        best.append((attack, row, gain, p, controlled))
    corrected = holm([one[3] for one in best])
    found = []
    for (attack, row, gain, _, controlled), p in zip(best, corrected, strict=True):
        tells = p < THRESHOLDS["alpha"].value and gain["value"] > limit
        outcome = "fail" if tells else "pass" if gain["high"] < limit else "open"
        shows_nothing = wrecks(attack) and not tells
        if shows_nothing:
            outcome = "open"
        says = (
            f"{attack.get('title') or attack.get('attack')} ({row.get('variant')}) brings back "
            f"{gain['value']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}] of the forget texts "
            + ("above its control" if controlled else "(no control was given)")
            + (", but its training did away with the text" if shows_nothing else "")
        )
        found.append(
            Finding(
                "attack",
                "Attacks on the text",
                outcome,
                says,
                gain["value"],
                gain["low"],
                gain["high"],
                limit,
                float(p),
            )
        )
    order = ("fail", "open", "pass")
    return min(found, key=lambda f: (order.index(f.outcome), -f.value))


def inside(model: Mapping[str, Any], attacks: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Of `axolotl unlearn attack inside`: told where any view tells, the same where all are."""
    mine = [a for a in attacks if a.get("model") == model.get("name") and views_of(a)]
    if not mine:
        return None
    views = views_of(mine[0])
    p_values = holm([number(view["told"]["p"]) for view in views])
    gaps = [part(view, "difference") for view in views]
    worst = min(range(len(views)), key=lambda i: p_values[i])
    told = p_values[worst] < THRESHOLDS["alpha"].value
    same = all(gap.get("equivalent") is True for gap in gaps)
    if not told and any(gaps):  # what is not shown to be the same is furthest from it
        reach = [max(abs(gap.get("low", 0)), abs(gap.get("high", 0))) for gap in gaps]
        worst = reach.index(max(reach))
    view, gap = views[worst], gaps[worst]
    area, p = number(view["told"]["auc"]), float(p_values[worst])
    if told:
        says = f"{view['title']} tell its members (AUC {area:.2f}, p {p_value(p)})"
    elif gap:
        says = "its weights are shown" if same else "its weights are not shown"
        says += f" to tell as little as the control's ({view['title']}: AUC {gap['value']:+.2f} "
        says += f"[{gap['low']:+.2f}, {gap['high']:+.2f}])"
    else:
        says = (
            f"its weights tell no members ({view['title']}: AUC {area:.2f}, p {p_value(p)}), but "
        )
        says += "no control was given to show it"
    return Finding(
        "inside",
        "Attacks with the weights",
        "fail" if told else "pass" if same else "open",
        says,
        area if told or not gap else gap["value"],
        None if told else gap.get("low"),
        None if told else gap.get("high"),
        None if told else membership.MARGIN,
        p,
    )


def views_of(attack: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What `attack inside` found by each view; none of another attack or half a file."""
    views = list(part(attack, "views").values())
    return views if all(_is_view(one) for one in views) else []


def _is_view(view: Any) -> bool:
    """Has it all figures that are read of it?"""
    if not isinstance(view, Mapping) or "title" not in view:
        return False
    needed = [view.get("auc"), *map(part(view, "told").get, ("auc", "p"))]
    if "difference" in view:
        gap = part(view, "difference")
        needed += [view.get("control"), *map(gap.get, ("value", "low", "high"))]
    return None not in map(number, needed)


def whole(rows: Any) -> bool:
    """Do all rows of an attack's file have the figures that `strongest_gain` reads?"""
    if not isinstance(rows, list) or not rows:
        return False
    figures = [
        part(part(row, key), "recalled")
        for row in rows
        for key in ("gain", "above_control")
        if isinstance(row, Mapping) and (key == "gain" or key in row)
    ]
    keys = ("value", "low", "high")
    complete = all(number(figure.get(key)) is not None for figure in figures for key in keys)
    return complete and len(figures) >= len(rows)
