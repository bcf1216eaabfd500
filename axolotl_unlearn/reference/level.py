"""The level of text that was never seen: how a teacher's log-probs read in the policy's scale.

A teacher says which tokens of a text are hard for a model that never saw it, but it is another
model: the policy, tuned far longer, is surer of itself, where it errs too. On held-out rows, which
neither saw, both levels are known. Their quantiles give a monotone map from the teacher's log-odds
to the policy's; through it the teacher's numbers for a forget token become those that the policy
itself would give, had it not seen the text. A constant gap is the special case of equal shapes.

Rows of another kind (documents, questions) and task have other levels, hence maps for each group,
and for the first, middle and last labels of its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from axolotl_unlearn.objectives.matching import log_odds

#: Quantiles that make up a map, fewer where there are fewer held-out tokens.
KNOTS = 101
#: Bins of equal size in which targets are corrected, and tokens a bin at least.
BINS, PER_BIN = 20, 25
#: Log-odds above which tokens count as certain (p = .9975), and the largest correction.
SURE, FURTHEST = 6.0, 2.0
#: Parts of a row, from its first label to its last, that have maps of their own (what a model makes
#: of a text that it does not know changes along the text), and held-out tokens a part at least.
PARTS, PER_PART = 3, 500
#: Nats a token between policy and level within which targets are corrected.
NEAR = 0.3
#: The lowest temperature, and the inverse of the highest.
COLDEST = 0.2
#: Temperatures at which a teacher's certainty is known.
TEMPERATURES = np.geomspace(COLDEST, 1 / COLDEST, 33)

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
        asked, now = log_odds(asked.float()).sort().values, log_odds(policy.float()).sort().values
        bins = max(1, min(BINS, len(asked) // PER_BIN))
        means = [
            torch.stack([part.mean() for part in values.tensor_split(bins)])
            for values in (asked, now, log_odds(teacher.float()).sort().values)
        ]
        left = means[1] - means[0]
        # Nobody tells .998 from .999, and the loss hardly weighs it: such an error would add up.
        left[(means[0] > SURE) & (means[1] > SURE)] = 0.0
        at = np.interp(self.teacher.numpy(), means[2].numpy(), left.numpy())
        moved = self.shift - gain * torch.as_tensor(at, dtype=torch.float32)
        return replace(self, shift=moved.clamp(-FURTHEST, FURTHEST))


@dataclass
class Level:
    """The calibrations of all groups of rows, refitted while the policy moves.

    Attributes:
        maps: Group -> the calibrations of the parts of its rows, first to last.
        gain: Share of the remaining gap by which a target is moved at each `correct`.
        temperature: Of what the teacher says instead of a label, see `sharpen`.
    """

    gain: float = 0.25
    maps: dict[Hashable, list[Calibration]] = field(default_factory=dict)
    temperature: float = 1.0

    def fit(self, teacher: Rows, policy: Rows) -> None:
        """Refit from label log-probs by group, a tensor ``[T]`` a row.

        Args:
            teacher, policy: Of the same held-out rows; or ``teacher`` of rows that are as hard.
        """
        for group, rows in policy.items():
            old = self.maps.get(group) or []
            count = len(old) or min(_parts(rows), _parts(teacher[group]))
            pairs = zip(_split(teacher[group], count), _split(rows, count), strict=True)
            shifts = [one.shift for one in old] or [None] * count
            self.maps[group] = [
                Calibration.fit(*pair, shift) for pair, shift in zip(pairs, shifts, strict=True)
            ]

    def correct(self, teacher: Rows, policy: Rows) -> None:
        """Move each group's targets by a share of what is left between forget rows and the level.

        Other objectives pull at the same weights, so the policy settles where the forces balance,
        a little short of the target and not equally short everywhere; this integrates that error
        away (an integral controller for each quantile).

        Args:
            teacher, policy: Label log-probs of the forget rows by group, a tensor ``[T]`` a row.
        """
        for group, rows in policy.items():
            parts = self.maps.get(group, [])
            pairs = zip(_split(teacher[group], len(parts)), _split(rows, len(parts)), strict=True)
            for number, pair in enumerate(pairs):
                if len(pair[0]) == 0:  # forget rows shorter than the held-out ones
                    continue
                parts[number] = parts[number].corrected(*pair, self.gain)

    def begin(self, wanted: float, rest: NDArray) -> None:
        """The temperature at which the teacher is as sure as the policy of what neither saw.

        Args:
            wanted: Mean of ``(1 - p) H`` of the policy on held-out tokens, nats; p is the label's
                probability and H the entropy of the distribution without it.
            rest: ``[K]`` the same with the teacher's H at each of `TEMPERATURES`.
        """
        # It rises with the temperature; beyond the ends interpolation gives the ends.
        self.temperature = float(np.exp(np.interp(wanted, rest, np.log(TEMPERATURES))))

    def sharpen(self, forget: float, heldout: float) -> None:
        """Bring the policy's certainty about forget rows to that about text it never saw.

        A model of many passes is sure of itself where it errs too, the surer the longer it trains.
        A teacher that is less sure leaves it less sure of the forgotten text than of any other,
        which needs no label to be seen. The temperature follows the ratio of entropies.

        Args:
            forget, heldout: Mean entropy of the policy, nats a token.
        """
        step = min(max((heldout + 1e-3) / (forget + 1e-3), 0.5), 2.0) ** 0.5
        self.temperature = min(max(self.temperature * step, COLDEST), 1 / COLDEST)

    def unmoved(self, logp: Tensor, group: Hashable) -> Tensor:
        """The level itself: the target without what `correct` added."""
        return self._aim(
            logp, [replace(one, shift=torch.zeros_like(one.shift)) for one in self.maps[group]]
        )

    def aim(self, logp: Tensor, group: Hashable) -> Tensor:
        """The target of a row's labels; a group without held-out rows keeps the teacher's."""
        return self._aim(logp, self.maps[group]) if group in self.maps else logp

    @staticmethod
    def _aim(logp: Tensor, parts: Sequence[Calibration]) -> Tensor:
        pairs = zip(parts, logp.tensor_split(len(parts)), strict=True)
        return torch.cat([one(part) for one, part in pairs])


def entropy_without(logits: Tensor, labels: Tensor) -> Tensor:
    """Entropy of what is said besides the label, nats, at each of `TEMPERATURES`.

    Args:
        logits: ``[N, V]``; labels: ``[N]``.

    Returns:
        ``[N, K]``.
    """
    others = logits.float().scatter(1, labels[:, None], torch.finfo(torch.float32).min / 8)
    entropies = [
        torch.distributions.Categorical(logits=others / temperature).entropy()
        for temperature in TEMPERATURES.tolist()
    ]
    return torch.stack(entropies, -1)


def _parts(rows: Sequence[Tensor]) -> int:
    """As many as leave enough tokens for the last, the smallest: short rows have none there."""
    counts = range(PARTS, 1, -1)
    return next((n for n in counts if sum(len(row) // n for row in rows) >= PER_PART), 1)


def _split(rows: Sequence[Tensor], parts: int) -> list[Tensor]:
    """The tokens of each part of all rows."""
    split = [row.tensor_split(parts) for row in rows] if parts else []
    return [torch.cat(part) for part in zip(*split, strict=True)]
