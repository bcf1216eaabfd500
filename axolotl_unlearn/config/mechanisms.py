"""Blocks of the config that a plain run does not have: `axolotl_unlearn.config.Later`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from axolotl_unlearn.config import Sides, Strict, UnlearnArgs
from axolotl_unlearn.objectives import OBJECTIVES


class AnnealArgs(Strict):
    """A weight that changes from its value to ``to`` over a phase (or the whole run)."""

    schedule: Literal["linear", "cosine"] = "linear"
    to: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight in the last step")


class LevelArgs(Strict):
    """Held-out rows: the level that forget rows are brought to, and when they are there."""

    heldout: str = Field(
        description="file of rows of the same kinds that the model never saw; not the ones that "
        "judge it later"
    )
    every: int | None = Field(
        None, gt=0, description="steps between two looks; default: a fifth of the run, at most 30"
    )
    rows: int = Field(
        100,
        gt=0,
        description="rows of each kind and task that a look scores on either side, at most; with "
        "per_document all",
    )
    gain: float = Field(
        0.25, ge=0, le=1, description="share of the remaining gap by which targets are moved"
    )
    settle: float = Field(
        0.25, ge=0, lt=1, description="share of the steps before targets are moved"
    )
    stop: bool = Field(
        True, description="end when no attack tells forget documents from held-out ones"
    )
    margin: float = Field(
        0.05, gt=0, lt=0.5, description="|AUC - expected| of the strongest attack"
    )
    retain: float = Field(
        0.1, ge=0, description="nats a token that the loss of retained rows may rise"
    )
    said: float = Field(
        1, ge=0, le=1, description="share of the retained rows that may no longer be said in full"
    )
    patience: int = Field(2, gt=0, description="looks in a row that must be within all three")
    per_document: bool = Field(
        False,
        description="for few documents: end only when none of them is told by itself, and take an "
        "AUC within its own sampling error for 0.5",
    )
    minutes: float | None = Field(None, gt=0, description="end after this time with the best state")
    certainty: bool = Field(
        False,
        description="set the temperature of `nckd` so that the model is as sure of forget rows as "
        "of held-out ones",
    )


class WatchArgs(Strict):
    """When the model falls apart while it trains: a warning, or the end of the run."""

    retain_nll: float | None = Field(
        None, gt=0, description="limit of the loss of retained rows, nats a token"
    )
    repetition: float | None = Field(
        None, ge=0, le=1, description="limit of the share of answers that go in circles"
    )
    every: int = Field(50, gt=0, description="steps between two looks at answers")
    rows: int = Field(8, gt=0, description="retain rows whose prompts are answered")
    tokens: int = Field(64, gt=0, description="new tokens an answer")
    then: Literal["warn", "stop"] = Field(
        "warn", description="`stop` ends the run with a checkpoint"
    )


class PhaseArgs(Sides):
    """A stretch of the run with objectives of its own; the learning rate begins anew."""

    steps: int | None = Field(None, gt=0, description="optimizer steps")
    epochs: float | None = Field(None, gt=0, description="or passes, as `pairing` counts them")
    learning_rate: float | None = Field(None, gt=0, description="default: that of the config")
    fresh_optimizer: bool = Field(
        False, description="begin without the moments of the phase before (AILS-NTUA)"
    )
    leave_out: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the retain rows, those whose loss has changed most since the start "
        "of the run, that are left out from here on (TARF)",
    )

    @model_validator(mode="after")
    def _check_phase(self) -> PhaseArgs:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give the length of the phase as `steps` or as `epochs`")
        if not self.entries():
            raise ValueError("the phase has no objective; add `forget:` or `retain:`")
        return self


def join_and_check(args: UnlearnArgs) -> None:
    """With phases, ``forget`` and ``retain`` hold the objectives of all of them.

    Raises:
        ValueError: Keys that do not go together.
    """
    if args.phases:
        if args.forget or args.retain:
            raise ValueError("give `phases`, or `forget` and `retain`, not both")
        for side in ("forget", "retain"):
            args.__dict__[side] = [e for phase in args.phases for e in getattr(phase, side)]
    if args.phases and args.phases[0].leave_out:
        raise ValueError(
            "`leave_out` looks at what the phases before have changed: not in the first phase"
        )
    for number, phase in enumerate(args.phases):
        if phase.leave_out and not any(later.retain for later in args.phases[number:]):
            raise ValueError("`leave_out` leaves out retain rows: add `retain` from there on")
    for key in ("sharpness", "saliency", "flatten"):
        if getattr(args, key) and not (args.phases or [args])[0].forget:
            raise ValueError(
                f"`{key}` looks at the forget gradient: it needs `forget` (in the first phase)"
            )
    if args.attribution and not args.retain:
        raise ValueError("`attribution` compares forget rows with retain rows: add `retain`")
    for entry in args.forget if args.attribution else ():
        known = OBJECTIVES[entry.objective]
        if known.sees != "labels" or known.unit(entry.parameters) == "batch":
            raise ValueError(
                f"`attribution` weighs the losses of single rows, and {entry.objective} is no "
                "loss of the labels of one row; take one such as ga, npo, simnpo or wga"
            )
    if args.surgery and not (args.forget and args.retain):
        raise ValueError("`surgery` joins two gradients: it needs `forget` and `retain`")
    if args.flatten and args.flatten.of == "retain":
        if any(part.forget and not part.retain for part in args.phases or [args]):
            raise ValueError(
                "`flatten: {of: retain}` looks at the retain gradient: add `retain` beside "
                "each `forget`"
            )
