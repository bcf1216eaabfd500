"""A classifier that learned on other models what membership looks like, asked without training.

After LT-MIA, arXiv 2604.03199: statistics of each token under the model and under one that did not
see the texts, a classifier trained over several fine-tuned models, transferred to a new one. The
paper's is a transformer over 154 numbers a token; this one is linear over 124 numbers a text, in
``transfer.json``, written by ``python -m research.studies.transfer`` from tiny models.

Shape letters: T texts, F features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from axolotl_unlearn.attacks.registry import Array, Target, attack
from axolotl_unlearn.metrics.learned import text_features
from axolotl_unlearn.metrics.memorisation import TokenFacts

WEIGHTS = Path(__file__).with_name("transfer.json")
#: Standard deviations beyond which a feature is cut.
CUT = 4.0


def features(facts: Sequence[TokenFacts], control: Sequence[TokenFacts]) -> Array:
    """``[T, F]``: `text_features` under the model, and their difference from the control's.

    Standardised over the texts that are asked, members or not, because their scale is the model's
    and the data's.
    """
    ours, theirs = (np.array([text_features(one) for one in side]) for side in (facts, control))
    values = np.concatenate([ours, ours - theirs], 1)
    spread = values.std(0)
    scaled = (values - values.mean(0)) / np.where(spread > 1e-9, spread, np.inf)
    return scaled.clip(-CUT, CUT)


@cache
def weights() -> Array:
    """``[F]``, as shipped."""
    return np.array(json.loads(WEIGHTS.read_text("utf-8"))["weights"])


@attack(
    "transfer",
    "distributions",
    "1 forward of model and control",
    "after LT-MIA, arXiv 2604.03199; linear and trained on tiny models, not its checkpoint",
    control=True,
)
def transfer(target: Target, texts: Sequence[str]) -> Array:
    control = target.against()
    return features(target.facts(texts), control.facts(texts)) @ weights()
