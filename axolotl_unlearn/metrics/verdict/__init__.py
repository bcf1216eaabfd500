"""The one judgement of a model: from its entry in results.json to a word, findings, a sentence.

Every criterion has three outcomes: "pass" (the whole interval is on the good side of its limit),
"fail" (on the bad side) and "open" (the texts do not suffice to say, or what is asked was not
measured). A model is good when every criterion passes. An attack tells where it is significant
after Holm's correction over all attacks, those of files along. With a retrained model every
attack's AUC is compared with its AUC on the same texts (paired, equivalence within a margin),
without one with 0.5. Clusters (documents, authors) are what is independent.

results.json holds facts and no verdict: an attack that comes later would make it untrue. `judged`
is where everyone who shows one gets it. The rules in words: docs/verdict.md.

What `Verdict.to_json` gives:

    status      one of `STATUSES`
    good        true only for the status "good"
    outcome     "shown" (good), "refused" (a criterion fails), "not shown" (one is open), or "no
                candidate"
    headline    the status in a few words, for a table
    sentence    the whole judgement in words, without the model's name
    worst       id of the criterion that decided, or null
    findings    list of {id, title, outcome, value, low, high, limit, p, needed, says,
                missing}: the criteria in order of weight; p is corrected, needed is the number of
                texts (or rows) with which a value like this would pass, says is one sentence,
                missing is true where the evidence is not there or cannot be read
    attacks     {name: {auc, low, high, p, p_corrected, side, intraclass, tail: {end, share,
                expected, p}, difference: {value, low, high, margin, p, equivalent, needed}}};
                intraclass: correlation of members' scores within clusters; low, high of ``auc``
                are a 95 % interval, those of ``difference`` the 90 % interval of the test;
                null for the learned attack, as are its tail and difference
    strongest   name of the attack with the smallest corrected p-value, or null
    power       {members, nonmembers, clusters, tests, smallest_difference}: the AUC difference that
                so many texts find in four of five data sets, or null
    against     "retrained" or "chance": what AUCs are compared with

``models[i].audit`` and audit.jsonl are described in `metrics.audit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from axolotl_unlearn.metrics.results import Model, Results, load_results, read, whole  # noqa: F401
from axolotl_unlearn.metrics.verdict import attacks as _attack
from axolotl_unlearn.metrics.verdict import criteria as _criteria
from axolotl_unlearn.metrics.verdict.attacks import strongest, strongest_gain, wrecks  # noqa: F401
from axolotl_unlearn.metrics.verdict.criteria import CRITERIA, THRESHOLDS, Finding, bars, show  # noqa: F401
from axolotl_unlearn.metrics.verdict.words import HEADLINES, STATUSES, name_of, sentence_of

TONES = {"good": "good", "collapsed": "bad", "below gate": "bad", "before": "plain",
         "target": "plain"}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """See the module's docstring."""

    status: str
    findings: list[Finding] = field(default_factory=list)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    power: dict[str, Any] | None = None
    against: str = "chance"
    sentence: str = ""

    @property
    def good(self) -> bool:
        return self.status == "good"

    @property
    def outcome(self) -> str:
        """ "shown", "refused", "not shown", or "no candidate"."""
        if self.status in ("before", "target"):
            return "no candidate"
        if self.good:
            return "shown"
        return "refused" if any(f.outcome == "fail" for f in self.findings) else "not shown"

    @property
    def headline(self) -> str:
        return HEADLINES[self.status]

    @property
    def strongest(self) -> str | None:
        return strongest(self.attacks)

    @property
    def worst(self) -> Finding | None:
        """The finding that decided, if any speaks against the model."""
        against = [f for f in self.findings if f.outcome == "fail"]
        decided = [f for f in against if CRITERIA[f.id][1] == self.status]
        against += [f for f in self.findings if f.outcome == "open"]
        return next(iter(decided + against), None)

    @property
    def tone(self) -> str:
        """ "good", "warn", "bad", or "plain" (no candidate)."""
        return TONES.get(self.status, "warn")

    @property
    def damning(self) -> str:
        """What speaks most against it, if anything; of a good model the attack that comes
        closest."""
        if self.good and self.strongest:
            area = self.attacks[self.strongest]["auc"]
            return f"closest attack: {name_of(self.strongest)}, AUC {area:.2f}"
        return self.worst.says if self.worst and self.tone != "plain" else ""

    @property
    def why(self) -> str:
        return f"{self.headline}{f' ({self.damning})' if self.damning else ''}"

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "good": self.good,
            "outcome": self.outcome,
            "headline": self.headline,
            "sentence": self.sentence,
            "worst": self.worst.id if self.worst else None,
            "findings": [asdict(one) | {"title": one.title} for one in self.findings],
            "attacks": self.attacks,
            "strongest": self.strongest,
            "power": self.power,
            "against": self.against,
        }


def judged(
    results: Results | Mapping[str, Any], attacks: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Verdict]:
    """The verdict of every model of results.json, by name.

    Args:
        attacks: Results of `axolotl-unlearn attack`; those of a model count for it.
    """
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
    if retrained is not None and retrained.name == model.name:
        retrained = None
    tried = _attack.Tried(model, attacks)
    tested = _attack.Membership(model, retrained, [one["p"] for one in tried.tests.values()])
    findings = [
        finding
        for finding in (
            _criteria.collapse(model),
            _criteria.gate(model),
            _criteria.chance(model),
            _attack.tells_members(tested.told, tested.against),
            _criteria.recited(model, retrained),
            _criteria.sets(model),
            _criteria.side(model, original, retrained, "forget"),
            _criteria.answers(model, retrained),
            _attack.nearer(model, original, retrained),
            _attack.comes_back(model, attacks),
            _attack.inside(model, attacks),
            tried.finding(tested.tried),
            _criteria.side(model, original, retrained, "retain"),
            _criteria.outputs("outputs", model, retrained),
            _criteria.outputs("silence", model, retrained),
            _attack.evidence(tested, model, retrained),
            _attack.as_if_never_seen(tested.told, tested.against),
        )
        if finding is not None and (asks is None or finding.id in asks)
    ]
    status = _status(model, findings, tested.told)
    attacked = any(finding.id in ("attack", "inside", "members") for finding in findings)
    sentence = sentence_of(status, model, original, retrained, findings, attacked)
    return Verdict(status, findings, tested.told, tested.power, tested.against, sentence)


def _status(model: Model, findings: Sequence[Finding], told: Mapping[str, Any]) -> str:
    failed = {CRITERIA[f.id][1] for f in findings if f.outcome == "fail"}
    for kind in ("collapsed", "below gate"):
        if kind in failed:
            return kind
    if model.part != "candidate":
        return "before" if model.part == "original" else "target"
    if "under-forgets" in failed:
        worst = told[strongest(told)]
        failed.discard("under-forgets")
        failed.add("recognisable" if worst["by"] == "tail" else f"{worst['side']}-forgets")
    if faults := [kind for kind in STATUSES if kind in failed]:
        return faults[0]
    unknown = {f.id for f in findings if f.missing}
    if "told" in unknown:
        return "no membership"
    if "gate" in unknown:
        return "utility unknown"
    if unknown:
        return "not measured"
    return "good" if all(f.outcome == "pass" for f in findings) else "not enough texts"
