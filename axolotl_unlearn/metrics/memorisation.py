"""How well a model knows a text: pure functions of per-token facts and of texts.

All come from one forward (`axolotl_unlearn.engine.token_scoring`). Unless said otherwise a higher
value means "known better". Conventions are listed in docs/metrics.md.

Shape letter: n scored tokens of one text.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TokenFacts:
    """What one forward tells about the scored tokens of a text.

    Attributes:
        logp: ``[n]`` log-probability of each token, nats.
        greedy: ``[n]`` whether the token is the arg max.
        mean, sd: ``[n]`` mean and standard deviation of ``log p(v)`` over the vocabulary, v drawn
            from the model's distribution.
    """

    logp: Array
    greedy: NDArray[np.bool_]
    mean: Array
    sd: Array

    @classmethod
    def from_columns(cls, columns: np.ndarray) -> TokenFacts:
        """From ``[n, 4]``."""
        values = np.asarray(columns, dtype=np.float64)
        return cls(values[:, 0], values[:, 1] == 1, values[:, 2], values[:, 3])

    def __len__(self) -> int:
        return len(self.logp)

    def __getitem__(self, part: slice) -> TokenFacts:
        """The facts of some of the tokens."""
        return TokenFacts(self.logp[part], self.greedy[part], self.mean[part], self.sd[part])


def loss(facts: TokenFacts) -> float:
    """Mean cross-entropy, nats a token; *lower* means known better (the official attack)."""
    return float(-facts.logp.mean())


def probability(facts: TokenFacts) -> float:
    """``p ** (1/n)``: geometric mean of the tokens' probabilities (TOFU, arXiv 2401.06121)."""
    return math.exp(facts.logp.mean())


def exact_memorisation(facts: TokenFacts) -> float:
    """Share of tokens that are the arg max given the true tokens before (arXiv 2205.10770)."""
    return float(facts.greedy.mean())


def longest_run(facts: TokenFacts) -> int:
    """Tokens in a row that are each the arg max given the true tokens before."""
    return max((len([*run]) for known, run in groupby(facts.greedy.tolist()) if known), default=0)


def extraction_strength(facts: TokenFacts, floor: str = "zero") -> float:
    """1 - (shortest prefix of the answer after which greedy decoding gives all the rest) / n.

    Carlini et al., arXiv 2012.07805; arXiv 2406.09179. Teacher-forced equals free decoding here.

    Args:
        floor: What nothing known gives: "zero", or "one_over_n" (OpenUnlearning).
    """
    n = len(facts)
    wrong = np.flatnonzero(~facts.greedy)
    prefix = int(wrong[-1]) + 1 if len(wrong) else 0
    if floor == "one_over_n":
        prefix = min(prefix, n - 1)
    elif floor != "zero":
        raise ValueError(f"floor must be 'zero' or 'one_over_n', not {floor!r}")
    return 1 - prefix / n


def _lowest(values: Array, k: float) -> float:
    """Mean of the lowest share `k` of the values, at least one of them."""
    if not 0 < k <= 1:
        raise ValueError(f"k is a share of the tokens, 0 < k <= 1, not {k}")
    count = max(1, int(k * len(values)))
    return float(np.partition(values, count - 1)[:count].mean())


def min_k(facts: TokenFacts, k: float = 0.2) -> float:
    """Min-K%: mean of the lowest share `k` of log-probabilities (arXiv 2310.16789)."""
    return _lowest(facts.logp, k)


def min_k_plus(facts: TokenFacts, k: float = 0.2) -> float:
    """Min-K%++: the same of ``(log p - mean) / sd`` over the vocabulary (arXiv 2404.02936).

    Where the model is certain (sd under 1e-6) it is 0 if the token is the one it is certain of.
    """
    return _lowest(standardised(facts), k)


def standardised(facts: TokenFacts) -> Array:
    """``[n]`` ``(log p - mean) / sd`` over the vocabulary; see `min_k_plus`."""
    gap = facts.logp - facts.mean
    flat = facts.sd < 1e-6
    return np.where(
        flat, np.where(facts.greedy, 0.0, gap / 1e-6), gap / np.where(flat, 1, facts.sd)
    )


def entropy(facts: TokenFacts) -> float:
    """Mean entropy over the vocabulary, nats a token; *lower* means known better (2003.10595)."""
    return -float(facts.mean.mean())


def zlib_ratio(facts: TokenFacts, text: str) -> float:
    """Mean loss / bytes after zlib; *lower* means known better (arXiv 2012.07805)."""
    return loss(facts) / compressed_bytes(text)


def compressed_bytes(text: str) -> int:
    """Length after zlib at its default level, as in arXiv 2012.07805."""
    return len(zlib.compress(text.encode("utf-8", errors="replace")))


def reference_difference(facts: TokenFacts, reference: TokenFacts) -> float:
    """Loss - loss under a reference model; *lower* means known better (arXiv 2012.07805)."""
    return loss(facts) - loss(reference)
