"""The one judgement of a model: from its entry in results.json to a word, findings, a sentence.

Nine criteria (`CRITERIA`) have three outcomes each: "pass" (the whole interval is on the good side
of its limit), "fail" and "open" (the rows do not suffice to say, or what is asked was not
measured). A model is good when every criterion passes. With a retrained model everything is
compared with it, paired; without one with chance. What is added to the evidence that is asked for
can only refuse.

results.json holds facts and no verdict: an attack that comes later would make it untrue. `judged`
is where everyone who shows one gets it. The rules in words: docs/verdict.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import holm
from axolotl_unlearn.metrics.results import (
    Attack,
    Model,
    Results,
    attack_results,
    folder_of,
    load_results,
    read,
)
from axolotl_unlearn.metrics.verdict import criteria
from axolotl_unlearn.metrics.verdict.criteria import CRITERIA, Facts, Read, strongest, worst
from axolotl_unlearn.metrics.verdict.words import ALONE, HEADLINES, name_of, p_value, says

STATUSES = tuple(HEADLINES)
#: What a model is that nobody asks to forget.
PARTS = {"original": "before unlearning", "retrained": "never saw the texts",
         "reference": "never saw the texts"}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One criterion.

    Attributes:
        id: One of `CRITERIA`.
        outcome: "pass", "fail" or "open".
        says: One sentence without the model's name.
        status: What a failure makes of the model.
        value, low, high: The figure with the interval that was compared with ``limit``.
        p: Corrected p-value where a test decided.
        needed: Texts (or rows) with which a value like this would pass; None if none would.
        missing: Open because it was not measured, or what was measured cannot be read.
    """

    id: str
    outcome: str
    says: str
    status: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    p: float | None = None
    needed: int | None = None
    missing: bool = False

    @property
    def title(self) -> str:
        return CRITERIA[self.id].title

    @classmethod
    def of(cls, criterion: str, one: Read) -> Finding:
        gone = one.outcome == "missing"
        given = {"status": CRITERIA[criterion].status} | one.figures
        given = {key: given[key] for key in _FIGURES if key in given}
        text = says(criterion, one.case, one.figures)
        return cls(criterion, "open" if gone else one.outcome, text, **given, missing=gone)


_FIGURES = ("status", "value", "low", "high", "limit", "p", "needed")


@dataclass(frozen=True)
class Verdict:
    """The judgement of one model.

    Attributes:
        status: One of `STATUSES`.
        findings: One a criterion.
        attacks: ``{name: {auc, low, high, p, p_corrected, side, difference}}`` of each membership
            attack: a 95 % interval, and `metrics.membership.equivalence`; null for the learned one.
        power: ``{members, nonmembers, clusters, tests, smallest_difference}``: the AUC difference
            that so many texts find in four of five data sets; None without scores.
        against: "retrained" or "chance": what AUCs are compared with.
        sentence: The whole judgement, without the model's name.
        part: The model's role.
        ignored: Attack files that are of other weights or other data, in words.
        unseen: Of a model that nothing speaks against what was not looked at; and ``ignored``.
    """

    status: str
    findings: list[Finding] = field(default_factory=list)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    power: dict[str, Any] | None = None
    against: str = "chance"
    sentence: str = ""
    part: str = "candidate"
    ignored: tuple[str, ...] = ()
    unseen: str = ""

    @property
    def good(self) -> bool:
        return self.status == "good" and self.part == "candidate"

    @property
    def outcome(self) -> str:
        """ "shown", "refused", "not shown", or "no candidate"."""
        if self.part != "candidate":
            return "no candidate"
        refused = any(finding.outcome == "fail" for finding in self.findings)
        return "shown" if self.good else "refused" if refused else "not shown"

    @property
    def label(self) -> str:
        """The status of a candidate, else the model's part in the comparison."""
        return PARTS.get(self.part, self.status)

    @property
    def worst(self) -> Finding | None:
        """The finding that decided, if any speaks against the model."""
        order = [("fail", self.status), ("fail", None), ("open", None)]
        found = (
            finding
            for outcome, status in order
            for finding in self.findings
            if finding.outcome == outcome and status in (None, finding.status)
        )
        return next(found, None)

    @property
    def tone(self) -> str:
        """ "good", "warn", "bad", or "plain" (no candidate)."""
        known = {"good": "good", "broken": "bad"}
        return known.get(self.status, "warn") if self.part == "candidate" else "plain"

    @property
    def damning(self) -> str:
        """What speaks most against it, if anything; of a good model the attack that comes
        closest."""
        if self.good and (name := strongest(self.attacks)):
            return f"closest attack: {name_of(name)}, AUC {self.attacks[name]['auc']:.2f}"
        return self.worst.says if self.worst and self.tone != "plain" else ""

    @property
    def why(self) -> str:
        return f"{HEADLINES[self.status]}{f' ({self.damning})' if self.damning else ''}"


