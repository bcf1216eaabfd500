"""The answer to "which of these models may I use?", once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axolotl_unlearn.metrics.results import Results, load_results
from axolotl_unlearn.metrics.verdict import Verdict, judged
from axolotl_unlearn.metrics.verdict.words import name_of

TONES = {"collapsed": "bad", "below gate": "bad", "before": "plain", "target": "plain"}
#: Models that a sentence names.
_MOST_NAMED = 10


@dataclass(frozen=True)
class Judged:
    """One model as judged; its tone is good, warn, bad or plain (no candidate)."""

    name: str
    verdict: Verdict
    aggregate: float | None = None
    auc: float | None = None

    @property
    def kind(self) -> str:
        return self.verdict.status

    @property
    def tone(self) -> str:
        return "good" if self.verdict.good else TONES.get(self.kind, "warn")

    @property
    def damning(self) -> str:
        """What speaks most against it, if anything; of a good model the attack that comes
        closest."""
        verdict = self.verdict
        if verdict.good and verdict.strongest:
            area = verdict.attacks[verdict.strongest]["auc"]
            return f"closest attack: {name_of(verdict.strongest)}, AUC {area:.2f}"
        return verdict.worst.says if verdict.worst and self.tone != "plain" else ""

    @property
    def why(self) -> str:
        return f"{self.verdict.headline}{f' ({self.damning})' if self.damning else ''}"

    @property
    def smallest(self) -> float | None:
        """AUC difference that its texts show in four of five data sets."""
        return self.verdict.power and self.verdict.power["smallest_difference"]


@dataclass(frozen=True)
class Answer:
    """What to use, and each model as judged.

    Attributes:
        tone: good, bad, or plain where no unlearned model was evaluated.
        best: the model to use, or None.
        models: in the order of the results.
        candidates: the unlearned ones: the one to use first, then by Aggregate.
    """

    sentence: str
    tone: str
    best: str | None
    models: list[Judged]
    candidates: list[Judged]


def answer_of(
    results: Results | Mapping[str, Any], attacks: Sequence[Mapping[str, Any]] = ()
) -> Answer:
    """Judge every model, with results of attacks on them, and say which one to use, or why none."""
    results = load_results(results)
    verdicts = judged(results, attacks)
    models = [Judged(m.name, verdicts[m.name], m.aggregate, m.mia_auc) for m in results.models]
    order = sorted(models, key=lambda one: (one.tone != "good", -(one.aggregate or 0.0)))
    candidates = [one for one in order if one.tone != "plain"]
    good = [one.name for one in candidates if one.tone == "good"]
    tone, best = "bad", None
    if not candidates:
        tone, says = "plain", "There is nothing to choose: no unlearned model was evaluated."
    elif good:
        tone, best = "good", good[0]
        rest = _some(good[1:])
        words = " and ".join(filter(None, [", ".join(rest[:-1]), *rest[-1:]]))
        also = f" {words} would do as well." if rest else ""
        says = f"Use {best}: it {candidates[0].why}.{also}"
    elif len(candidates) == 1:
        says = f"{candidates[0].name} is not good: {candidates[0].why}."
    else:
        # One word a model; the figures stand in the table below.
        kinds = ", ".join(_some([f"{one.name} ({one.kind})" for one in candidates]))
        says = f"None of these is good: {kinds}."
    return Answer(says, tone, best, models, candidates)


def _some(names: list[str]) -> list[str]:
    more = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], f"{more} more"] if more > 1 else names
