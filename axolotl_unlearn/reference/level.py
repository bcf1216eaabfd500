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
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from axolotl_unlearn.objectives.matching import log_odds

#: Quantiles that make up a map, fewer where there are fewer held-out tokens.
KNOTS = 101

Rows = Mapping[Hashable, Sequence[Tensor]]


@dataclass(frozen=True)
class Calibration:
    """A monotone map of log-odds, linear between its knots and of slope 1 beyond them.

    Attributes:
        teacher, policy: ``[K]`` quantiles of the log-odds of the same held-out tokens.
        shift: Added to the result, in nats of log-odds.
    """

    teacher: Tensor
    policy: Tensor
    shift: float = 0.0

    @classmethod
    def fit(cls, teacher: Tensor, policy: Tensor, shift: float = 0.0) -> Calibration:
        """Map the distribution of ``teacher`` on that of ``policy``, ``[N]`` log-probs each."""
        teacher, policy = log_odds(teacher.double()), log_odds(policy.double())
        knots = torch.linspace(0, 1, max(2, min(KNOTS, len(teacher) // 2)), dtype=torch.float64)
        return cls(
            torch.quantile(teacher, knots).float(), torch.quantile(policy, knots).float(), shift
        )

    def __call__(self, logp: Tensor) -> Tensor:
        """Log-probs of the teacher to the log-probs to aim at, any shape."""
        odds = log_odds(logp)
        teacher, policy = self.teacher.to(odds), self.policy.to(odds)
        low, high = teacher[:-1], teacher[1:]
        inside = odds.clamp(low[0], high[-1])
        after = torch.searchsorted(teacher, inside.contiguous()).clamp(1, len(low))
        width = (high - low)[after - 1].clamp(min=1e-6)
        share = ((inside - low[after - 1]) / width).clamp(0, 1)
        aim = policy[after - 1].lerp(policy[after], share) + (odds - inside) + self.shift
        return F.logsigmoid(aim)


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
                torch.cat(list(teacher[group])), torch.cat(list(rows)), old.shift if old else 0.0
            )

    def correct(self, forget: Rows, heldout: Rows) -> dict[Hashable, float]:
        """Move each group's target by a share of what is left between forget and held-out rows.

        Other objectives pull at the same weights, so the policy settles where the forces balance,
        a little short of the target; this integrates that error away (an integral controller).

        Returns:
            Group -> mean log-prob of forget rows minus that of held-out rows, nats a token.
        """
        left = {}
        for group in self.maps:
            if group not in forget:
                continue
            mean = [
                torch.stack([row.mean() for row in rows[group]]).mean()
                for rows in (forget, heldout)
            ]
            left[group] = float(mean[0] - mean[1])
            old = self.maps[group]
            shift = old.shift - self.gain * left[group]
            self.maps[group] = Calibration(old.teacher, old.policy, shift)
        return left

    def aim(self, logp: Tensor, group: Hashable) -> Tensor:
        """The target of a row's labels; a group without held-out rows keeps the teacher's."""
        return self.maps[group](logp) if group in self.maps else logp
