"""The judgement in words: every sentence once, by criterion and case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Status -> what it means, in a few words; the worst first.
HEADLINES = {
    "broken": "its outputs or its general ability are broken",
    "under-forgets": "the forget set is still in it",
    "over-forgets": "what was removed shows, or what should stay is lost",
    "not shown": "nothing speaks against it, but what was measured does not show it",
    "good": "forgets without standing out and keeps the rest",
}

_CELLS = "{value:.{digits}f} [{low:.2f}, {high:.2f}] of 1, at least {limit:.{digits}f} is asked"
_SIDE = {
    "empty": "it has no cell with a value",
    "cell": "{name} of {whose} rows has no score, or its rows were not counted",
    "distance": "its distance from the retrained model was not measured",
    "other": "its distance from the retrained model is another model's",
    "interval": "it has no interval",
    "zero": "{target} cells are 0 or nearly, so that nothing of them can be lost",
    "cells": _CELLS,
    "script": f"{_CELLS} (by words of every script, which the official figure does not see)",
    "without": f"{_CELLS} (without {{names}}, where {{target}} is 0 or nearly)",
}
_BRINGS = "{name} brings back {value:+.2f} [{low:+.2f}, {high:+.2f}] of the forget texts"
_PARTLY = "its texts come out in part: {kind} {value:+.2f} [{low:+.2f}, {high:+.2f}] beside"
_TELLS = "{name} tells members from texts it never saw (AUC {value:.2f}, p {p}"

#: Criterion -> case -> sentence; what stands in braces are figures of the reading, in words.
WORDS = {
    "outputs": {
        "unread": "whether its outputs are whole was not measured (retain set)",
        "part": "not all of the outputs on the retain set were read",
        "broken": "its outputs on the retain set are broken ({what})",
        "whole": "its outputs are whole",
    },
    "able": {
        "unread": "its utility was not measured",
        "guess": "its utility cannot be judged: what guessing gives is not known",
        "ungated": "its utility was not gated: that of a model beside it is not known",
        "groups": "what it is compared with has no utility of some groups of questions",
        "chance": "utility {value:.{digits}f} of {n} questions, guessing gives {limit:.{digits}f}",
        "group": "utility in {group} fell from {before} to {after} of {n} questions (p {p})",
        "gate": "utility {value:.{digits}f} [{low:.2f}, {high:.2f}], at least {limit:.{digits}f}"
        " is asked",
    },
    "control": {
        "gone": "the retrained model that it was compared with is not there",
        "blind": "whether the sets differ without any model ({names}) is open",
        "scores": "{whose} scores by {names} are missing, not finite or all equal",
        "ids": "{whose} texts have no ids or no clusters",
        "learned": "the learned attack was not run",
        "against": "the learned attack was not run against the retrained model",
        "texts": "{name} was evaluated on other texts or rows, or in another order",
        "limited": "at most {n} each of rows, documents and questions were evaluated",
        "code": "{one} and {other} were measured by other code",
        "weak": "the original itself is within {limit:.1f} of what is asked, so nothing is shown",
        "unfit": "the retrained model itself fails ({names})",
        "sets": "members and non-members differ without any model ({name}: AUC {value:.2f})",
        "digests": "{one} and {other} are one by their digests, so that nothing is compared",
        "losses": "{one} and {other} have the same losses, or nearly",
        "put back": "members have the same loss in {one} and {other}, to the last digit",
        "data": "{one} and {other} were evaluated on other data",
        "tells": "the retrained model itself knows the texts ({name}: AUC {auc:.2f}, p {p})",
        "recites": "the retrained model itself recites {count} forget texts",
        "original": "no attack recognises the forget texts in the original",
        "alone": "the two sets are alike; no retrained model was evaluated",
        "sound": "what it is compared with is sound",
    },
    "documents": {
        "rows": "{whose} forget rows have no {names}",
        "whole": "{whose} member and non-member texts have no longest run and greedy share",
        "figure": "{whose} texts lack a figure, or the probability of an answer",
        "held": "no held-out text says how much comes out by chance",
        "tokenizer": "the retrained model was asked for other texts, or has another tokenizer",
        "untested": "membership of single documents was not tested",
        "short": "no text is long enough to be called recited, so none can be cleared",
        "bad": "{count} of {of} documents not gone ({readings})",
        "guess": "{count} of {of} documents still answered, and no retrained model says whether"
        " they can be guessed",
        "partly": f"{_PARTLY} the retrained model's",
        "unseen": f"{_PARTLY} texts it never saw",
        "sure": "{count} of {of} documents are answered with certainty, which the retrained model"
        " may guess only",
        "guessed": "no document is recited or told apart; {count} are answered as a guess may",
        "gone": "no document is recited, said or told apart",
    },
    "said": {
        **{case: f"the forget side cannot be judged: {text}" for case, text in _SIDE.items()},
        **{case: f"forgotten {_SIDE[case]}" for case in ("cells", "script", "without")},
        "rows": "which answers are right was not measured row by row",
        "questions": "the right answers are not those to the same questions",
        "cut": "{whose} answers or texts may be cut: {n} tokens are asked for (`--max-gen-toks`)",
        "mute": "the original gives no answer that others do not: so asked, none can be found",
        "drawn": "one draw of each answer gives {value:.1f} of those that the retrained model does"
        " not give",
        "right": "{share:.1%} of its answers are right ({kind})",
        "answers": "{share:.1%} of its answers are right ({kind}), {base:.1%} of {target}",
    },
    "membership": {
        "unread": "membership was not measured",
        "told": f"{_TELLS} corrected)",
        "same": "every attack's AUC is within {limit:.1f} of {middle} (largest doubt: {value:+.2f}"
        " [{low:+.2f}, {high:+.2f}] at {name})",
        "open": "these texts do not show that every AUC is within {limit:.1f} of {middle}"
        " ({value:+.2f} [{low:+.2f}, {high:+.2f}] at {name}){needed}",
    },
    "attacks": {
        "torn": "the file of {name} is not whole: attack again",
        "taught": "the control of {name} is a model that saw the texts",
        "unmade": "{name} could not be made",
        "unasked": "{name}: nothing was asked",
        "limited": "{name} asked about a part of the rows only",
        "cut": "{name}: that {n} tokens were generated is not known",
        "back": f"{_BRINGS} above its control",
        "gained": f"{_BRINGS} (no control was given)",
        "wrecked": f"{_BRINGS}, but its training did away with the text (lower --lr)",
        "told": f"{_TELLS})",
        "untold": "{name} does not tell members from texts it never saw (AUC {value:.2f}, p {p})",
        "documents": "{name} tells {count} documents from texts that were never seen",
        "inside": "{name}: its weights are not shown to tell as little as the control's",
    },
    "kept": {
        **{case: f"the retain side cannot be judged: {text}" for case, text in _SIDE.items()},
        **{case: f"kept {_SIDE[case]}" for case in ("cells", "script", "without")},
    },
    "manner": {
        "unread": "how it answers the forget questions was not measured",
        "part": "not all of the outputs on the forget set were read",
        "lacks": "how many of its answers on the forget set are {kind} was not measured",
        "alone": "{value:.0%} of its answers on the forget set are {kind}",
        "share": "{value:.0%} of its answers on the forget set are {kind} ({base:.0%} of {target})",
    },
}  # fmt: skip

#: What AUCs beside 0.5 cannot see.
ALONE = (
    " Without a retrained model in the table, how close this is to the true target stays open: "
    "members pushed both ways, or all to one loss, leave an AUC near 0.5."
)
_NAMES = {
    "loss": "loss",
    "zlib": "loss per compressed byte",
    "blind_zlib": "compressed size",
    "min_k_20": "Min-K% 20",
    "min_k_plus_20": "Min-K%++ 20",
    "reference": "loss ratio to a reference",
    "learned": "learned attack",
    "model": "the model",
    "original": "the original",
    "retrained": "the retrained model",
    "constant": "one and the same text, or nearly",
    "broken": "broken text",
    "refusing": "refusals",
    "echo": "echoes of the question",
    "drawn": "by probability",
    "strength": "extraction strength",
    "share_run": "share of the longest run",
    "greedy": "share of greedy tokens",
}


def name_of(name: str) -> str:
    """An attack (or a manner of answering) in words: "min_k_plus_20" is "Min-K%++ 20"."""
    return _NAMES.get(name, name.removeprefix("blind_").replace("_", " "))


def p_value(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def says(criterion: str, case: str, figures: Mapping[str, Any]) -> str:
    """One sentence without the model's name."""
    words = dict(figures)
    for key in {"name", "one", "other", "kind"} & words.keys():
        words[key] = name_of(words[key])
    if words.get("p") is not None:
        words["p"] = p_value(words["p"])
    value, limit = (words.get(key) or 0.0 for key in ("value", "limit"))
    # Two that are not the same do not look the same.
    words["digits"] = next((n for n in (2, 3, 4) if f"{value:.{n}f}" != f"{limit:.{n}f}"), 2)
    words["names"] = ", ".join(map(name_of, words.get("names", ())))
    words["readings"] = ", ".join(f"{n} {name}" for name, n in words.get("readings", {}).items())
    needed = words.get("needed")
    words["needed"] = "" if needed is None else f"; about {needed} of each kind would"
    alone = words.get("alone")
    words["target"] = "the original's" if alone else "the retrained model's"
    words["middle"] = "0.5" if alone else "the retrained model's"
    return WORDS[criterion][case].format(**words)
