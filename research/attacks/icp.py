"""In-context probing: a hint at a text helps a model little that knows the text already.

ICP-MIA, arXiv 2512.16292: the optimisation gap (how far the loss could still fall by training) is
estimated by how far it falls when a probing context stands in front; a small gap speaks for a
member. The context here is the text itself with words masked, so no other data is needed. The
paper's code and the share of masked words were not found: mask, share and their number are ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np

from axolotl_unlearn.attacks.registry import Array, Target, attack
from axolotl_unlearn.engine.token_scoring import Query, check_length, encode_continuation
from axolotl_unlearn.metrics.memorisation import loss

MASK = "___"
SHARE = 0.5
#: Contexts a text, each with other words masked.
CONTEXTS = 2


def masked(text: str, share: float, rng: random.Random) -> str:
    """The text with that share of its words (rounded down, at least one) replaced by the mask."""
    words = list(re.finditer(r"\S+", text))
    hidden = set(rng.sample(range(len(words)), max(1, int(share * len(words)))))
    pieces = re.split(r"\S+", text)  # white space around the words
    found = [pieces[0]]
    for number, (word, gap) in enumerate(zip(words, pieces[1:], strict=True)):
        found += [MASK if number in hidden else word.group(), gap]
    return "".join(found)


def gaps(alone: Sequence[float], probed: Sequence[Sequence[float]]) -> Array:
    """``[T]`` optimisation gaps, nats a token: loss alone minus the mean loss after contexts."""
    return np.asarray(alone, float) - np.array([np.mean(one) for one in probed])


@attack(
    "icp",
    "label log-probs",
    "3 forwards, 2 of them twice as long",
    "arXiv 2512.16292, self-perturbation; mask and share are ours: its code was not found",
)
def icp(target: Target, texts: Sequence[str]) -> Array:
    rng, tokenizer = random.Random(target.seed), target.tokenizer
    asked = []
    for text in texts:
        prompt = getattr(text, "prompt", "")
        # Alone after a line break too, so that both forwards score the same tokens.
        fronts = [prompt or "\n"]
        for _ in range(CONTEXTS):
            fronts.append(f"{prompt}{masked(str(text), SHARE, rng)}\n{prompt}")
        asked += [Query.of(*encode_continuation(tokenizer, front, str(text))) for front in fronts]
    check_length(target.model, asked)
    losses = np.reshape([loss(facts) for facts in target.facts_of(asked)], (-1, 1 + CONTEXTS))
    return -gaps(losses[:, 0], losses[:, 1:])
