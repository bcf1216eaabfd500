"""Attacks that see what a model says of each token: those of `axolotl-unlearn eval`, and detectors
of machine text: what a model would have written, it may have read.

arXiv 2510.19492 finds that the two tasks share their best statistic and that detectors transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from axolotl_unlearn.attacks.registry import Array, Target, attack
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.membership import attack_scores
from axolotl_unlearn.metrics.memorisation import TokenFacts


def binoculars(performer: torch.Tensor, observer: torch.Tensor, labels: torch.Tensor) -> float:
    """Perplexity over cross-perplexity, both as logarithms; *low* = machine text.

    ``mean_t -log q_t(y_t) / mean_t -sum_v p_t(v) log q_t(v)``, q the performer, p the observer
    (arXiv 2401.12070, equation 4, in the roles of its released code).

    Args:
        performer, observer: ``[n, V]`` log-probabilities; labels: ``[n]``.
    """
    loss = -performer.gather(1, labels[:, None]).mean()
    return float(loss / -(observer.exp() * performer).sum(-1).mean())


@attack(
    "binoculars",
    "distributions",
    "1 forward of model and control",
    "arXiv 2401.12070, as an attack 2510.19492; the control as observer is ours",
    control=True,
)
def _binoculars(target: Target, texts: Sequence[str]) -> Array:
    control = target.against()
    asked, theirs = target.queries(texts), control.queries(texts)
    if [list(q.ids) for q in asked] != [list(q.ids) for q in theirs]:
        raise UnlearnError(
            "model and control cut the texts into different tokens.", code="attack.other-tokens"
        )
    found = []
    for query in asked:
        own, other = target.distributions(query), control.distributions(query)
        if own.shape != other.shape:
            raise UnlearnError(
                "model and control have vocabularies of different sizes.",
                code="attack.other-vocabulary",
            )
        labels = torch.tensor(list(query.targets), device=own.device)
        found.append(-binoculars(own, other.to(own.device), labels))
    return np.array(found)


def curvature(facts: TokenFacts) -> float:
    """Conditional probability curvature; *high* = machine text.

    ``(sum_t log p(y_t) - sum_t mean_t) / sqrt(sum_t sd_t^2)``, mean and standard deviation of
    ``log p(v)`` for v drawn from the model itself (Fast-DetectGPT in its analytic form, arXiv
    2310.05130, equation 4 with equal sampling and scoring model). 0 where the model is certain
    everywhere.
    """
    spread = float(np.sqrt((facts.sd**2).sum()))
    gap = float((facts.logp - facts.mean).sum())
    return gap / spread if spread > 1e-6 else 0.0


@attack(
    "fast_detectgpt",
    "distributions",
    "1 forward",
    "arXiv 2310.05130, as an attack 2510.19492",
)
def _curvature(target: Target, texts: Sequence[str]) -> Array:
    return np.array([curvature(facts) for facts in target.facts(texts)])


SOURCES = {
    "loss": ("label log-probs", "Yeom et al., arXiv 1709.01604"),
    "zlib": ("label log-probs", "Carlini et al., arXiv 2012.07805"),
    "min_k_20": ("label log-probs", "Min-K%, arXiv 2310.16789"),
    "min_k_plus_20": ("distributions", "Min-K%++, arXiv 2404.02936"),
    "entropy": ("distributions", "Salem et al. and others, arXiv 2003.10595"),
    "reference": ("label log-probs", "Carlini et al., arXiv 2012.07805"),
}


def _look(name: str, target: Target, texts: Sequence[str]) -> Array:
    other = target.against().facts(texts) if name == "reference" else None
    return attack_scores(target.facts(texts), texts, other)[name]


for _name, (_access, _source) in SOURCES.items():
    attack(_name, _access, "1 forward", _source, control=_name == "reference")(
        partial(_look, _name)
    )
