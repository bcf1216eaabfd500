"""How likely the answers of both sides are: what the YAML file of this folder names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axolotl_unlearn.evaluation.lm_tasks import (
    UnlearnTask,  # noqa: F401
    dataset,
    facts_of,
    mean_of_present,  # noqa: F401
    sets_of,
)
from axolotl_unlearn.metrics import memorisation
from axolotl_unlearn.metrics.memorisation import TokenFacts

Docs = dict[str, Any]
#: For either side.
LIKELIHOOD_METRICS = ("loss", "probability", "exact_memorisation", "extraction_strength",
                      "extraction_strength_one_over_n", "zlib_ratio", "min_k_0.2",
                      "min_k_plus_0.2")  # fmt: skip


def likelihood_documents(**metadata: Any) -> Docs:
    """Answers of the forget and retain rows after their prompts, the two sides in turn."""
    rows = []
    for row in sets_of(metadata, "tasks").rows:
        prompt = row.record.input
        answer = f" {row.record.output}" if prompt else row.record.output
        rows.append({"side": row.side, "context": prompt, "answer": answer})
    return dataset(rows)


def score_likelihood(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """All likelihood metrics of one answer, under names of its side; None for the other side, and
    without the facts of each token."""
    facts = facts_of(results[0], "unlearn_likelihood: its figures")
    values = {} if facts is None else all_likelihood_metrics(facts, doc["answer"])
    return {
        f"{side}_{name}": values.get(name) if side == doc["side"] else None
        for side in ("forget", "retain")
        for name in LIKELIHOOD_METRICS
    }


def all_likelihood_metrics(facts: TokenFacts, text: str) -> dict[str, float]:
    """Every metric that one text and one model give, by name."""
    return {
        "loss": memorisation.loss(facts),
        "probability": memorisation.probability(facts),
        "exact_memorisation": memorisation.exact_memorisation(facts),
        "extraction_strength": memorisation.extraction_strength(facts),
        "extraction_strength_one_over_n": memorisation.extraction_strength(facts, "one_over_n"),
        "zlib_ratio": memorisation.zlib_ratio(facts, text),
        "min_k_0.2": memorisation.min_k(facts),
        "min_k_plus_0.2": memorisation.min_k_plus(facts),
    }
