"""One protocol for attacks that ask whether a text was learned, and their registry.

An attack is a function of a model and texts. It gives one number a text (high = rather a member),
or features of a text from which a classifier learns, and says what it has to see of the model.

Shape letters: N members, M non-members, T = N + M texts, F features, n tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.attacks.inside import told_by
from axolotl_unlearn.engine.token_scoring import Query, check_length, score_queries, text_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import LEVEL, Clusters, auc, auc_interval
from axolotl_unlearn.metrics.membership import rank_test
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.models import input_device

#: What an attacker has to see of a model, from least to most.
Access = Literal["text", "label log-probs", "distributions", "hidden states", "gradients"]
Array = NDArray[np.float64]


@dataclass
class Target:
    """A model under attack (in evaluation mode), with what several attacks ask of it; ``control``
    never saw the members, both were trained on the ``retained`` texts; ``seed``: of all draws."""

    model: Any
    tokenizer: Any
    control: Target | None = None
    retained: Sequence[str] = ()
    seed: int = 0
    _known: dict[tuple, TokenFacts] = field(default_factory=dict, repr=False)

    def queries(self, texts: Sequence[str]) -> list[Query]:
        """The tokens of each text and which of them are scored; no text is too long."""
        asked = text_queries(self.tokenizer, texts)
        check_length(self.model, asked)
        return asked

    def facts(self, texts: Sequence[str]) -> list[TokenFacts]:
        """Token facts of each text, computed once."""
        return self.facts_of(self.queries(texts))

    def facts_of(self, asked: Sequence[Query]) -> list[TokenFacts]:
        keys = [(tuple(q.ids), tuple(q.times), tuple(q.targets)) for q in asked]
        new = {key: q for key, q in zip(keys, asked, strict=True) if key not in self._known}
        self._known |= zip(new, score_queries(self.model, list(new.values())), strict=True)
        return [self._known[key] for key in keys]

    @torch.no_grad()
    def distributions(self, query: Query) -> Tensor:
        """``[n, V]`` float32 log-probabilities at the positions that predict the scored tokens."""
        ids = torch.tensor([list(query.ids)], device=input_device(self.model))
        logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits[list(query.times)].float().log_softmax(-1)

    def against(self) -> Target:
        """The control.

        Raises:
            UnlearnError: there is none.
        """
        if self.control is None:
            raise UnlearnError(
                "this attack compares with a model that never saw the members; give it with "
                "`--control`."
            )
        return self.control


@dataclass(frozen=True)
class Outcome:
    """What an attack tells of two sets of texts: scores of those it was judged by (high = rather a
    member), their AUC and its 95 % interval, p of "members and non-members are exchangeable"."""

    members: Array
    nonmembers: Array
    auc: float
    low: float
    high: float
    p: float


#: Features ``[N, F]`` and ``[M, F]`` with the document of each text, to what they tell.
Judge = Callable[[Array, Array, Sequence[Hashable], Sequence[Hashable], int], Outcome]


@dataclass(frozen=True)
class Attack:
    """An attack of the registry.

    Attributes:
        name: As `--attacks` takes it; ``default``: also made where none is named.
        access: What it sees of the model; ``control``: and of one that never saw the members.
        cost: Passes through the model a text.
        source: Paper, with what was not to be found in it.
        look: Of a target and texts ``[T]`` scores or ``[T, F]`` features.
        judge: What the features tell; None where `look` gives scores.
    """

    name: str
    access: Access
    cost: str
    source: str
    look: Callable[[Target, Sequence[str]], Array]
    judge: Judge | None = None
    control: bool = False
    default: bool = True


REGISTRY: dict[str, Attack] = {}


def attack(name: str, access: Access, cost: str, source: str, **more: Any) -> Callable:
    """Register a function as an attack; fields of `Attack`."""

    def decorate(look: Callable) -> Callable:
        if name in REGISTRY:
            raise ValueError(f"there is an attack {name!r} already")
        REGISTRY[name] = Attack(name, access, cost, source, look, **more)
        return look

    return decorate


def by_rank(members: Array, nonmembers: Array, clusters: Clusters = None) -> Outcome:
    """Scores judged by their order: two-sided rank test, interval of the AUC; both by cluster."""
    bounds = auc_interval(members, nonmembers, LEVEL, clusters)
    p = rank_test(members, nonmembers, clusters=clusters)
    return Outcome(members, nonmembers, auc(members, nonmembers), *bounds, p)


def by_learning(
    members: Array,
    nonmembers: Array,
    documents: Sequence[Hashable],
    others: Sequence[Hashable],
    seed: int = 0,
) -> Outcome:
    """Features judged by a cross-validated linear classifier (`metrics.learned`), exact p.

    Out-of-fold scores depend on each other, so DeLong's interval would be too narrow. This one is
    the AUC less what permuted labels are from .5 (basic interval): it holds .5 exactly where the
    AUC lies among 95 % of the permutations, which are skewed to below .5.
    """
    found = told_by(members, nonmembers, documents, others, seed=seed)
    ends = found.auc - (np.quantile(found.null, [(1 + LEVEL) / 2, (1 - LEVEL) / 2]) - 0.5)
    low, high = (float(end) for end in ends.clip(0, 1))
    return Outcome(found.members, found.nonmembers, found.auc, low, high, found.p)


def measure(
    one: Attack,
    target: Target,
    members: Sequence[str],
    nonmembers: Sequence[str],
    documents: Sequence[Hashable],
    others: Sequence[Hashable],
) -> Outcome:
    """One attack on one model.

    Raises:
        UnlearnError: It cannot be made here, or a score is not finite.
    """
    values = np.asarray(one.look(target, [*members, *nonmembers]), float)
    if not np.isfinite(values).all():
        raise UnlearnError("some scores are NaN or infinite; load the model with --dtype float32.")
    n = len(members)
    if one.judge is not None:
        return one.judge(values[:n], values[n:], documents, others, target.seed)
    return by_rank(values[:n], values[n:], (documents, others))
