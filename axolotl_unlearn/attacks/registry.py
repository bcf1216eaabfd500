"""One protocol for attacks that ask whether a text was learned, and their registry.

An attack is a function of a model and texts. It gives one number a text (high = rather a member),
or features of a text from which a classifier learns, and says what it has to see of the model. The
files of `attacks.membership` are in the registry, and those of modules that are imported before
(`axolotl-unlearn attack membership --extension`).

Shape letters: N members, M non-members, T = N + M texts, F features, n tokens, V vocabulary, B
permutations.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.attacks import membership as files
from axolotl_unlearn.engine.token_scoring import Query, check_length, score_queries, text_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import LEVEL
from axolotl_unlearn.metrics.learned import FEATURES, MIN_TEXTS, PENALTY, learned_attack
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
                "`--control`.",
                code="attack.no-control",
            )
        return self.control


@dataclass(frozen=True)
class Outcome:
    """What an attack tells of two sets of texts: scores of those it was judged by (high = rather a
    member), their AUC and its 95 % interval, p of "members and non-members are exchangeable";
    ``null`` ``[B]``: the AUC of each permutation of the labels, where p comes from them."""

    members: Array
    nonmembers: Array
    auc: float
    low: float
    high: float
    p: float
    null: Array | None = None


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

    @property
    def inside(self) -> bool:
        """Whether it needs the weights: `attack inside` makes it, else `attack membership`."""
        return self.access in ("hidden states", "gradients")

    def __str__(self) -> str:
        often = "" if self.default else " (if named)"
        return f"{self.name}{often}: sees {self.access}; {self.cost}; {self.source}"


REGISTRY: dict[str, Attack] = {}


def attack(name: str, access: Access, cost: str, source: str, **more: Any) -> Callable:
    """Register a function as an attack; fields of `Attack`."""

    def decorate(look: Callable) -> Callable:
        if name in REGISTRY:
            raise UnlearnError(
                f"there is an attack {name!r} already; give yours another name.",
                code="attack.twice",
            )
        REGISTRY[name] = Attack(name, access, cost, source, look, **more)
        return look

    return decorate


def attacks(extensions: Sequence[str] = ()) -> dict[str, Attack]:
    """The registry, by what an attack has to see.

    Args:
        extensions: Modules with more attacks.

    Raises:
        UnlearnError: A module cannot be imported.
    """
    for found in pkgutil.iter_modules(files.__path__, f"{files.__name__}."):
        import_module(found.name)
    for name in extensions:
        try:
            import_module(name)
        except ImportError as error:
            raise UnlearnError(
                f"--extension {name}: {error}; write a point between package and module, and put "
                "the folder of the first on Python's path, as with PYTHONPATH=.",
                code="attack.no-extension",
            ) from error
    order = get_args(Access)
    return dict(sorted(REGISTRY.items(), key=lambda item: order.index(item[1].access)))


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

    Raises:
        UnlearnError: Nothing can be learned, or no permutation exchanges documents.
    """
    # As many features as there are; those on token scores count as they do.
    penalty = PENALTY * max(1.0, members.shape[1] / FEATURES)
    found = learned_attack(members, nonmembers, documents, others, penalty=penalty, seed=seed)
    if found is None:
        raise UnlearnError(
            f"fewer than {MIN_TEXTS} texts of a kind to learn from: add rows.",
            code="attack.few-texts",
        )
    if found.p is None:
        raise UnlearnError(
            "no document of member.jsonl has as many rows as one of nonmember.jsonl, so chance "
            "cannot exchange them: give both one row a document.",
            code="attack.no-exchange",
        )
    ends = found.auc - (np.quantile(found.null, [(1 + LEVEL) / 2, (1 - LEVEL) / 2]) - 0.5)
    low, high = (float(end) for end in ends.clip(0, 1))
    return Outcome(found.members, found.nonmembers, found.auc, low, high, found.p, found.null)
