"""Blocks of the config that ask for experimental methods: `axolotl_unlearn.config.Later`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from axolotl_unlearn.config import Strict


class RiseArgs(Strict):
    """A weight that follows how far a loss is above its level, ``scale base^gap + offset``."""

    base: float = Field(6.0, gt=1, description="by which a gap of one multiplies")
    scale: float = Field(0.3, gt=0)
    offset: float = 0.8
    least: float = Field(1.2, ge=0, description="the weight where the gap is small, or none")
    most: float = Field(2.8, gt=0, allow_inf_nan=False)

    def weight(self, gap: float) -> float:
        """That of a step whose loss was ``gap`` above the level (below: negative)."""
        exponent = min(max(gap, 0.0), 64.0)  # beyond it the bound holds anyway
        return min(max(self.scale * self.base**exponent + self.offset, self.least), self.most)


class ConstraintArgs(Strict):
    """Hold a loss below a level: its weight grows while it is above, and falls below it."""

    at_most: float | None = Field(None, description="the level, in the unit of the loss")
    of_start: float | None = Field(
        None, gt=0, description="or the level as a multiple of the loss in the first step"
    )
    of_epoch: float | None = Field(
        None, gt=0, description="or of its mean over the first epoch, in which the weight stays"
    )
    rise: RiseArgs | None = Field(
        None,
        description="in place of a multiplier: a weight that follows the gap of the step before",
    )
    step: float = Field(1.0, gt=0, description="what is added to the weight, times the distance")
    down: float = Field(1.0, ge=0, description="share of the step where the loss is below")
    penalty: float = Field(0.0, ge=0, description="further weight, times the distance above")

    @model_validator(mode="after")
    def _check(self) -> ConstraintArgs:
        levels = (self.at_most, self.of_start, self.of_epoch)
        if sum(level is not None for level in levels) != 1:
            raise ValueError("give the level as `at_most`, `of_start` or `of_epoch`")
        return self


class SaliencyArgs(Strict):
    """Train only what the forget loss depends on most."""

    share: float = Field(
        0.1, gt=0, lt=1, description="of the neurons, or weights, that are trained"
    )
    by: Literal["neuron", "weight"] = Field(
        "neuron", description="neuron: rows of a weight by their gradient's norm; weight: each"
    )


class FlattenArgs(Strict):
    """Make the loudest directions of the forget gradient as quiet as others (RepSelect)."""

    components: int = Field(512, gt=0, description="top principal components of each weight")
    how: Literal["soft", "quadratic", "hard"] = Field(
        "soft", description="divided by their singular values, by the squares, or removed"
    )
    of: Literal["forget", "retain"] = Field(
        "forget", description="whose gradient's components: forget, or retain"
    )
    side: Literal["both", "input", "output"] = Field(
        "both", description="directions of a weight's inputs, of its outputs, or both"
    )


class AttributionArgs(Strict):
    """Weigh forget rows by how little they share with the retain rows (GUARD)."""

    temperature: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="of the softmax over attributions; small ones tell rows apart more",
    )
