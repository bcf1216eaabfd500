"""The attacks of `axolotl-unlearn eval`, which see the log-probabilities of a text's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from axolotl_unlearn.attacks.registry import Array, Target, attack
from axolotl_unlearn.metrics.membership import attack_scores

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
