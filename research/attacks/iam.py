"""IAM: where a model's loss lies between that of a text that was fitted and one that was not.

arXiv 2506.06112, for language models with one shadow model (released code, function `ip_ppl`).

Shape letters: T texts, A steps of the interpolation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import gumbel_r

from axolotl_unlearn.attacks.registry import Array, Target, attack
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import loss

STEPS = 1000
#: Of the method of moments, as in the released code.
EULER = 0.5772


def bounded_gumbel(nll: ArrayLike) -> Array:
    """``r = -log(0.1 - log(1e-5 + 1 - exp(-nll)))``: rises with the loss, bounded at both ends."""
    return -np.log(0.1 - np.log(1e-5 + 1 - np.exp(-np.asarray(nll, float))))


def completeness(nll: ArrayLike, fitted: float, unseen: ArrayLike, steps: int = STEPS) -> Array:
    """``[T]`` scores in 0 to 1, high = rather a member.

    For ``a`` from 0 to 1 the loss of a text is taken as Gumbel with the mean
    ``r_fitted + a (r_unseen - r_fitted)`` and the standard deviation of these means over the texts;
    the score is ``1 - sum_k a_{k+1} F_k(r) / sum_k a_{k+1}``.

    Args:
        nll, unseen: ``[T]`` mean NLL under the model and under one that never saw the texts.
        fitted: Mean NLL of texts that a model was trained on.
    """
    ours, fit, other = bounded_gumbel(nll), bounded_gumbel(fitted), bounded_gumbel(unseen)
    a = np.linspace(0, 1, steps)
    means = fit + (other - fit) * a[:-1, None]  # [A - 1, T]
    beta = np.sqrt(6) * (means.std(1, keepdims=True) + 1e-9) / np.pi
    # Where nothing varies, a distance in units of beta overflows: 0 or 1 all the same.
    with np.errstate(over="ignore"):
        below = gumbel_r.cdf(ours, means - beta * EULER, beta)
    return 1 - a[1:] @ below / a[1:].sum()


@attack(
    "iam",
    "label log-probs",
    "1 forward of model and control",
    "arXiv 2506.06112; `fitted` from the control's loss of retain rows, which it was trained on",
    control=True,
)
def iam(target: Target, texts: Sequence[str]) -> Array:
    if not target.retained:
        raise UnlearnError("this attack needs texts that the control knows: add retain.jsonl.")
    control = target.against()
    fitted = float(np.mean([loss(facts) for facts in control.facts(target.retained)]))
    ours = [loss(facts) for facts in target.facts(texts)]
    return completeness(ours, fitted, [loss(facts) for facts in control.facts(texts)])
