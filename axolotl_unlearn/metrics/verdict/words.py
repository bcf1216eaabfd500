"""The judgement in words."""

from __future__ import annotations

from collections.abc import Sequence

from axolotl_unlearn.metrics.results import Model
from axolotl_unlearn.metrics.verdict.criteria import Finding, show

#: Status -> headline; the first status that applies, in this order.
HEADLINES = {
    "collapsed": "collapsed: its outputs are broken",
    "below gate": "below the utility gate",
    "before": "before unlearning",
    "target": "never saw the forget set: the target",
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
    "no membership": "no membership score, so forgetting is only half measured",
    "utility unknown": "its utility was not gated, so it is not called good",
    "not measured": "nothing speaks against it, but not all that counts was measured",
    "not enough texts": "nothing speaks against it, but what was measured is too little to say",
    "good": "forgets without standing out and keeps the rest",
}
STATUSES = tuple(HEADLINES)


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
    attacked: bool = False,
) -> str:
    """The headline, what decided, and the figures; of a model that nothing speaks against also what
    was not looked at."""
    by_id = {finding.id: finding for finding in findings}
    sides = f"orgotten {show(model.side('forget'))} and kept {show(model.side('retain'))} of 1"
    if status in ("collapsed", "below gate"):
        collapsed = status == "collapsed"
        finding = by_id["collapse" if collapsed else "gate"]
        return (
            f"{'Collapsed' if collapsed else 'Below the utility gate'}: {finding.says}, so its "
            f"Aggregate of {show(model.aggregate)} does not count."
        )
    if status == "before":
        return (
            f"The starting point, before any unlearning: {by_id['told'].says}. Every other row is "
            "read against it."
        )
    if status == "target":
        return (
            "The true target, because it never saw the forget set: an unlearned model is good when "
            f"it cannot be told from this one (f{sides}, AUC {show(model.mia_auc)})."
        )
    shown = [f for f in findings if f.outcome == "fail"]
    shown = shown or [f for f in findings if f.outcome == "open"]
    shown = shown or [by_id[name] for name in ("told", "same") if name in by_id]
    utility = f"utility {show(model.utility)}"
    if original is not None and None not in (model.utility, original.utility):
        utility += f" against {show(original.utility)} before"
    text = f"{_capital(HEADLINES[status])}: {'; '.join(f.says for f in shown)}. "
    text += f"F{sides}; {utility}."
    if status in ("good", "not measured", "not enough texts"):
        text += ALONE if retrained is None else ""
        text += "" if attacked else " No attack on its text or weights was run."
    return text


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


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
