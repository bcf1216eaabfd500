"""Which rows a forget row meets, and in which order: a pure function of the seed.

Both sets are endless streams of shuffled passes: slot k of a set of n rows is entry ``k mod n`` of
the permutation drawn for (seed, set, ``k div n``). The item with global index
``g = epoch * len(pairs) + position`` takes slot g of the forget stream and the slots
``g*r ... g*r + r-1`` of the retain stream, r being ``retain_per_forget``. So every row of a set is
used equally often (up to the pass that is under way), also when the larger set needs several
epochs, and an item can be made anew after a restart, on any process, without any state.

An alternative comes with its own forget row; of several, pass c over the forget rows takes number
``c mod k``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from axolotl_unlearn.columns import NOBODYS, PAIR, ROLES
from axolotl_unlearn.data.overlap import COLUMNS, matched
from axolotl_unlearn.errors import UnlearnError

FORGET, RETAIN = ROLES["forget"], ROLES["retain"]

#: Index of a pair that is no objective's: it fills the last batches of an epoch, so that all
#: processes have as many, and no row is repeated.
FILLER = -1


@lru_cache(maxsize=8)
def _permutation(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


class PairedDataset(Dataset):
    """Pairs of one merged dataset whose column ``role`` tells forget (0) from retain (1) rows.

    Args:
        rows: Dataset with the columns of `axolotl_unlearn.data.strategy`.
        seed: Fixes all permutations.
        retain_per_forget: Retain rows in each pair; 0 for objectives that need none. An epoch is
            one pass over the forget rows, and the retain stream goes on in the next one.
        shuffle: False for evaluation: both sets in file order, the same pairs in every epoch. Each
            row of the larger set comes once and all rows of the smaller one equally often, with
            more than one row of a side in a pair where their numbers ask for it.
        alternatives: Whether each forget row comes with one of its alternatives.

    Raises:
        UnlearnError: No role column, no forget rows, no retain rows although pairs need them, or
            alternatives and forget rows that do not match.
    """

    #: Axolotl's data loader asks every dataset for it; items here are pairs, not columns.
    column_names = None

    def __init__(
        self,
        rows: Any,
        *,
        seed: int = 0,
        retain_per_forget: int = 1,
        shuffle: bool = True,
        alternatives: bool = False,
    ) -> None:
        for column in ("role", PAIR)[: 1 + alternatives]:
            if column not in rows.column_names:
                raise UnlearnError(
                    f"the dataset has no column {column!r}; use the types of axolotl_unlearn.data "
                    "in `datasets:` and an empty dataset_prepared_path.",
                    code="data.foreign-columns",
                )
        self.rows = rows
        self.seed = seed
        self.retain_per_forget = retain_per_forget
        self.shuffle = shuffle
        self.epoch = 0
        roles = np.asarray(rows["role"][:])
        self.forget_rows = np.flatnonzero(roles == FORGET)
        self.retain_rows = np.flatnonzero(roles == RETAIN)
        if not len(self.forget_rows):
            raise UnlearnError(
                "there are no forget rows; add a dataset with `type: axolotl_unlearn.data.forget`.",
                code="data.no-forget-rows",
            )
        if retain_per_forget and not len(self.retain_rows):
            raise UnlearnError(
                "there are no retain rows although each forget row is paired with "
                f"{retain_per_forget}; add a dataset with `type: axolotl_unlearn.data.retain`.",
                code="data.no-retain-rows",
            )
        self.alternatives: dict[int, list[int]] = {}
        if alternatives:
            self.alternatives = matched({name: rows[name][:] for name in COLUMNS})
        self._length = len(self.forget_rows) if shuffle else self._even_length()

    def __len__(self) -> int:
        """Pairs in one epoch."""
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Kept here as well as in the sampler, because accelerate finds either one or the other.

        After a resume on several processes it wraps the sampler three deep and no longer reaches
        it, but calls the dataset's ``set_epoch``.
        """
        self.epoch = int(epoch)

    def _even_length(self) -> int:
        """Pairs in which either set is spread evenly: a multiple of the smaller set's size."""
        forget, retain = len(self.forget_rows), len(self.retain_rows)
        if not self.retain_per_forget:
            return forget
        if retain < forget:
            return retain * (forget // retain)
        return forget * max(1, retain // (forget * self.retain_per_forget))

    def indices(self, index: int) -> tuple[list[int], list[int]]:
        """Row numbers (forget, retain) of the pair with this global index."""
        if self.shuffle:
            ratio = self.retain_per_forget
            slots = range(index * ratio, (index + 1) * ratio)
            return [self._slot(FORGET, index)], [self._slot(RETAIN, slot) for slot in slots]
        retain = self.retain_rows if self.retain_per_forget else self.retain_rows[:0]
        place = index % len(self)
        return self._share(self.forget_rows, place), self._share(retain, place)

    def _share(self, members: np.ndarray, place: int) -> list[int]:
        """The rows of a set that the evaluation pair at ``place`` has."""
        if len(members) < len(self):  # `len(self)` is a multiple of it
            return [int(row) for row in members[place % max(1, len(members)) :][:1]]
        first, last = (p * len(members) // len(self) for p in (place, place + 1))
        return members[first:last].tolist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Rows by role; ``index`` is global (epoch * len + position), or `FILLER`."""
        if index == FILLER:
            return {"forget": [{**self.rows[0], "role": NOBODYS}]}
        forget, retain = self.indices(int(index))
        chosen = {"forget": forget, "retain": retain}
        if self.alternatives:
            chosen["alternative"] = self._answers(forget, int(index))
        return {role: [self.rows[row] for row in members] for role, members in chosen.items()}

    def _answers(self, forget: Sequence[int], index: int) -> list[int]:
        """The alternative of each of these forget rows in the pair with this index."""
        turn = index // len(self.forget_rows) if self.shuffle else 0
        known = (self.alternatives[row] for row in forget)
        return [several[turn % len(several)] for several in known]

    def _slot(self, role: int, slot: int) -> int:
        members = self.forget_rows if role == FORGET else self.retain_rows
        cycle, place = divmod(slot, len(members))
        return int(members[_permutation(len(members), self.seed, role, cycle)[place]])


class PairSampler(Sampler[int]):
    """The global indices of the dataset's epoch, in ascending order: the pairs are shuffled."""

    def __init__(self, pairs: PairedDataset, together: int = 1) -> None:
        """``together``: pairs of a forward of all processes; `FILLER` completes the last one."""
        self.pairs, self.together = pairs, together

    def set_epoch(self, epoch: int) -> None:
        self.pairs.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.pairs) // self.together) * self.together

    def __iter__(self) -> Iterator[int]:
        # The epoch as it is now: a DataLoader that prefetches must not move to the next one.
        start = self.pairs.epoch * len(self.pairs)
        lacking = [FILLER] * (len(self) - len(self.pairs))
        return iter([*range(start, start + len(self.pairs)), *lacking])
