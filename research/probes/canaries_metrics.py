"""Is a model as if it had never seen what it forgot? A certificate from planted pairs of documents.

Two documents of one kind are made and a coin decides which of them is planted in the training and
the forget set; the other, its twin, is never trained. If nothing is left of the planted one, an
attack that ranks the two is right in half of the pairs, whatever the texts look like: the coin
makes it so, no comparison of distributions is needed. Pairs are read in the order in which they
were made, one by one; all error rates hold however often one looks and whenever one stops
(Ville's inequality; testing by betting: Shafer 2021, arXiv 1903.06991; bounded means: Waudby-Smith
and Ramdas, arXiv 2010.09686).

Shape letters: P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from axolotl_unlearn.metrics.intervals import LEVEL
from axolotl_unlearn.metrics.membership import MARGIN

#: Bets against "half of the pairs", averaged: on too many and on too few.
STAKES = np.concatenate([-np.linspace(0.05, 1.9, 38), np.linspace(0.05, 1.9, 38)])


@dataclass(frozen=True)
class Certificate:
    """What the pairs show.

    Attributes:
        answer: "told" (the planted documents can be told from their twins), "certified" (every
            attack is right in a share of pairs within ``margin`` of one half), or "open".
        needed: Number of pairs after which the answer stood; None while it is open.
        pairs: Number of pairs there are.
        shares: By attack, the share of pairs in which the planted document looks more like a
            member; 1/2 is ideal, above: still known, below: pushed away.
        told: Evidence against one half, all attacks together; 1 / alpha and more is enough.
        within: By attack, evidence that the share is within the margin (the weaker end); the same.
        margin, alpha: Largest distance from one half that is certified; error rate.
    """

    answer: str
    needed: int | None
    pairs: int
    shares: dict[str, float]
    told: float
    within: dict[str, float]
    margin: float
    alpha: float


def certify(
    planted: Mapping[str, ArrayLike],
    twins: Mapping[str, ArrayLike],
    *,
    margin: float = MARGIN,
    alpha: float = 1 - LEVEL,
) -> Certificate:
    """Two-sided sequential test over pairs.

    A model that is as if it had never seen the planted documents is told with probability at most
    ``alpha``; one for which some attack's share is ``margin`` or more away from one half is
    certified with probability at most ``alpha``. Where both are reached, "told" is the answer.

    Args:
        planted, twins: Scores by attack ``[P]``, high = rather a member, in the order of the pairs.

    Raises:
        ValueError: No pair, no attack, or a margin outside (0, .5).
    """
    wins = {}
    for name in planted:
        gap = np.asarray(planted[name], float) - np.asarray(twins[name], float)
        wins[name] = (np.sign(gap) + 1) / 2
    if not wins or not all(len(one) for one in wins.values()):
        raise ValueError("no pairs: give scores of planted documents and of their twins.")
    if not 0 < margin < 0.5:
        raise ValueError(f"margin is {margin}; it must lie between 0 and .5.")
    bar = -np.log(alpha)
    # The mean of bets is a bet: no correction for the number of attacks is due.
    bets = np.concatenate([_wealth(one, 0.5, STAKES) for one in wins.values()])
    against = logsumexp(bets, axis=0) - np.log(len(bets))
    within = {name: _inside(one, margin) for name, one in wins.items()}
    told = _first(against >= bar)
    certified = _first(np.min(list(within.values()), axis=0) >= bar)
    return Certificate(
        answer="told" if told else "certified" if certified else "open",
        needed=told or certified,
        pairs=len(against),
        shares={name: float(one.mean()) for name, one in wins.items()},
        told=_evidence(against.max()),
        within={name: _evidence(path[-1]) for name, path in within.items()},
        margin=margin,
        alpha=alpha,
    )


def _wealth(wins: NDArray, mean: float, stakes: ArrayLike) -> NDArray:
    """``[stakes, P]``: log capital of gamblers who bet on wins above ``mean``, starting from 1.

    A fair or losing game as long as the mean is at most ``mean`` (a negative stake: at least).
    """
    return np.cumsum(np.log1p(np.atleast_1d(stakes)[:, None] * (wins - mean)), axis=1)


def _inside(wins: NDArray, margin: float) -> NDArray:
    """``[P]``: running best of the weaker of the bets against both ends of the margin, logarithms.

    The stake at an end is the one whose capital is the likelihood ratio of one half to that end,
    which grows fastest if one half is true (Kelly).
    """
    stake = margin / ((0.5 + margin) * (0.5 - margin))
    ends = (_wealth(wins, 0.5 + margin, -stake)[0], _wealth(wins, 0.5 - margin, stake)[0])
    return np.minimum(*(np.maximum.accumulate(end) for end in ends))


def _first(flags: NDArray[np.bool_]) -> int | None:
    return int(flags.argmax()) + 1 if flags.any() else None


def _evidence(logarithm: float) -> float:
    return float(np.exp(min(logarithm, 700.0)))
