"""The scores of TOFU (arXiv 2401.06121), as pure functions of numbers.

Where TOFU's released code and OpenUnlearning differ, both are here and named: the truth ratio of
the *utility* sets takes the arithmetic mean of the wrong answers' probabilities in TOFU's code and
the geometric mean in OpenUnlearning (CONVENTIONS). Forget quality takes the geometric mean in
both. A log-prob here is a mean over the tokens of an answer, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from axolotl_unlearn.metrics.semeval import harmonic_mean

Combine = Literal["geometric", "arithmetic"]
#: Mean over the wrong answers in the truth ratio of model utility.
CONVENTIONS: dict[str, Combine] = {"original": "arithmetic", "open_unlearning": "geometric"}

#: Sets and measures whose nine means model utility is made of.
UTILITY_SETS = ("retain", "real_authors", "world_facts")
UTILITY_MEASURES = ("probability", "rouge_l_recall", "truth_ratio")


def truth_ratio(right: float, wrong: Sequence[float], combine: Combine = "geometric") -> float:
    """P(wrong answers) / P(right answer), each ``p ** (1/n)`` (arXiv 2401.06121, eq. 1).

    Args:
        right: mean log-prob of the paraphrased right answer; wrong: those of the perturbed ones.
        combine: mean over the wrong answers, "geometric" (of losses) or "arithmetic" (of
            probabilities).

    Returns:
        0 to infinity; above 1 where the model prefers wrong answers.

    Raises:
        ValueError: There is no wrong answer.
    """
    if not wrong:
        raise ValueError("a truth ratio needs at least one wrong answer")
    if combine == "geometric":
        top = math.fsum(wrong) / len(wrong)
    elif combine == "arithmetic":
        largest = max(wrong)
        top = largest + math.log(math.fsum(math.exp(w - largest) for w in wrong) / len(wrong))
    else:
        raise ValueError(f"combine must be 'geometric' or 'arithmetic', not {combine!r}")
    return math.exp(min(top - right, 700.0))


def truth_ratio_score(ratio: float, side: str) -> float:
    """A truth ratio as a score: forget ``min(r, 1/r)``, otherwise ``max(0, 1 - r)``."""
    if side == "forget":
        return min(ratio, 1 / ratio) if ratio > 0 else 0.0
    return max(0.0, 1 - ratio)


def option_probability(right: float, wrong: Sequence[float]) -> float:
    """``p ** (1/n)`` of the right answer as a share of all options' (real authors, world facts)."""
    options = [right, *wrong]
    largest = max(options)
    total = math.fsum(math.exp(value - largest) for value in options)
    return math.exp(right - largest) / total


def model_utility(means: Mapping[tuple[str, str], float]) -> float | None:
    """Harmonic mean of the nine means of ``(set, measure)``; None if one of them is missing."""
    values = [means.get((s, m)) for s in UTILITY_SETS for m in UTILITY_MEASURES]
    if any(value is None or math.isnan(value) for value in values):
        return None
    return harmonic_mean(values)


def forget_quality(ratios: Sequence[float], retrained: Sequence[float]) -> tuple[float, float]:
    """Two-sample Kolmogorov-Smirnov p-value of the truth ratios against a retrained model's.

    Returns:
        p and log10 p; p < .05 says that the two models can be told apart. Published tables print
        p, its natural or its decimal logarithm, often without saying which.
    """
    from scipy.stats import ks_2samp

    p = float(ks_2samp(ratios, retrained).pvalue)
    return p, math.log10(p) if p > 0 else -math.inf
