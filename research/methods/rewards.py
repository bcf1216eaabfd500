"""PURGE (arXiv 2601.20568): unlearning by reinforcement, through Axolotl's own GRPO.

The model is asked about an entity; a completion is punished for each forget term that it says.
Only the rewards and the term weights are ours; the training is ``rl: grpo`` (examples/purge).

    rl: grpo
    trl:
      reward_funcs: [research.methods.rewards.exponential_decay]
    datasets:
      - {path: forget.jsonl, ds_type: json}

A row has ``prompt`` and ``terms`` (a list; for `pagerank` an object term -> weight, as
`research.probes.term_weights` makes it). Terms are matched case-insensitively as whole words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Terms = Sequence[str] | Mapping[str, float]
#: tau of `exponential_decay`, as published.
TAU = 1.0


def matches(completion: str, terms: Terms) -> dict[str, int]:
    """How often each forget term occurs in a completion; terms that do not occur are left out."""
    counts = {}
    # `datasets` gives every row the keys of all rows, None where they are another row's.
    own = [t for t, w in terms.items() if w is not None] if isinstance(terms, Mapping) else terms
    for term in own:
        count = len(re.findall(rf"(?<!\w){re.escape(term)}(?!\w)", completion, re.IGNORECASE))
        if count:
            counts[term] = count
    return counts


def _rewards(
    completions: Sequence[Any],
    terms: Sequence[Terms],
    reward: Callable[[dict[str, int], Any], float],
) -> list[float]:
    # TRL gives plain texts, or lists of chat messages.
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [reward(matches(text, own), own) for text, own in zip(texts, terms, strict=True)]


def binary(
    prompts: Any, completions: Sequence[Any], terms: Sequence[Terms], **_: Any
) -> list[float]:
    """0 if any forget term occurs, else 1."""
    return _rewards(completions, terms, lambda counts, own: float(not counts))


def exponential_decay(
    prompts: Any, completions: Sequence[Any], terms: Sequence[Terms], **_: Any
) -> list[float]:
    """``exp(-matches / tau)``, every occurrence counted; in (0, 1]."""
    return _rewards(completions, terms, lambda counts, own: math.exp(-sum(counts.values()) / TAU))


def pagerank(
    prompts: Any, completions: Sequence[Any], terms: Sequence[Terms], **_: Any
) -> list[float]:
    """``clip(1 - sum of the weights of the distinct terms that occur, 0, 1)``.

    Without weights (a plain list) every term weighs 1.
    """

    def reward(counts: dict[str, int], own: Terms) -> float:
        weights = own if isinstance(own, Mapping) else dict.fromkeys(own, 1.0)
        return min(1.0, max(0.0, 1.0 - math.fsum(weights[term] for term in counts)))

    return _rewards(completions, terms, reward)
