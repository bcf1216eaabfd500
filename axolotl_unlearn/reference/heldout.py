"""Where forget documents stand among documents that the model never saw, and the way there.

A linear membership attack on features of a text lives from the difference d of the two means in
the features' own spread S: ``d' S^-1 d``, the squared Mahalanobis distance. The last features of
all forget documents are kept, so that d is known at every step, and not that of a batch alone.
Where features outnumber rows, S is their own variances alone.

Shape letters: R rows, T time, N rows of a group, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.device import exact_dtype
from axolotl_unlearn.engine.batch import Batch, to_device
from axolotl_unlearn.engine.needs import ForwardResult
from axolotl_unlearn.reference.base import row_keys

#: Ridge in units of a feature's variance: many features are nearly a sum of others.
RIDGE = 0.3

#: Kind and task of a row.
Group = tuple[int, int]


def of_all(groups: list[Group], keys: list[bytes], rows: Tensor) -> Iterator[tuple]:
    """Group, key and features of the rows of all processes, by rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield from zip(groups, keys, rows, strict=True)
        return
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, (groups, keys, rows.cpu()))
    for *named, values in of_ranks:
        yield from zip(*named, values.to(rows.device), strict=True)


class HeldoutDistribution:
    """What `feature_matching` and its kin compare with, in the place of a model.

    Args:
        correlated: Whether S is a covariance; else the variances, over the number of features.
        least: Forget rows below which nothing is drawn anywhere.

    Before the first `look`, and in groups that it did not hold, nothing is drawn anywhere.
    """

    def __init__(self, correlated: bool = True, least: int = 1) -> None:
        self.correlated, self.least = correlated, least
        self.seen: dict[Group, dict[bytes, Tensor]] = {}
        self.centres: dict[Group, Tensor] = {}
        self.scale = self.inverse = torch.empty(0)

    def look(
        self,
        forget: Mapping[Group, Mapping[bytes, Tensor]],
        heldout: Mapping[Group, Tensor],
    ) -> None:
        """Take in how all rows stand under the policy.

        Args:
            forget: Group -> `row_keys` -> features ``[F]``; heldout: group -> ``[N, F]``.
        """
        if sum(map(len, forget.values())) < self.least:
            return
        self.seen = {group: dict(rows) for group, rows in forget.items()}
        self.centres = {group: x.mean(0) for group, x in heldout.items()}
        unseen = torch.cat([x - x.mean(0) for x in heldout.values()])
        spread = unseen.std(0, correction=0)
        self.scale = torch.where(spread > 1e-9, spread, torch.inf)
        if not self.correlated:
            return
        own = [torch.stack([*rows.values()]) for rows in self.seen.values()]
        apart = torch.cat([unseen, *(x - x.mean(0) for x in own)]) / self.scale
        covariance = apart.T @ apart / len(apart)
        self.inverse = torch.linalg.inv(covariance + RIDGE * torch.eye(len(covariance)).to(apart))

    def direction(self, group: Group) -> Tensor:
        """``S^-1 d`` of a group, ``[F]``."""
        apart = torch.stack([*self.seen[group].values()]).mean(0) - self.centres[group]
        apart = apart / self.scale
        drawn = self.inverse @ apart if self.correlated else apart / len(apart)
        return drawn / self.scale

    def look_up(
        self, model: Any, unwrapped: Any, batch: Mapping[str, Tensor], needs: Any
    ) -> ForwardResult:
        """Like that of a reference; its ``pull`` takes in the rows' features."""
        nothing = torch.zeros(batch["labels"].shape, device=batch["labels"].device)
        return ForwardResult(nothing, pull=partial(self._pull, Batch.of(batch)))

    def _pull(self, batch: Batch, rows: NDArray, features: Tensor) -> Tensor:
        """``(centre, direction)`` of rows of a batch, ``[2, R, F]``; all processes come here, also
        those without such rows, and take in what the others have, but for an evaluation's."""
        kinds, tasks = (batch.on_host(name)[rows].tolist() for name in ("kind", "task"))
        groups = list(zip(kinds, tasks, strict=True))
        keys = [key for row, key in enumerate(row_keys(batch)) if row in rows]
        self._be_on(features.device)
        own = features.detach().to(exact_dtype(features.device))
        for group, key, values in of_all(groups, keys, own) if torch.is_grad_enabled() else ():
            if group in self.seen:
                self.seen[group][key] = values
        if not groups:
            return features.new_zeros(2, *features.shape)
        pulls = {
            group: (self.centres[group], self.direction(group))
            if group in self.seen
            else (torch.zeros_like(own[0]),) * 2
            for group in set(groups)
        }
        return torch.stack([torch.stack([*pulls[g]]) for g in groups], 1).to(features)

    def _be_on(self, device: torch.device) -> None:
        """What is known goes to the policy's device once after each look, so that no step waits."""
        if self.scale.device == device:
            return

        def there(values: Tensor) -> Tensor:
            return to_device(values.cpu().to(exact_dtype(device)).numpy(), device)

        for group, known in self.seen.items():
            rows = there(torch.stack([*known.values()])).unbind()
            self.seen[group] = dict(zip(known, rows, strict=True))
        self.centres = {group: there(centre) for group, centre in self.centres.items()}
        self.scale, self.inverse = there(self.scale), there(self.inverse)
