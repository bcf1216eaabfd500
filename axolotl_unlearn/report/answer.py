"""The answer to "which of these models may I use?", once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axolotl_unlearn.metrics.results import Results, load_results
from axolotl_unlearn.metrics.verdict import judged, name_of

TONES = {"collapsed": "bad", "below gate": "bad", "before": "plain", "target": "plain"}


@dataclass(frozen=True)
class Judged:
    """One model as judged.

    Attributes:
        kind: the verdict's name.
        tone: good, warn, bad or plain (no candidate).
        headline: the verdict in a few words.
        damning: the figure that speaks most against it, in a few words; "" where none does.
        smallest: the AUC difference that its texts show in four of five data sets.
    """

    name: str
    kind: str
    tone: str
    headline: str
    damning: str
    aggregate: float | None = None
    auc: float | None = None
    smallest: float | None = None

    @property
    def candidate(self) -> bool:
        return self.tone != "plain"


@dataclass(frozen=True)
class Answer:
    """What to use, and each model as judged.

    Attributes:
        tone: good, bad, or plain where no unlearned model was evaluated.
        best: the model to use, or None.
        models: in the order of the results.
    """

    sentence: str
    tone: str
    best: str | None
    models: list[Judged]

    @property
    def candidates(self) -> list[Judged]:
        """The unlearned models: the one to use first, then by Aggregate."""
        order = sorted(self.models, key=lambda one: (one.tone != "good", -(one.aggregate or 0.0)))
        return [one for one in order if one.candidate]


def judged_of(
    results: Results | Mapping[str, Any], attacks: Sequence[Mapping[str, Any]] = ()
) -> list[Judged]:
    """Every model as `metrics.verdict` judges it.

    Args:
        attacks: Results of `axolotl unlearn attack`.
    """
    results = load_results(results)
    verdicts, found = judged(results, attacks), []
    for model in results.models:
        verdict = verdicts[model.name]
        tone = "good" if verdict.good else TONES.get(verdict.status, "warn")
        worst = verdict.worst if tone != "plain" else None
        damning = worst.says if worst else ""
        if verdict.good and verdict.strongest:
            # Even of a good model: the attack that comes closest.
            one = verdict.attacks[verdict.strongest]
            damning = f"closest attack: {name_of(verdict.strongest)}, AUC {one['auc']:.2f}"
        words = (verdict.status, tone, verdict.headline, damning)
        smallest = verdict.power and verdict.power["smallest_difference"]
        found.append(Judged(model.name, *words, model.aggregate, model.mia_auc, smallest))
    return found


def answer_of(
    results: Results | Mapping[str, Any], attacks: Sequence[Mapping[str, Any]] = ()
) -> Answer:
    """Judge every model and say which one to use, or why none."""
    models = judged_of(results, attacks)
    answer = Answer(
        "There is nothing to choose: no unlearned model was evaluated.", "plain", None, models
    )
    candidates = answer.candidates
    if not candidates:
        return answer
    first = candidates[0]
    if first.tone == "good":
        rest = _some([one.name for one in candidates[1:] if one.tone == "good"])
        also = f" {_listing(rest)} would do as well." if rest else ""
        why = f"it {first.headline}{f' ({first.damning})' if first.damning else ''}"
        return Answer(f"Use {first.name}: {why}.{also}", "good", first.name, models)
    if len(candidates) == 1:
        why = f"{first.headline}{f' ({first.damning})' if first.damning else ''}"
        return Answer(f"{first.name} is not good: {why}.", "bad", None, models)
    # One word a model; the figures stand in the table below.
    kinds = ", ".join(_some([f"{one.name} ({one.kind})" for one in candidates]))
    return Answer(f"None of these is good: {kinds}.", "bad", None, models)


#: Models that a sentence names.
_MOST_NAMED = 10


def _some(names: list[str]) -> list[str]:
    more = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], f"{more} more"] if more > 1 else names


def _listing(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
