"""``hf-unlearn``: lm-eval's Hugging Face model whose log-likelihoods carry per-token facts; of the
folder of routed shards, too (``routed`` is another name of it).

Importing this module registers it: ``axolotl-unlearn tasks run`` does, before lm-eval's own command
line begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from axolotl_unlearn.engine.token_scoring import NO_TOKEN, Query, context_of, score_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.generate import check_room
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.shards import is_routed

NAME = "hf-unlearn"


class Scored(tuple):
    """(log-likelihood, whether greedy), as lm-eval expects, with the facts of each token.

    Attributes:
        facts: of the continuation's tokens.
    """

    facts: TokenFacts

    def __new__(cls, facts: TokenFacts) -> Scored:
        scored = super().__new__(cls, (float(facts.logp.sum()), bool(facts.greedy.all())))
        scored.facts = facts
        return scored

    def __getnewargs__(self) -> tuple[TokenFacts]:  # processes exchange results by pickle
        return (self.facts,)


@register_model(NAME, "routed")
class UnlearnLM(HFLM):
    """HFLM with one chunked forward a text, also of texts that are split at several points (HFLM's
    cache gives the shorter continuation a wrong value); generation is HFLM's."""

    def _create_model(self, pretrained: str, *args: Any, **given: Any) -> None:
        from axolotl_unlearn.shards.model import route

        routed = given.pop("peft") if is_routed(given.get("peft") or "") else None
        super()._create_model(pretrained, *args, **given)
        if routed:
            self._model = route(self._model, routed)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As HFLM's, which scores white space at the end of a context (a chat template's line
        break) with the continuation; here only where a token crosses the border."""
        if context != context.rstrip():
            whole, before = self.tok_encode(context + continuation), self.tok_encode(context)
            if whole[: len(before)] == before and len(whole) > len(before):
                return before, whole[len(before) :]
        return super()._encode_pair(context, continuation)

    @property
    def context(self) -> int | None:
        """Tokens that the model takes, if lm-eval's ``max_length`` or its config says so."""
        return self._max_length or context_of(self.model)

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left",
        left_truncate_len: int | None = None, truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """As HFLM's, which cuts the beginning of a prompt without room for what is generated."""
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len is not None:
            new = self.max_length - left_truncate_len
            check_room(self.context, mask.sum(-1).tolist(), new)
        return ids, mask

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if self.backend != "causal":
            raise NotImplementedError(f"{NAME} scores causal language models only")
        lengths = [len(context) + len(continuation) - 1 for _, context, continuation in requests]
        check_room(self.context, lengths, 0)
        joined: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        places: list[tuple[tuple[int, ...], slice]] = []
        for _, context, continuation in requests:
            if not continuation:
                raise UnlearnError(NO_TOKEN, code="tasks.no-token")
            ids = [*context, *continuation]
            key = tuple(ids[:-1])
            times, targets = joined.setdefault(key, ([], []))
            scored = min(len(continuation), len(key))
            places.append((key, slice(len(times), len(times) + scored)))
            times += range(len(key) - scored, len(key))
            targets += ids[len(ids) - scored :]
        queries = [Query(list(key), *asked) for key, asked in joined.items()]
        size = override_bs or self.batch_size
        longest = max(len(query.ids) for query in queries)
        facts = score_queries(
            self.model, queries, batch_tokens=longest * (size if isinstance(size, int) else 16)
        )
        by_key = dict(zip(joined, facts, strict=True))
        results: list[tuple[float, bool]] = []
        for (request, _, _), (key, where) in zip(requests, places, strict=True):
            scored = Scored(by_key[key][where])
            results.append(scored)
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, tuple(scored))
        return results