#: Documents of each kind -> share of perfectly forgetting models that are called good beside a
#: retrained model (simulated; research/results/error-rates.json).
GOOD = {40: 0.0, 60: 0.15, 80: 0.4, 100: 0.55, 150: 0.8, 200: 0.9}


def show(value: float | None, digits: int = 2) -> str:
    """A number as the report prints it; a missing one is "n/a", never 0."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def can_be_good(members: int, nonmembers: int) -> str:
    """What so many documents can show at best, in a sentence to say before an evaluation; "" where
    they are enough."""
    least = min(members, nonmembers)
    share = max((rate for size, rate in GOOD.items() if size <= least), default=0.0)
    enough = min(size for size, rate in GOOD.items() if rate >= criteria.POWER)
    if least >= enough:
        return ""
    seldom = f"in about {100 * share:.0f} of 100 cases" if share else "never"
    return (
        f"{members} members and {nonmembers} non-members are few: a model that forgot perfectly is "
        f"{seldom} shown to be good, with {enough} of each in four of five cases."
    )


def judged(
    results: Results | Mapping[str, Any] | str | Path,
    attacks: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Verdict]:
    """The verdict of every model of results.json, by name.

    Args:
        attacks: Results of `axolotl-unlearn attack`, of which those of a model count for it;
            default: those in the folder of the results.
    """
    if attacks is None:
        attacks = attack_results(folder_of(results)) if isinstance(results, (str, Path)) else ()
    results = load_results(results)
    roles = results.role("original"), results.role("retrained")
    return {model.name: judge(model, *roles, attacks) for model in results.models}


def judge(
    model: Model | Mapping[str, Any],
    original: Model | Mapping[str, Any] | None = None,
    retrained: Model | Mapping[str, Any] | None = None,
    attacks: Sequence[Mapping[str, Any]] = (),
    *,
    asks: Sequence[str] | None = None,
) -> Verdict:
    """Judge one entry of results.json; pure.

    Args:
        original, retrained: Their entries; None or the model itself where there are none.
        attacks: Results of `axolotl-unlearn attack` on any model; those of this one count.
        asks: Ids of the criteria that count, of `CRITERIA`; default: all.

    Raises:
        UnlearnError: An entry is none of results.json.
    """
    model = read(Model, model, "the model")
    original, retrained = (
        None if one is None else read(Model, one, f"the {name} model")
        for name, one in (("original", original), ("retrained", retrained))
    )
    # An original or a retrained model is compared with chance.
    retrained = retrained if model.part in ("candidate", "reference") else None
    original = original if original is not None and original.name != model.name else None
    facts = _facts(model, original, retrained, attacks)
    reads = {name: list(CRITERIA[name].read(facts)) for name in asks or CRITERIA}
    findings = [Finding.of(name, worst(name, found)) for name, found in reads.items() if found]
    failed = {finding.status for finding in findings if finding.outcome == "fail"}
    status = next((one for one in STATUSES if one in failed), "not shown")
    if all(finding.outcome == "pass" for finding in findings):
        status = "good"
    against = "chance" if retrained is None else "retrained"
    parts = (facts.told, facts.power, against, _sentence(status, facts, findings), model.part)
    return Verdict(status, findings, *parts, facts.ignored, _unseen(status, facts))


def told_by_attacks(
    results: Results, attacks: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """``{model: {document: {"p", "q", "side"}}}`` of the attack files that count for a model,
    of each document what the file says that tells it best."""
    told: dict[str, dict[str, dict[str, Any]]] = {}
    for model in results.models:
        for file in _facts(model, results.role("original"), None, attacks).attacks:
            mine, q = told.setdefault(model.name, {}), file.q
            for name, one in file.documents.items():
                if name not in mine or q[name] < mine[name]["q"]:
                    mine[name] = {"p": one.p, "q": q[name], "side": one.side}
    return told


def sentence(result: Attack | Mapping[str, Any]) -> str:
    """What a file of an attack shows, in the verdict's words: of variants the one that brings back
    most above the control, of tests of members the one that tells most; p after Holm.

    Raises:
        UnlearnError: It is not whole.
    """
    file = read(Attack, result, "the attack")
    many = len(file.tests) or len(file.rows) - 1
    over = f" after Holm over {many} tests" if many > 1 else ""
    if file.tests:
        corrected = holm([one.p for one in file.tests.values()]).tolist()
        each = zip(corrected, file.tests.items(), strict=True)
        p, (name, one) = min(each, key=lambda x: (x[0], -abs(x[1][1].auc - 0.5)))
        case = "told" if p < criteria.ALPHA else "untold"
        text = says("attacks", case, {"name": name, "value": one.auc, "p": p})
        figures = f"AUC {one.auc:.2f} [{one.low:.2f}, {one.high:.2f}], p {p_value(p)}{over}"
        text = f"{text.partition(' (AUC')[0]} ({figures})"
        if file.missing:
            text += f"; not measured: {', '.join(file.missing)}"
            text += ", so this is no evidence of forgetting" if case == "untold" else ""
    elif many < 1:
        name = ", ".join(file.missing)
        text = says("attacks", "unmade" if name else "unasked", {"name": name or file.title})
    else:
        row, gain, p, controlled = criteria.strongest_gain(file)
        chance = p >= criteria.ALPHA
        case = "wrecked" if chance and criteria.wrecks(file) else "back" if controlled else "gained"
        name = f"{file.title} ({row.variant})"
        text = says("attacks", case, gain.model_dump() | {"name": name})
        text += f": {'not ' * chance}told from chance (p {p_value(p)}{over})"
    return f"{text}."


def _facts(
    model: Model, original: Model | None, retrained: Model | None,
    attacks: Sequence[Mapping[str, Any]],
) -> Facts:  # fmt: skip
    mine, unread, ignored = [], [], []
    for one in attacks:
        name = one.get("model")
        same = model.weights is not None and one.get("weights") == model.weights
        if isinstance(name, str) and name != model.name and not same:
            continue
        title = str(one.get("title") or one.get("attack"))
        try:
            file = read(Attack, one)
        except UnlearnError:
            unread.append(("torn", title))
            continue
        apart = {key for key in file.data.keys() & model.data if file.data[key] != model.data[key]}
        if None not in (file.weights, model.weights) and file.weights != model.weights:
            ignored.append(f"{title} is of other weights")
        elif apart or (file.data and model.data and not file.data.keys() & model.data):
            ignored.append(f"{title} is of other data")
        elif file.control_weights is not None and file.control_weights in (
            model.weights, original.weights if original is not None else None,
        ):  # fmt: skip
            unread.append(("taught", title))
        else:
            mine.append(file)
    return Facts(model, original, retrained, *map(tuple, (mine, unread, ignored)))


def _sentence(status: str, facts: Facts, findings: Sequence[Finding]) -> str:
    """The headline, what decided, the figures, and `_unseen`."""
    model, original = facts.model, facts.original
    shown = [f for f in findings if f.outcome == "fail" and f.status == status]
    shown = shown or [f for f in findings if f.outcome in ("fail", "open")]
    shown = shown or [f for f in findings if f.id == "membership"]
    text = f"{HEADLINES[status][0].upper()}{HEADLINES[status][1:]}: "
    text += "; ".join(f.says for f in shown)
    text += f". Forgotten {show(model.side('forget'))} and kept {show(model.side('retain'))} of 1; "
    text += f"utility {show(model.utility)}"
    if original is not None and None not in (model.utility, original.utility):
        text += f" against {show(original.utility)} before"
    text += "."
    return text + _unseen(status, facts)


def _unseen(status: str, facts: Facts) -> str:
    """Of a model that nothing speaks against what was not looked at; files that do not count."""
    model, original, text = facts.model, facts.original, ""
    if status in ("good", "not shown"):
        text += ALONE if facts.retrained is None else ""
        if not facts.attacks:
            text += " No attack on its text or weights was run."
        elif all(one.weights is None or one.weights != model.weights for one in facts.attacks):
            text += " No attack's file names its weights."
        if facts.retrained is not None and None in (model.weights, facts.retrained.weights):
            text += " Whether the retrained model is a copy was not checked by digests."
        theirs = {row.id for row in facts.retrained.texts if row.said} if facts.retrained else set()
        if both := sum(bool(row.said) and row.id in theirs for row in model.texts):
            text += f" {both} answers are said that the retrained model says as well."
        if facts.retrained is not None and original is None:
            text += " The retrained model was not compared with the one before unlearning."
    return text + "".join(f" Not counted: {one}." for one in facts.ignored)
