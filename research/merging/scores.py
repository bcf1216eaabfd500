"""Scores of a resident model by teacher forcing: one forward over prompt and answer.

Only ROUGE of completions is a proxy: it takes the answer's tokens that are the arg max after the true
ones before them for what would be generated.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from torch import nn

from axolotl_unlearn.engine.token_scoring import Query, score_options, score_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.metrics import memorisation, semeval
from research.merging.lab import Score


def proxy(sets: EvaluationSets, tokenizer: Any, join: str = " ", batch_tokens: int = 8192) -> Score:
    """A function of a model: the 12 cells (None without rows), task_aggregate, mia_auc, mia_score,
    utility, aggregate, and ``forget`` and ``retain``, the harmonic means of either side's cells.
    High is good in all but mia_auc (.5 is the aim)."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UnlearnError("The tokenizer has no end-of-sequence token: answers never end.")
    queries = []
    for row in sets.rows:
        prompt = tokenizer(row.record.input)["input_ids"]
        answer = tokenizer(join + row.record.output, add_special_tokens=False)["input_ids"]
        queries.append(Query.of([*prompt, *answer, eos], len(prompt)))
    documents = [Query.of(tokenizer(text)["input_ids"]) for _, _, text in sets.documents]
    options = [(one.context, one.continuations) for one in sets.utility]

    def said(row, query: Query, fact) -> float:
        if row.record.kind == "question":
            return float(all(fact.greedy))
        right = [token for token, hit in zip(query.targets, fact.greedy, strict=True) if hit]
        text = tokenizer.decode(right, skip_special_tokens=True)
        return semeval.row_score("completion", text, row.record.output)

    def scores(model: nn.Module) -> dict[str, float | None]:
        model.eval()
        facts = score_queries(model, queries, batch_tokens=batch_tokens)
        values = map(said, sets.rows, queries, facts)
        cells, _ = semeval.cell_values(zip((row.cell for row in sets.rows), values, strict=True))
        found: dict[str, float | None] = dict(cells)
        auc = mia = utility = None
        if documents:
            sides: dict[str, list[float]] = {"member": [], "nonmember": []}
            told = score_queries(model, documents, batch_tokens=batch_tokens, loss_only=True)
            for (side, _, _), fact in zip(sets.documents, told, strict=True):
                sides[side].append(memorisation.loss(fact))
            finite = all(math.isfinite(loss) for side in sides.values() for loss in side)
            # A model that broke altogether is a bad candidate, not the end of a search.
            auc = semeval.mia_auc(*sides.values()) if finite else 0.0
            mia = semeval.mia_score(auc)
            found |= {f"{name}_loss": fmean(side) for name, side in sides.items()}
        if options:
            sums = score_options(model, tokenizer, options, batch_tokens=batch_tokens)
            utility = fmean(
                part.index(max(part)) == one.answer
                for one, part in zip(sets.utility, sums, strict=True)
            )
        task = semeval.task_aggregate(found)
        found |= {"mia_auc": auc, "mia_score": mia, "utility": utility, "task_aggregate": task}
        found["aggregate"] = semeval.aggregate(task, mia, utility)
        for side in ("forget", "retain"):
            own = (found[name] for name in semeval.CELLS if name.startswith(side))
            found[side] = semeval.harmonic_mean(own)
        return found

    return scores
