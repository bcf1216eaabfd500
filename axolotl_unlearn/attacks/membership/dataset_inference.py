"""LLM Dataset Inference: was a *set* of texts learned? Many weak scores, one test.

arXiv 2406.06443 and its released code: features of each text, outliers clipped, standardised, a
linear classifier learned on half of the texts, a t-test of its outputs on the other half. The code
clips and standardises each set by its own values, held-out half included. Here the half that is
learned from decides both, so the other half stays untouched and the test stays one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from scipy.special import stdtr
from scipy.stats import ttest_ind

from axolotl_unlearn.attacks.registry import Array, Outcome, Target, attack
from axolotl_unlearn.data.documents import Answer
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import area_of, auc, composed, mean_of
from axolotl_unlearn.metrics.memorisation import TokenFacts, compressed_bytes, loss

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
#: Share of the texts beyond each of the two ends that outliers are clipped to.
CLIPPED = 0.025
#: Fewer documents of a kind are no test.
LEAST = 10


def features(facts: TokenFacts, text: str, cased: TokenFacts, shuffled: TokenFacts) -> list[float]:
    """``[F]`` of one text: perplexity, means of the lowest and highest shares of token losses,
    loss / bytes after zlib, ratio and difference of the loss to that of each changed text."""
    losses = np.sort(-facts.logp)
    mean = loss(facts)
    found = [np.exp(min(mean, 50.0)), mean / compressed_bytes(text)]
    for share in SHARES:
        count = max(1, int(share * len(losses)))
        found += [losses[:count].mean(), losses[-count:].mean()]
    for other in (cased, shuffled):
        found += [mean / max(loss(other), 1e-6), mean - loss(other)]
    return [float(value) for value in found]


def halves(
    documents: Sequence[Hashable], others: Sequence[Hashable], rng: np.random.Generator
) -> list[Array]:
    """Which texts of each side are learned from: those of a random half, rounded down, of the
    documents (or authors) of one side, of the other, and of both."""
    sides, chosen = [dict.fromkeys(documents), dict.fromkeys(others)], set()
    both = [name for name in sides[0] if name in sides[1]]
    alone = [[name for name in side if name not in {*both}] for side in sides]
    for names in (*alone, both):
        chosen |= {names[i] for i in rng.permutation(len(names))[: len(names) // 2]}
    return [np.array([name in chosen for name in side]) for side in (documents, others)]


def judge(
    members: Array,
    nonmembers: Array,
    documents: Sequence[Hashable],
    others: Sequence[Hashable],
    seed: int = 0,
) -> Outcome:
    """Welch's one-sided t-test of the held-out halves, a document's mean output as one value; what
    is on both sides (an author) is a pair."""
    from sklearn.linear_model import LogisticRegression

    if min(len(set(side)) for side in (documents, others)) < LEAST:
        raise UnlearnError(
            f"this attack needs {LEAST} documents of each kind.", code="attack.few-documents"
        )
    rng = np.random.default_rng(seed)
    learned = halves(documents, others, rng)
    kept = [np.flatnonzero(~half) for half in learned]
    names = [[side[i] for i in k] for side, k in zip((documents, others), kept, strict=True)]
    inside, outside = members[learned[0]], nonmembers[learned[1]]
    both = np.concatenate([inside, outside])
    low, high = np.quantile(both, [CLIPPED, 1 - CLIPPED], axis=0)
    both = both.clip(low, high)
    centre, spread = both.mean(0), both.std(0)

    def scaled(values: Array) -> Array:
        return (values.clip(low, high) - centre) / np.where(spread > 1e-9, spread, np.inf)

    labels = np.repeat([1, 0], [len(inside), len(outside)])
    line = LogisticRegression(max_iter=1000, class_weight="balanced").fit(scaled(both), labels)
    sides = zip((members, nonmembers), kept, strict=True)
    told = [line.decision_function(scaled(side[k])) for side, k in sides]
    means = [
        [
            np.mean([v for v, n in zip(values, side, strict=True) if n == name])
            for name in dict.fromkeys(side)
        ]
        for values, side in zip(told, names, strict=True)
    ]
    if set(names[0]) & set(names[1]):
        each = zip(means, names, strict=True)
        first, second = (mean_of(values, [*dict.fromkeys(side)]) for values, side in each)
        gap = composed(first.value - second.value, [(1.0, first), (-1.0, second)])
        p = float(stdtr(gap.df, -gap.value / gap.error)) if gap.error else 1.0
    else:
        p = float(ttest_ind(*means, equal_var=False, alternative="greater").pvalue)
    bounds = area_of(*told, tuple(names)).interval()
    return Outcome(*told, auc(*told), *bounds, p if np.isfinite(p) else 1.0)


@attack(
    "dataset_inference",
    "label log-probs",
    "3 forwards",
    "arXiv 2406.06443, with 2 of its 6 perturbations; logistic regression is scikit-learn's",
    judge=judge,
)
def look(target: Target, texts: Sequence[str]) -> Array:
    rng = np.random.default_rng(target.seed)
    # Read after the prompt of the text, too.
    changed = [
        [Answer(change(text, rng), getattr(text, "prompt", "")) for text in texts]
        for change in (_cased, _dropped)
    ]
    rows = zip(target.facts(texts), texts, *map(target.facts, changed), strict=True)
    return np.array([features(facts, str(text), *others) for facts, text, *others in rows])


def _cased(text: str, rng: np.random.Generator) -> str:
    """A quarter of the characters in the other case (`change_char_case`, prob .25)."""
    flips = rng.random(len(text)) < 0.25
    return "".join(c.swapcase() if flip else c for c, flip in zip(text, flips, strict=True))


def _dropped(text: str, rng: np.random.Generator) -> str:
    """A quarter of the words left out, never all (`random_deletion`, prob .25)."""
    words = text.split()
    away = rng.random(len(words)) < 0.25
    kept = [word for word, gone in zip(words, away, strict=True) if not gone]
    return " ".join(kept if len(kept) > 1 else words)
