"""What attacks tell: membership by scores and by weights, and texts that come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.stats import norm

from axolotl_unlearn.metrics import intervals, membership
from axolotl_unlearn.metrics.intervals import Clusters, auc, auc_gap, auc_interval, holm
from axolotl_unlearn.metrics.membership import Tail
from axolotl_unlearn.metrics.relative import relative_test
from axolotl_unlearn.metrics.results import Model, Scores, whole
from axolotl_unlearn.metrics.verdict.criteria import THRESHOLDS, Finding, missing, show, worst
from axolotl_unlearn.metrics.verdict.words import name_of, p_value

#: Scores that every model is judged by; without one of them nothing is shown.
NEEDED = ("loss", "zlib", "min_k_20", "min_k_plus_20", "entropy")


class Membership:
    """Every attack tested against chance or the retrained model, corrected for their number.

    Attributes:
        told: By attack, as `Verdict.attacks`.
        power: As `Verdict.power`.
        lacks: What cannot be read of the scores, in words; "" where all is there.
        tried: p-values of the tests of `Tried`, corrected together with those here.
    """

    def __init__(self, model: Model, retrained: Model | None, tried: Sequence[float] = ()) -> None:
        self.tried = holm(tried) if tried else ()
        self.told: dict[str, dict[str, Any]] = {}
        self.power: dict[str, Any] | None = None
        self.lacks = _lacks(model, retrained)
        self.against = "chance" if retrained is None else "retrained"
        mine, theirs = _judged(model), {}
        if retrained is not None:
            theirs = _judged(retrained) if _paired(model, retrained) else {}
            mine = {name: pair for name, pair in mine.items() if name in theirs}
        if "loss" not in mine:
            return
        if theirs:  # as reference: what makes a text hard for every model cancels
            pairs = zip(mine["loss"], theirs["loss"], strict=True)
            mine["reference"] = tuple(a - b for a, b in pairs)
            theirs.pop("reference", None)
        self._test(model, mine, theirs, list(tried))

    def _test(self, model: Model, mine: Scores, theirs: Scores, tried: list[float]) -> None:
        clusters = clusters_of(model)
        tests: dict[str, tuple[float, Tail]] = {}
        for name, pair in mine.items():
            if name in theirs:
                # The tail of the differences: each model's own cut is noise that its members share.
                apart = [a - b for a, b in zip(pair, theirs[name], strict=True)]
                rank = auc_gap(pair, theirs[name], clusters).p
            else:
                apart, rank = pair, membership.rank_test(*pair, clusters=clusters)
            tests[name] = (rank, membership.tail_test(*apart, clusters=clusters))
        p_values = [p for rank, tail in tests.values() for p in (rank, tail.p)]
        learned = model.learned
        learned_p = learned.p if learned is not None and learned.auc is not None else None
        own = p_values if learned_p is None else [*p_values, learned_p]
        corrected = holm([*own, *tried])
        self.tried = corrected[len(own) :]
        for i, (name, (p, tail)) in enumerate(tests.items()):
            pair = mine[name]
            same = membership.auc_equivalence(pair, theirs.get(name), clusters=clusters)
            low, high = auc_interval(*pair, clusters=clusters)
            # The tail is only named where the AUC itself shows nothing.
            by_rank = corrected[2 * i] < THRESHOLDS["alpha"].value or (
                corrected[2 * i] <= corrected[2 * i + 1]
            )
            under = same.value > 0 if by_rank else tail.end == "low"
            self.told[name] = {
                "auc": auc(*pair),
                "low": low,
                "high": high,
                "p": p,
                "p_corrected": float(min(corrected[2 * i : 2 * i + 2])),
                "by": "rank" if by_rank else "tail",
                "side": "under" if under else "over",
                "tail": asdict(tail),
                "difference": {**asdict(same), "equivalent": same.equivalent},
                "intraclass": _alike(pair, theirs.get(name), clusters),
            }
        if learned_p is not None:
            # Which side its pattern is on it does not say: that of the loss.
            self.told["learned"] = {
                "auc": learned.auc,
                "p": learned_p,
                "p_corrected": float(corrected[len(own) - 1]),
                "by": "permutation",
                "side": self.told["loss"]["side"],
            } | dict.fromkeys(("low", "high", "tail", "difference", "intraclass"))
        self.power = _power(mine, theirs, len(corrected), clusters)


def _alike(pair: Any, other: Any, clusters: Clusters) -> float | None:
    """Intraclass correlation of the members' scores, or of their differences from the other model;
    None where no cluster holds several."""
    if clusters is None:
        return None
    values = pair[0] if other is None else pair[0] - other[0]
    correlation = intervals.intraclass_correlation(values, clusters[0])
    return correlation if math.isfinite(correlation) else None


def clusters_of(model: Model) -> Clusters:
    """Documents or authors of the texts; None where the results do not name them all."""
    one = model.likelihood
    named = (one.member_cluster, one.nonmember_cluster)
    losses = (one.member_loss, one.nonmember_loss)
    return named if list(map(len, named)) == list(map(len, losses)) else None


def _judged(model: Model) -> Scores:
    """Scores that vary; those that are all equal order nothing."""
    return {name: pair for name, pair in model.scores.items() if np.ptp(np.concatenate(pair)) > 0}


def _paired(model: Model, retrained: Model) -> bool:
    """The same texts in the same order, by their ids."""
    each = [one.likelihood for one in (model, retrained)]
    ids = [(one.member_id, one.nonmember_id) for one in each]
    sizes = {(len(one.member_loss), len(one.nonmember_loss)) for one in each}
    return bool(ids[0][0]) and ids[0] == ids[1] and sizes == {tuple(map(len, ids[0]))}


def _lacks(model: Model, retrained: Model | None) -> str:
    """What is missing or cannot be read of the scores, in words."""
    for one, whose in ((model, "its"), (retrained, "the retrained model's")):
        if one is None:
            continue
        judged = _judged(one)
        if gone := [name_of(name) for name in NEEDED if name not in judged]:
            return f"{whose} scores by {', '.join(gone)} are missing, not finite or all equal"
        half = [n for n in one.likelihood.attacks if n not in judged]
        if half:
            names = ", ".join(map(name_of, half))
            return f"{whose} scores by {names} are not finite, all equal or of other texts"
        ids = (one.likelihood.member_id, one.likelihood.nonmember_id)
        if list(map(len, ids)) != list(map(len, judged["loss"])):
            return f"{whose} scores have no ids"
        if clusters_of(one) is None:
            return f"{whose} scores have no clusters"
    learned = model.learned
    if learned is None or learned.p is None or learned.auc is None:
        return "the learned attack was not run"
    if retrained is None:
        return ""
    if not _paired(model, retrained):
        return "the retrained model was evaluated on other texts, or in another order"
    if clusters_of(model) != clusters_of(retrained):
        return "the retrained model's texts are in other clusters"
    if learned.against == "chance":
        return "the learned attack was not run against the retrained model"
    pairs = zip(model.scores["loss"], retrained.scores["loss"], strict=True)
    if all(np.array_equal(a, b) for a, b in pairs):
        return "its losses are the retrained model's to the last digit, as of a copy"
    return ""


def evidence(tested: Membership, model: Model, retrained: Model | None) -> Finding:
    """Is everything there that the judgement of membership rests on?"""
    lacks = tested.lacks
    against = model.learned.against if model.learned is not None else "chance"
    compared = model.distance or against not in ("chance", "reference")
    if not lacks and retrained is None and compared:
        lacks = "the retrained model that it was compared with is not in the results"
    if lacks:
        return missing("scores", lacks)
    return Finding("scores", "pass", "every text has a score by each attack")


def _power(mine: Scores, theirs: Scores, tests: int, clusters: Clusters) -> dict[str, Any]:
    n, m = (len(side) for side in mine["loss"])
    groups = [len(set(side)) for side in clusters] if clusters else [n, m]
    power = THRESHOLDS["power"].value
    if "loss" in theirs:
        error = auc_gap(mine["loss"], theirs["loss"], clusters).error
        z = norm.ppf(1 - THRESHOLDS["alpha"].value / (2 * tests)) + norm.ppf(power)
        least = min(1.0, float(z * error))
    else:
        least = membership.detectable(*groups, tests, power)
    sizes = {"members": n, "nonmembers": m, "clusters": groups, "tests": tests}
    return sizes | {"smallest_difference": least}


def strongest(told: Mapping[str, dict[str, Any]]) -> str | None:
    """The attack that tells most: smallest corrected p-value, then largest difference."""
    order = {
        name: (one["p_corrected"], -abs((one["difference"] or {"value": 0})["value"]))
        for name, one in told.items()
    }
    return min(order, key=order.get) if order else None


def tells_members(told: Mapping[str, dict[str, Any]], against: str) -> Finding:
    if not told:
        return missing("told", "membership was not measured")
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
        gap = attack["difference"]["value"]
        says = (
            f"{name_of(name)} tells members from texts it never saw: AUC {attack['auc']:.2f} "
            f"[{attack['low']:.2f}, {attack['high']:.2f}], {'higher' if gap > 0 else 'lower'} by "
            f"{abs(gap):.2f} than it should be"
        )
    if not tells:
        says = f"none of {len(told)} attacks tells members from texts it never saw"
    p = attack["p_corrected"]
    says += f" (p {p_value(p)}, corrected)"
    ends = (attack["auc"], attack["low"], attack["high"])
    return Finding("told", "fail" if tells else "pass", says, *ends, p=p)


def as_if_never_seen(told: Mapping[str, dict[str, Any]], against: str) -> Finding:
    """All attacks within the margin; all have to pass, so no correction is due. The learned attack
    has no interval and is no part of this."""
    told = {name: attack for name, attack in told.items() if attack["difference"]}
    if not told:
        return missing("same", "membership was not measured")
    name = max(told, key=lambda attack: told[attack]["difference"]["p"])
    gap = told[name]["difference"]
    passed = all(attack["difference"]["equivalent"] for attack in told.values())
    target = "the retrained model's" if against == "retrained" else "0.5"
    margin = THRESHOLDS["auc_margin"].value
    where = f"{gap['value']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}] at {name_of(name)}"
    if told[name]["intraclass"] is not None:
        where += f", by clusters: their intraclass correlation is {told[name]['intraclass']:.2f}"
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
    figures = (gap["value"], gap["low"], gap["high"], margin, gap["p"], needed)
    return Finding("same", "pass" if passed else "open", says, *figures)


def nearer(model: Model, original: Model | None, retrained: Model | None) -> Finding | None:
    """Is it nearer to the retrained model than to the one before unlearning, on the members
    (`metrics.relative`)? None without a retrained model."""
    if retrained is None:
        return None
    if original is None:
        known = model.gate is not None and model.gate.original is not None
        says = "the model before unlearning is not in the results"
        says = says if known else "no model before unlearning was evaluated"
        return missing("nearer", says)
    scores = [_judged(one) for one in (model, original, retrained)]
    names = [name for name in NEEDED if all(name in one for one in scores)]
    if not names or not (_paired(model, original) and _paired(model, retrained)):
        return missing("nearer", "the three models have no scores of the same texts")
    clusters = clusters_of(model)
    own, before, target = (np.stack([one[n][0] for n in names], 1) for one in scores)
    one = relative_test(own, before, target, clusters[0] if clusters else None)
    alpha = THRESHOLDS["alpha"].value
    outcome = "fail" if one.p_first < alpha else "pass" if one.p_second < alpha else "open"
    first, second = p_value(one.p_first), p_value(one.p_second)
    says = {
        "fail": f"its scores of members are nearer to those before unlearning (p {first})",
        "pass": f"its scores of members are nearer to the retrained model's (p {second})",
        "open": "its scores of members are not shown to be nearer to the retrained model's than to "
        f"those before unlearning (p {second})",
    }[outcome]
    return Finding("nearer", outcome, says, one.value, p=min(one.p_first, one.p_second))


def strongest_gain(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], dict, float, bool]:
    """The variant of an attack that brings back most, above the control where there is one.

    Args:
        rows: ``rows`` of an attack's result; the first is the model as it is.

    Returns:
        The row, its figures ``{value, low, high, p}`` of the recalled share, p after Holm's
        correction over the variants, and whether there is a control.
    """
    attacked = list(rows[1:]) or list(rows)
    controlled = all("above_control" in row for row in attacked)
    figures = [row["above_control" if controlled else "gain"]["recalled"] for row in attacked]
    p_values = [one["p"] if one["value"] > 0 else 1.0 for one in figures]
    corrected = holm(p_values)
    place = min(range(len(figures)), key=lambda i: (corrected[i], -figures[i]["value"]))
    return attacked[place], dict(figures[place]), float(corrected[place]), controlled


def wrecks(attack: Mapping[str, Any]) -> bool:
    """Whether a relearning attack's own training did away with the text: at every number of steps
    less than half of it is left, so a gentler attacker would see more."""

    def lost(row: Mapping[str, Any]) -> bool:
        gain = row["gain"]["recalled"]
        before = ((row.get("before") or {}).get("recalled") or {}).get("value") or math.inf
        return gain["high"] < 0 and -gain["value"] > 0.5 * before

    rows = attack["rows"][1:] if attack.get("attack") == "relearn" else ()
    return bool(rows) and all(map(lost, rows))


#: What a file of `axolotl-unlearn attack` holds -> the criterion that reads it.
KINDS = {"rows": "attack", "views": "inside", "tests": "members"}


def kind_of(attack: Mapping[str, Any]) -> str:
    """The key of `KINDS` that an attack has; that of text where it has none."""
    return next((kind for kind in KINDS if kind in attack), "rows")


def _tried(
    kind: str, model: Model, attacks: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], Finding | None]:
    """Attacks of a kind on the model, or what is to be said of a file that cannot be read. One that
    names no model may be on any."""
    alike = [a for a in attacks if kind_of(a) == kind]
    mine = [a for a in alike if a.get("model") == model.name or not isinstance(a.get("model"), str)]
    if half := next((a for a in mine if not whole(a)), None):
        says = f"the file of {half.get('title') or half.get('attack')} is not whole: attack again"
        return mine, missing(KINDS[kind], says)
    return mine, None


def comes_back(model: Model, attacks: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Of `axolotl-unlearn attack` on the text; None where it was not run on this model."""
    limit = THRESHOLDS["comes_back"].value
    mine, half = _tried("rows", model, attacks)
    if half or not mine:
        return half
    best = [strongest_gain(attack["rows"]) for attack in mine]
    corrected = holm([p for _, _, p, _ in best])
    findings = []
    for attack, (row, gain, _, controlled), p in zip(mine, best, corrected, strict=True):
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
        ends = (gain["value"], gain["low"], gain["high"])
        findings.append(Finding(KINDS["rows"], outcome, says, *ends, limit, float(p)))
    return worst(findings)


