"""What an attacker asks about the forget rows, and how much of the answers comes out.

A probe is a prompt with the continuation that would give the secret away. Two numbers a probe:

    recalled     completions: ROUGE-L recall of the generation against the rest of the document;
                 questions: 1 if the generation contains the answer as whole words. An attacker
                 does not care whether the model stops after it, the official exact match does.
    probability  p ** (1 / n) of the continuation: moves long before a greedy generation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.continuations import score_pairs
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.evaluation.sets import as_one
from axolotl_unlearn.metrics.intervals import Estimate, mean_of
from axolotl_unlearn.metrics.memorisation import probability
from axolotl_unlearn.metrics.semeval import any_script_recall
from axolotl_unlearn.metrics.words import contains_answer

MEASURES = ("recalled", "probability")


@dataclass(frozen=True)
class Probe:
    """One question to the model: what it would say next if it remembered (with the space in front)
    and the secret that a generation is compared with; ``kind``: "completion" or "question"."""

    id: str
    document: str
    prompt: str
    continuation: str
    expected: str
    kind: str


def plain_probes(records: Sequence[Record], *, join: str = " ") -> list[Probe]:
    """The forget rows as the official evaluation asks them; one without an input is not asked.

    Raises:
        UnlearnError: No row has an input.
    """
    clusters = as_one(((r.input, r.output), r.cluster) for r in records)
    probes = [
        Probe(r.id, own, r.input, join + r.output, r.output, r.kind)
        for r, own in zip(records, clusters, strict=True)
        if r.input.strip()
    ]
    if not probes:
        raise UnlearnError(
            "no forget row that may be asked about has an `input`; write there what comes before "
            "the `output`.",
            code="attack.none-to-ask",
        )
    return probes


def recalled(probe: Probe, generated: str) -> float:
    """Share of the secret that came out, in [0, 1]."""
    if probe.kind == "completion":
        return any_script_recall(generated, probe.expected)
    return float(contains_answer(generated, probe.expected))


@dataclass(frozen=True)
class Scores:
    """Recall of each probe, ``[P]`` each."""

    ids: list[str]
    documents: list[str]
    recalled: list[float]
    probability: list[float]

    def mean(self, measure: str) -> Estimate:
        return mean_of(getattr(self, measure), self.documents)

    def only(self, ids: Sequence[str]) -> Scores:
        """These probes alone, in this order."""
        place = {name: i for i, name in enumerate(self.ids)}
        rows = [place[name] for name in ids]
        return Scores(*([column[i] for i in rows] for column in asdict(self).values()))

    def figures(self) -> dict[str, Any]:
        """Each measure's mean and interval by documents, and n."""
        report: dict[str, Any] = {"n": len(self.ids), "documents": len(set(self.documents))}
        for measure in MEASURES:
            score = self.mean(measure)
            low, high = score.interval()
            report[measure] = {"value": score.value, "low": low, "high": high}
        return report

    def minus(self, other: Scores) -> dict[str, dict[str, float]]:
        """Paired difference to ``other`` over the common probes, measure by measure."""
        ids = sorted(set(self.ids) & set(other.ids))
        first, second = self.only(ids), other.only(ids)
        return {m: first.mean(m).minus(second.mean(m)).difference() for m in MEASURES}


def score_probes(
    model: Any,
    tokenizer: Any,
    probes: Sequence[Probe],
    *,
    until: str | None = None,
    **options: Any,
) -> Scores:
    """Ask every probe; generations, with ``options`` of `generate_greedily`, are cut at ``until``
    before they are compared."""
    pairs = [(probe.prompt, probe.continuation) for probe in probes]
    facts = score_pairs(model, tokenizer, pairs, "", loss_only=True)
    if not all(np.isfinite(one.logp).all() for one in facts):
        raise UnlearnError(
            "log-probs are NaN or infinite; lower --lr, or give --dtype float32.",
            code="attack.not-finite",
        )
    said = generate_greedily(model, tokenizer, [p.prompt for p in probes], **options)
    texts = [text if until is None else text.strip().split(until)[0] for text in said]
    return Scores(
        ids=[probe.id for probe in probes],
        documents=[probe.document for probe in probes],
        recalled=[recalled(probe, text) for probe, text in zip(probes, texts, strict=True)],
        probability=list(map(probability, facts)),
    )
