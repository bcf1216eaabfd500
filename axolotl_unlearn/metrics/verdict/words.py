"""The judgement in words: every sentence once, by criterion and case."""

from __future__ import annotations

from typing import Any

#: Status -> what it means, in a few words.
HEADLINES = {
    "broken": "its outputs or its general ability are broken",
    "under-forgets": "the forget set is still in it",
    "over-forgets": "what was removed shows, or what should stay is lost",
    "not shown": "nothing speaks against it, but what was measured does not show it",
    "good": "forgets without standing out and keeps the rest",
}

#: Criterion -> case -> sentence; figures in braces are those of the finding.
WORDS = {
    "outputs": {
        "missing": "whether its outputs are whole was not measured ({what})",
        "collapsed": "its outputs on the retain set are broken ({what})",
        "pass": "its outputs are whole",
    },
    "able": {
        "missing": "its utility cannot be judged: {what}",
        "chance": "utility {value:.2f} of {n} questions, guessing gives {limit:.2f}",
        "group": "utility in {group} fell from {before} to {after} of {n} questions (p {p})",
        "gate": "utility {value:.2f} [{low:.2f}, {high:.2f}], at least {limit:.2f} is asked",
    },
    "control": {
        "missing": "the comparison cannot be made: {what}",
        "same": "{what}, so that nothing is compared",
        "sets": "members and non-members differ without any model ({what}: AUC {value:.2f})",
        "knows": "the retrained model itself is not one that never saw the texts: {what}",
        "pass": "what it is compared with is sound",
        "alone": "the two sets are alike; no retrained model was evaluated",
    },
    "documents": {
        "missing": "documents cannot be judged one by one: {what}",
        "short": "no text is long enough to be called recited, so none can be cleared",
        "bad": "{count} of {of} documents not gone ({what})",
        "guess": "{count} of {of} documents still answered, and no retrained model says whether"
        " they can be guessed",
        "sure": "{count} of {of} documents are answered with certainty, which the retrained model"
        " may guess only",
        "guessed": "no document is recited or told apart; {count} are answered as a guess may",
        "pass": "no document is recited, said or told apart",
    },
    "said": {
        "missing": "right answers cannot be compared: {what}",
        "answers": "{share:.1%} of its answers are right ({what}), {base:.1%} of {whose}",
        "cells": "forgotten {value:.2f} [{low:.2f}, {high:.2f}] of 1, at least {limit:.2f} is"
        " asked{what}",
        "pass": "right answers are as rare as they should be, forgotten {value:.2f} of 1",
    },
    "membership": {
        "missing": "membership was not measured",
        "told": "{name} tells members from texts it never saw (AUC {auc:.2f}, p {p} corrected)",
        "same": "every attack's AUC is within {limit:.1f} of {whose} (largest doubt: {value:+.2f}"
        " [{low:+.2f}, {high:+.2f}] at {name})",
        "open": "these texts do not show that every AUC is within {limit:.1f} of {whose}"
        " ({value:+.2f} [{low:+.2f}, {high:+.2f}] at {name}){what}",
    },
    "attacks": {
        "missing": "{what}",
        "back": "{name} brings back {value:+.2f} [{low:+.2f}, {high:+.2f}] of the forget texts"
        " {what}",
        "told": "{name} tells members from texts it never saw (AUC {value:.2f}, p {p})",
        "documents": "{name} tells {count} documents from texts that were never seen",
        "inside": "{name}: its weights are not shown to tell as little as the control's",
        "pass": "none of {count} attacks finds anything",
    },
    "kept": {
        "missing": "what is kept cannot be compared: {what}",
        "cells": "kept {value:.2f} [{low:.2f}, {high:.2f}] of 1, at least {limit:.2f} is asked"
        "{what}",
    },
    "manner": {
        "missing": "how it answers the forget questions was not measured ({what})",
        "share": "{share:.0%} of its answers on the forget set are {what} ({base:.0%} of {whose})",
        "pass": "it answers the forget questions as it answers others",
    },
}

#: What AUCs beside 0.5 cannot see.
ALONE = (
    " Without a retrained model in the table, how close this is to the true target stays open: "
    "members pushed both ways, or all to one loss, leave an AUC near 0.5."
)


def says(criterion: str, case: str, figures: dict[str, Any]) -> str:
    """One sentence without the model's name."""
    return WORDS[criterion][case].format(**figures)


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
