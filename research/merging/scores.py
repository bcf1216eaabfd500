"""Scores of a resident model by teacher forcing: one forward over prompt and answer.

Only ROUGE of completions is a proxy: it takes the answer's tokens that are the arg max after the true
ones before them for what would be generated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from axolotl_unlearn.engine.token_scoring import Query, score_options, score_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.measurement import Measured
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.metrics import memorisation, semeval


class Scorer:
    """Scores of models with one tokenizer on one set; everything is tokenised once.

    ``proxy(model)`` returns the 12 cells (None without rows), task_aggregate,
    mia_auc, mia_score, utility, aggregate, and ``forget`` and ``retain``: the harmonic means of
    either side's cells. High is good in all but mia_auc (.5 is the aim).
    """

    def __init__(
        self,
        sets: EvaluationSets,
        tokenizer: Any,
        *,
        join: str = " ",
        batch_tokens: int = 8192,
    ):
        self.sets, self.tokenizer = sets, tokenizer
        self.batch_tokens = batch_tokens
        eos = tokenizer.eos_token_id
        if eos is None:
            raise UnlearnError("The tokenizer has no end-of-sequence token: answers never end.")
        self.rows = []
        for row in sets.rows:
            prompt = tokenizer(row.record.input)["input_ids"]
            answer = tokenizer(join + row.record.output, add_special_tokens=False)["input_ids"]
            self.rows.append(Query.of([*prompt, *answer, eos], len(prompt)))
        self.documents = [Query.of(tokenizer(text)["input_ids"]) for _, _, text in sets.documents]

    def proxy(self, model: nn.Module) -> dict[str, float | None]:
        """One forward over rows, documents and options."""
        model.eval()
        facts = score_queries(model, self.rows, batch_tokens=self.batch_tokens)
        values = []
        for row, query, fact in zip(self.sets.rows, self.rows, facts, strict=True):
            greedy = [bool(flag) for flag in fact.greedy]
            if row.record.kind == "question":
                value = float(all(greedy))
            else:
                right = [token for token, hit in zip(query.targets, greedy, strict=True) if hit]
                text = self.tokenizer.decode(right, skip_special_tokens=True)
                value = semeval.row_score("completion", text, row.record.output)
            values.append(value)
        scores = self.scores_of(self._measured(values, model))
        return scores

    def scores_of(self, found: Measured) -> dict[str, float | None]:
        """All scores from what was measured."""
        cells, _ = semeval.cell_values((row.cell, found.values[row.key]) for row in self.sets.rows)
        scores: dict[str, float | None] = dict(cells)
        auc = mia = None
        if self.documents:
            sides = found.member_loss, found.nonmember_loss
            finite = all(math.isfinite(loss) for side in sides for loss in side)
            # A model that broke altogether is a bad candidate, not the end of a search.
            auc = semeval.mia_auc(*sides) if finite else 0.0
            mia = semeval.mia_score(auc)
            for name, side in zip(("member_loss", "nonmember_loss"), sides, strict=True):
                scores[name] = math.fsum(side) / len(side)
        scores["mia_auc"], scores["mia_score"] = auc, mia
        scores["utility"] = sum(found.options) / len(found.options) if found.options else None
        return scores | _totals(scores)

    def losses(self, model: nn.Module) -> dict[str, list[float]]:
        """Mean loss of each document in nats a token, the first token not scored."""
        losses: dict[str, list[float]] = defaultdict(list)
        facts = score_queries(model, self.documents, batch_tokens=self.batch_tokens, loss_only=True)
        for (side, _, _), fact in zip(self.sets.documents, facts, strict=True):
            losses[side].append(memorisation.loss(fact))
        return losses

    def options(self, model: nn.Module) -> list[int]:
        """1 for each question whose right option has the highest log-probability, else 0."""
        options = self.sets.utility
        if not options:
            return []
        sums = score_options(
            model,
            self.tokenizer,
            [(option.context, option.continuations) for option in options],
            batch_tokens=self.batch_tokens,
        )
        return [
            int(part.index(max(part)) == option.answer)
            for option, part in zip(options, sums, strict=True)
        ]

    def _measured(self, values: Sequence[float], model: nn.Module) -> Measured:
        losses = self.losses(model) if self.documents else {}
        return Measured(
            values={row.key: value for row, value in zip(self.sets.rows, values, strict=True)},
            member=[{"loss": loss} for loss in losses.get("member", [])],
            nonmember=[{"loss": loss} for loss in losses.get("nonmember", [])],
            options=self.options(model),
        )


def _totals(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    """The scores that follow from cells, membership and utility."""
    task = semeval.task_aggregate(scores)
    totals: dict[str, float | None] = {
        "task_aggregate": task,
        "aggregate": semeval.aggregate(task, scores["mia_score"], scores["utility"]),
    }
    for side in ("forget", "retain"):
        names = [name for name in semeval.CELLS if name.startswith(side)]
        totals[side] = semeval.harmonic_mean(scores[name] for name in names)
    return totals
