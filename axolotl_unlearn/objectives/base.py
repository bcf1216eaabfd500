"""What an objective sees, and what it returns.

Objectives are pure functions of tensors. They know no Trainer, model or device, and they do not
average: they return one value per *unit* (row, token or batch) and the engine divides the sum by
the number of units in the whole optimizer step, over micro-batches and processes alike. So the
update does not depend on how a batch was cut up.

Shapes: ``row`` counts sequences, ``token`` label positions (padded), ``position`` is row x token
flattened, ``vocabulary`` the size of the vocabulary. All log-probs are natural logarithms (nats).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Unit = Literal["row", "token", "batch"]
Sees = Literal["labels", "pairs", "distributions", "hidden", "features", "profiles"]


class _Later:
    """A module that is imported where it is used: names, sides and parameters need no torch, which
    takes most of the time of ``axolotl-unlearn check``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(import_module(self.__name__), attribute)


torch, F = _Later("torch"), _Later("torch.nn.functional")


@dataclass(frozen=True)
class LabelScores:
    """Log-probs of the labels, the currency of most objectives.

    Attributes:
        logp: ``[row, token]`` float32, policy log-prob of each label; 0 where ``mask`` is False.
        mask: ``[row, token]`` bool, True at label positions.
        ref_logp: like ``logp`` for the reference model; None if the objective declared no need.
    """

    logp: Tensor
    mask: Tensor
    ref_logp: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Number of labels of each row, ``[row]``, at least 1 (so that it can divide)."""
        return self.mask.sum(-1).clamp(min=1)

    def log_ratio(self) -> Tensor:
        """log p_policy - log p_reference of each label, ``[row, token]``, 0 where masked."""
        if self.ref_logp is None:
            raise ValueError("this objective needs reference log-probs and was given none")
        return (self.logp - self.ref_logp) * self.mask


class Terms(NamedTuple):
    """Unreduced loss: one value per unit, and named extras of the same kind for the log.

    Attributes:
        values: ``[row]`` for unit "row", ``[row, token]`` for "token", scalar for "batch".
        logs: name -> tensor of the same unit (or of rows), averaged by the engine for logging.
    """

    values: Tensor
    logs: dict[str, Tensor] = {}


@dataclass(frozen=True)
class Objective:
    """A registered objective: the function, and what it declares about itself.

    Attributes:
        name: The name in the config (``objective: npo``).
        source: arXiv id and equation.
        sees: "labels" - called as ``f(LabelScores, **parameters) -> Terms``; "pairs" - called as
            ``f(LabelScores, LabelScores, **parameters) -> Terms`` with forget rows and, row by
            row, an alternative of each, and a unit is such a pair; "distributions" -
            called chunk by chunk as ``f(logp, ref_logp, labels, **parameters) -> values`` with
            ``[position, vocabulary]`` log-probs, ``[position]`` labels (-100 where there is none)
            and one value per position as result; "hidden" - called once as
            ``f(states, ref_states, **parameters) -> values`` with ``[position, hidden]`` outputs of
            the decoder layer that its parameter ``layer`` names, and one value per position;
            "features" - called once as ``f(features, centre, direction) -> Terms`` with the
            ``[row, feature]`` features of `axolotl_unlearn.metrics.learned`, and where those of
            held-out rows lie; "profiles" - the same with mean and standard deviation of a row's
            hidden states at its labels, of all layers one after the other, as its features.
        reference: Whether it needs the reference model.
        side: On which rows it makes sense.
        unit: What one value stands for, by its parameters.
        closed_form: For "distributions": values together with their gradient by the policy's
            logits, ``f(prob, logp, ref_logp, labels, *, with_gradient, **parameters)``, which may
            overwrite ``ref_logp``; without it the gradient is left to autograd.
        slope: For "labels": with these parameters a value is this constant times the log-prob of
            its label, or None; it saves a product with the head.
        level: How it reads its reference where `unlearn.level` says what unseen text is like:
            "labels" - with the labels' log-probs at that level; "distribution" - at a temperature.
        rows: "alternative" - under ``forget:``, it looks at the alternatives instead.
    """

    name: str
    function: Callable[..., Any]
    unit: Callable[[dict[str, Any]], Unit]
    source: str
    sees: Sees = "labels"
    reference: bool = False
    side: Literal["forget", "retain", "both"] = "forget"
    closed_form: Callable[..., Any] | None = None
    slope: Callable[[dict[str, Any]], float | None] | None = None
    level: Literal["labels", "distribution"] | None = None
    rows: Literal["own", "alternative"] = "own"

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its keyword arguments, which are the config's keys."""
        # Evaluated annotations: the modules postpone them.
        all_ = inspect.signature(self.function, eval_str=True).parameters
        return {key: one for key, one in all_.items() if one.kind is one.KEYWORD_ONLY}

    @property
    def against_heldout(self) -> bool:
        """Whether it compares with held-out rows, in the place of a model."""
        return self.sees in ("features", "profiles")

    def roles(self, side: str) -> tuple[str, ...]:
        """Roles of the rows it looks at as an objective of this side."""
        own = "alternative" if self.rows == "alternative" else side
        return (own, "alternative") if self.sees == "pairs" else (own,)


#: Name -> objective. The files of this folder are imported with it, other modules by
#: `unlearn.extensions`.
OBJECTIVES: dict[str, Objective] = {}


def objective(
    name: str, *, unit: Unit | Callable[[dict[str, Any]], Unit] = "row", **facts: Any
) -> Any:
    """Register a function as an `Objective` with these attributes; ``unit`` may be a constant.

    Raises:
        ValueError: Another function has the name, or nothing says where it is from.
    """
    if not facts.get("source"):
        raise ValueError(
            f"objective {name!r} has no `source=`: name an arXiv id, or say that there is none "
            "(docs/add-objective.md)"
        )

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        own = unit if callable(unit) else lambda _: unit
        known = OBJECTIVES.get(name)
        same = ("__module__", "__qualname__")  # a module that is loaded again may
        if known and any(getattr(known.function, of) != getattr(function, of) for of in same):
            raise ValueError(f"objective {name!r} is registered twice")
        OBJECTIVES[name] = Objective(name, function, own, **facts)
        return function

    return register


def token_mean(values: Tensor, scores: LabelScores) -> Tensor:
    """Mean over the labels of each row, ``[row, token] -> [row]``."""
    return (values * scores.mask).sum(-1) / scores.lengths


def batch_token_mean(values: Tensor, scores: LabelScores) -> Tensor:
    """Mean over all labels of the micro-batch, ``[row, token] -> []``."""
    return (values * scores.mask).sum() / scores.mask.sum().clamp(min=1)
