"""The level of text that was never seen: how a teacher's log-probs read in the policy's scale.

A teacher says which tokens of a text are hard for a model that never saw it, but it is another
model: the policy, tuned far longer, is surer of itself, where it errs too. On held-out rows, which
neither saw, both levels are known. Their quantiles give a monotone map from the teacher's log-odds
to the policy's; through it the teacher's numbers for a forget token become those that the policy
itself would give, had it not seen the text. A constant gap is the special case of equal shapes.

Rows of another kind (documents, questions) and task have other levels, hence a map for each group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from axolotl_unlearn.objectives.matching import log_odds

#: Quantiles that make up a map, fewer where there are fewer held-out tokens.
KNOTS = 101
#: Bins of equal size in which targets are corrected, and tokens a bin at least.
BINS, PER_BIN = 20, 25
#: Log-odds above which tokens count as certain (p = .99), and the largest correction.
SURE, FURTHEST = 4.6, 2.0
#: Nats a token between policy and level within which targets are corrected.
NEAR = 0.3

Rows = Mapping[Hashable, Sequence[Tensor]]


@dataclass(frozen=True)
class Calibration:
    """A monotone map of log-odds, linear between its knots and of slope 1 beyond them.

    Attributes:
        teacher, policy: ``[K]`` quantiles of the log-odds of the same held-out tokens.
        shift: ``[K]`` added to the result at each knot, in nats of log-odds.
    """

    teacher: Tensor
    policy: Tensor
    shift: Tensor

    @classmethod
    def fit(cls, teacher: Tensor, policy: Tensor, shift: Tensor | None = None) -> Calibration:
        """Map the distribution of ``teacher`` on that of ``policy``, ``[N]`` log-probs each."""
        teacher, policy = log_odds(teacher.double()), log_odds(policy.double())
        knots = torch.linspace(0, 1, max(2, min(KNOTS, len(teacher) // 2)), dtype=torch.float64)
        if shift is None:
            shift = torch.zeros(len(knots))
        return cls(
            torch.quantile(teacher, knots).float(), torch.quantile(policy, knots).float(), shift
        )

    def __call__(self, logp: Tensor) -> Tensor:
        """Log-probs of the teacher to the log-probs to aim at, any shape."""
        odds = log_odds(logp)
        teacher, policy, shift = (x.to(odds) for x in (self.teacher, self.policy, self.shift))
        low, high = teacher[:-1], teacher[1:]
        inside = odds.clamp(low[0], high[-1])
        after = torch.searchsorted(teacher, inside.contiguous()).clamp(1, len(low))
        width = (high - low)[after - 1].clamp(min=1e-6)
        share = ((inside - low[after - 1]) / width).clamp(0, 1)
        aim = (policy + shift)[after - 1].lerp((policy + shift)[after], share)
        return F.logsigmoid(aim + (odds - inside))

    def corrected(self, teacher: Tensor, policy: Tensor, gain: float) -> Calibration:
        """Targets moved by a share of what is left, quantile by quantile.

        A policy still on its way is left alone: what is added up meanwhile would carry it too far.

        Args:
            teacher, policy: ``[N]`` log-probs of the same forget tokens.
        """
        asked = replace(self, shift=torch.zeros_like(self.shift))(teacher)
        if abs(float((policy - asked).mean())) > NEAR:
            return self
        asked, found = log_odds(asked.float()).sort().values, log_odds(policy.float()).sort().values
        bins = max(1, min(BINS, len(asked) // PER_BIN))
        means = [
            torch.stack([part.mean() for part in values.tensor_split(bins)])
            for values in (asked, found, log_odds(teacher.float()).sort().values)
        ]
        left = means[1] - means[0]
        # Nobody tells .99 from .999, and the loss does not weigh it: such an error would add up.
        left[(means[0] > SURE) & (means[1] > SURE)] = 0.0
        at = np.interp(self.teacher.numpy(), means[2].numpy(), left.numpy())
        moved = self.shift - gain * torch.as_tensor(at, dtype=torch.float32)
        return replace(self, shift=moved.clamp(-FURTHEST, FURTHEST))


@dataclass
class Level:
    """The calibrations of all groups of rows, refitted while the policy moves.

    Attributes:
        maps: Group -> its calibration.
        gain: Share of the remaining gap by which a target is moved at each `correct`.
    """

    gain: float = 0.5
    maps: dict[Hashable, Calibration] = field(default_factory=dict)

    def fit(self, teacher: Rows, policy: Rows) -> None:
        """Refit from held-out rows: label log-probs by group, a tensor ``[T]`` a row."""
        for group, rows in policy.items():
            old = self.maps.get(group)
            self.maps[group] = Calibration.fit(
                torch.cat(list(teacher[group])), torch.cat(list(rows)), old and old.shift
            )

    def correct(self, teacher: Rows, policy: Rows) -> None:
        """Move each group's targets by a share of what is left between forget rows and the level.

        Other objectives pull at the same weights, so the policy settles where the forces balance,
        a little short of the target and not equally short everywhere; this integrates that error
        away (an integral controller for each quantile).

        Args:
            teacher, policy: Label log-probs of the forget rows by group, a tensor ``[T]`` a row.
        """
        for group, rows in policy.items():
            if group in self.maps:
                self.maps[group] = self.maps[group].corrected(
                    torch.cat(list(teacher[group])), torch.cat(list(rows)), self.gain
                )

    def unmoved(self, logp: Tensor, group: Hashable) -> Tensor:
        """The level itself: the target without what `correct` added."""
        old = self.maps[group]
        return replace(old, shift=torch.zeros_like(old.shift))(logp)

    def aim(self, logp: Tensor, group: Hashable) -> Tensor:
        """The target of a row's labels; a group without held-out rows keeps the teacher's."""
        return self.maps[group](logp) if group in self.maps else logp