def inside(model: Model, attacks: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Of `axolotl-unlearn attack inside`: told where any view tells, the same where all are."""
    mine, half = _tried("views", model, attacks)
    if half or not mine:
        return half
    views = [view for one in mine for view in one["views"].values()]
    p_values = holm([view["told"]["p"] for view in views])
    gaps = [view.get("difference") or {} for view in views]
    worst = min(range(len(views)), key=lambda i: p_values[i])
    told = p_values[worst] < THRESHOLDS["alpha"].value
    same = all(gap.get("equivalent") is True for gap in gaps)
    if not told and any(gaps):  # what is not shown to be the same is furthest from it
        reach = [max(abs(gap.get("low", 0)), abs(gap.get("high", 0))) for gap in gaps]
        worst = reach.index(max(reach))
    view, gap = views[worst], gaps[worst]
    area, p = view["told"]["auc"], float(p_values[worst])
    if told:
        says = f"{view['title']} tell its members (AUC {area:.2f}, p {p_value(p)})"
    elif gap:
        says = "its weights are shown" if same else "its weights are not shown"
        says += f" to tell as little as the control's ({view['title']}: AUC {gap['value']:+.2f} "
        says += f"[{gap['low']:+.2f}, {gap['high']:+.2f}])"
    else:
        says = f"its weights tell no members ({view['title']}: AUC {area:.2f}, p {p_value(p)}), "
        says += "but no control was given to show it"
    outcome = "fail" if told else "pass" if same else "open"
    if told or not gap:
        return Finding(KINDS["views"], outcome, says, area, p=p)
    figures = (gap["value"], gap.get("low"), gap.get("high"), membership.MARGIN, p)
    return Finding(KINDS["views"], outcome, says, *figures)


class Tried:
    """Attacks on membership that were tried on a model one by one (`python -m research membership`
    writes them), each attack and each group.

    Attributes:
        tests: Title -> its figures, p before any correction.
        absent: What could not be made.
    """

    def __init__(self, model: Model, attacks: Sequence[Mapping[str, Any]]) -> None:
        files, self.half = _tried("tests", model, attacks)
        self.made = bool(files)
        files = () if self.half else files
        self.tests = {name: row for one in files for name, row in one["tests"].items()}
        self.absent = [name for one in files for name in one.get("missing", ())]

    def finding(self, corrected: Sequence[float]) -> Finding | None:
        """Told where any attack tells, open where one was not measured.

        Args:
            corrected: p-values of the tests in order.
        """
        if self.half or not self.made:
            return self.half
        if not self.tests:
            return missing(KINDS["tests"], "no attack of the registry could be made")
        best = int(np.argmin(corrected))
        (name, row), p = list(self.tests.items())[best], float(corrected[best])
        figures = f"AUC {row['auc']:.2f} [{row['low']:.2f}, {row['high']:.2f}], p {p_value(p)}"
        figures += " after Holm over all attacks"
        ends = (row["auc"], row["low"], row["high"])
        if p < THRESHOLDS["alpha"].value:
            says = f"{name} tells members from texts it never saw ({figures})"
            return Finding(KINDS["tests"], "fail", says, *ends, p=p)
        if self.absent:
            return missing(KINDS["tests"], f"{', '.join(self.absent)} could not be made")
        says = f"no attack of the registry tells its members ({name}: {figures})"
        return Finding(KINDS["tests"], "pass", says, *ends, p=p)
