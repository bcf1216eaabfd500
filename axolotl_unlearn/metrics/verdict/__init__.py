"""The one judgement of a model: from its entry in results.json to a word, findings, a sentence.

Every criterion has three outcomes: "pass" (the whole interval is on the good side of its limit),
"fail" (the whole interval is on the bad side) and "open" (the texts do not suffice to say). A
model is good when every criterion passes, so few texts never make a model look good. What an
attack tells is tested on its own: significant after Holm's correction over all attacks means
told, however small the difference.

With a retrained model in the results it is the judge: every attack's AUC is compared with its
AUC on the same texts (paired), and a test of equivalence has to show that the difference is
below a stated margin. Without one AUCs are compared with .5 and an interval has to lie inside a
band.

What the judgement reads of an entry of ``models`` in results.json (each part may be missing):

    likelihood      member_loss, nonmember_loss: loss of each text; attacks: {name: {member: [...],
                    nonmember: [...]}}, more scores of the same texts, low = rather a member as a
                    loss is (zlib, min_k_20, min_k_plus_20, min_k_40, entropy, reference)
    learned         auc and p of the learned attack (`metrics.learned`, a permutation test)
    cells, intervals, distance    scores, their intervals, paired differences from the retrained
                    model; forget and retain are the harmonic means of a side's cells
    any_script      cells by words of every script, where the official figure is off
    collapse, gate, answers, utility, utility_chance, n, membership.blind, membership.meaningful

What `Verdict.to_json` puts into ``models[i].verdict``:

    status      one of `STATUSES`
    good        true only for the status "good"
    headline    the status in a few words, for a table
    sentence    the whole judgement in words, without the model's name
    worst       id of the criterion that decided, or null
    findings    list of {id, title, outcome, value, low, high, limit, p, needed, says}: the
                criteria in order of weight; p is corrected, needed is the number of texts (or rows)
                with which a value like this would pass, says is one sentence
    attacks     {name: {auc, low, high, p, p_corrected, side, tail: {end, share, expected, p},
                difference: {value, low, high, margin, p, equivalent, needed}}}; low, high of
                ``auc`` are a 95 % interval, those of ``difference`` the 90 % interval of the test;
                null for the learned attack, as are its tail and difference
    strongest   name of the attack with the smallest corrected p-value, or null
    power       {members, nonmembers, tests, smallest_difference}: the AUC difference that so many
                texts find in four of five data sets, or null
    against     "retrained" or "chance": what AUCs are compared with

and what the audit (`metrics.audit`) puts beside it:

    models[i].audit    {documents, tested, told, expected, below_alpha, rate, smallest_p, readings,
                file}; the lines themselves, one a document and candidate, worst first, are in
                audit.jsonl beside results.json: model, task, document, loss, rank (share of
                non-members with a lower loss), min_k_plus_20, extraction_strength (largest of its
                rows), answer_said, answers, answers_said, p, q, told, before and retrained (the
                same figures of those models), rows ({id, extraction_strength, answer_said}),
                reading (one of `audit.READINGS`); texts only of made-up data or with --with-text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from axolotl_unlearn.metrics.verdict import attacks as _attack
from axolotl_unlearn.metrics.verdict import criteria as _criteria
from axolotl_unlearn.metrics.verdict.attacks import (
    UNJUDGED,
    strongest,
    strongest_gain,
    views_of,
    whole,
    wrecks,
)
from axolotl_unlearn.metrics.verdict.criteria import (
    THRESHOLDS,
    Finding,
    bars,
    broken,
    unstopped_answers,
)
from axolotl_unlearn.metrics.verdict.reading import (
    interval,
    number,
    role_of,
    scores_of,
    show,
    side_mean,
)
from axolotl_unlearn.metrics.verdict.words import HEADLINES, STATUSES, name_of, sentence_of

__all__ = [
    "HEADLINES",
    "STATUSES",
    "THRESHOLDS",
    "UNJUDGED",
    "Finding",
    "Verdict",
    "bars",
    "broken",
    "interval",
    "judge",
    "name_of",
    "number",
    "reading_of",
    "role_of",
    "scores_of",
    "show",
    "side_mean",
    "status",
    "strongest",
    "strongest_gain",
    "unstopped_answers",
    "verdict",
    "views_of",
    "whole",
    "wrecks",
]


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
    def headline(self) -> str:
        return HEADLINES[self.status]

    @property
    def strongest(self) -> str | None:
        return strongest(self.attacks)

    @property
    def worst(self) -> Finding | None:
        """The finding that decided, if any speaks against the model."""
        against = [f for f in self.findings if f.outcome == "fail"]
        against += [f for f in self.findings if f.outcome == "open"]
        return against[0] if against else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "good": self.good,
            "headline": self.headline,
            "sentence": self.sentence,
            "worst": self.worst.id if self.worst else None,
            "findings": [asdict(finding) for finding in self.findings],
            "attacks": self.attacks,
            "strongest": self.strongest,
            "power": self.power,
            "against": self.against,
        }


def judge(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None = None,
    retrained: Mapping[str, Any] | None = None,
    attacks: Sequence[Mapping[str, Any]] = (),
) -> Verdict:
    """Judge one entry of results.json; pure, and never an error for a part that is missing.

    Args:
        original, retrained: Their entries; None or the model itself where there are none.
        attacks: Results of `axolotl unlearn attack` on any model; those of this one count.
    """
    role = role_of(model)
    if retrained is not None and retrained.get("name") == model.get("name"):
        retrained = None
    told, power = _attack.membership_attacks(model, retrained)
    against = "chance" if retrained is None else "retrained"
    findings = [
        finding
        for finding in (
            _criteria.collapse(model),
            _criteria.gate(model),
            _criteria.chance(model),
            _attack.tells_members(told, against),
            _criteria.sets(model),
            _criteria.side(model, original, retrained, "forget"),
            _criteria.unstopped(model, retrained),
            _attack.comes_back(model, attacks),
            _attack.inside(model, attacks),
            _criteria.side(model, original, retrained, "retain"),
            _criteria.outputs(model, retrained),
            _attack.as_if_never_seen(told, against),
        )
        if finding is not None
    ]
    status = _status(model, role, findings, told)
    sentence = sentence_of(status, model, original, retrained, findings, told)
    return Verdict(status, findings, told, power, against, sentence)


#: Which status a failed criterion leads to; "told" has three.
_STATUS_OF = {
    "collapse": "collapsed",
    "gate": "below gate",
    "chance": "utility at chance",
    "told": "under-forgets",
    "sets": "sets differ",
    "forgotten": "still knows",
    "answers": "still knows",
    "attack": "comes back",
    "inside": "known inside",
    "kept": "lost knowledge",
    "outputs": "broken answers",
    "same": "not enough texts",
}


def _status(
    model: Mapping[str, Any], role: str, findings: Sequence[Finding], told: Mapping[str, Any]
) -> str:
    failed = {_STATUS_OF[f.id] for f in findings if f.outcome == "fail"}
    for kind in ("collapsed", "below gate"):
        if kind in failed:
            return kind
    if role != "candidate":
        return "before" if role == "original" else "target"
    if not told:
        return "no membership"
    if "under-forgets" in failed:
        worst = told[strongest(told)]
        failed.discard("under-forgets")
        failed.add("recognisable" if worst["by"] == "tail" else f"{worst['side']}-forgets")
    found = [kind for kind in STATUSES if kind in failed - {"not enough texts"}]
    if found:
        return found[0]
    if number(model.get("utility")) is None or not model.get("gate"):
        return "utility unknown"
    return "good" if all(f.outcome == "pass" for f in findings) else "not enough texts"


def verdict(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    retrained: Mapping[str, Any] | None = None,
    attacks: Sequence[Mapping[str, Any]] = (),
) -> str:
    """What this model's scores mean, in words, with its name."""
    return f"{model['name']}: {judge(model, original, retrained, attacks).sentence}"


def reading_of(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    retrained: Mapping[str, Any] | None = None,
) -> str:
    """The verdict without the model's name."""
    return judge(model, original, retrained).sentence


def status(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None = None,
    retrained: Mapping[str, Any] | None = None,
) -> str:
    """One of `STATUSES`."""
    return judge(model, original, retrained).status
