"""The answer to "which of these models may I use?", once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.metrics.results import Results, load_results
from axolotl_unlearn.metrics.verdict import Verdict, judged

#: Models that a sentence names.
_MOST_NAMED = 10


@dataclass(frozen=True)
class Answer:
    """What to use, and each model of the results as judged.

    Attributes:
        tone: good, bad, or plain where no unlearned model was evaluated.
        best: the model to use, or None.
        verdicts: by model, in the order of the results.
        candidates: names of the unlearned ones: the one to use first, then by Aggregate.
    """

    results: Results
    sentence: str
    tone: str
    best: str | None
    verdicts: dict[str, Verdict]
    candidates: list[str]

    @property
    def reasons(self) -> list[str]:
        """What speaks most against each candidate that is not good; none for one alone, of which
        the sentence says it."""
        several = self.candidates if len(self.candidates) > 1 else ()
        bad = {name: one.damning for name in several if not (one := self.verdicts[name]).good}
        each = (f"{name} is not good: {says}." for name, says in bad.items() if says)
        return [" ".join(one.split()) for one in each]  # no name begins a line

    @property
    def labels(self) -> dict[str, dict[str, str]]:
        """By model what the table and the reasons say, for programs."""
        each = self.verdicts.items()
        return {n: {"label": v.label, "outcome": v.outcome, "says": v.damning} for n, v in each}


def answer_of(
    results: Results | Mapping[str, Any] | str | Path,
    attacks: Sequence[Mapping[str, Any]] | None = None,
) -> Answer:
    """Judge every model, with results of attacks on them, and say which one to use, or why none.

    Args:
        attacks: As of `judged`.
    """
    verdicts = judged(results, attacks)
    results = load_results(results)
    aggregates = {model.name: model.aggregate or 0.0 for model in results.models}
    order = sorted(verdicts, key=lambda name: (not verdicts[name].good, -aggregates[name]))
    candidates = [name for name in order if verdicts[name].tone != "plain"]
    good = [name for name in candidates if verdicts[name].good]
    tone, best = "bad", None
    if not candidates:
        tone, says = "plain", "There is nothing to choose: no unlearned model was evaluated."
    elif good:
        tone, best = "good", good[0]
        rest = _some(good[1:])
        words = " and ".join(filter(None, [", ".join(rest[:-1]), *rest[-1:]]))
        also = f" {words} would do as well." if rest else ""
        says = f"Use {best}: it {verdicts[best].why}.{also}{verdicts[best].unseen}"
        if len(candidates) > 1:
            says += f" It is the best of {len(candidates)}, for which no test is corrected."
    elif len(candidates) == 1:
        says = f"{candidates[0]} is not good: {verdicts[candidates[0]].why}."
    else:
        # One word a model; the figures stand in the table below.
        kinds = ", ".join(_some([f"{name} ({verdicts[name].label})" for name in candidates]))
        says = f"None of these is good: {kinds}."
    return Answer(results, says, tone, best, verdicts, candidates)


def _some(names: list[str]) -> list[str]:
    more = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], f"{more} more"] if more > 1 else names
