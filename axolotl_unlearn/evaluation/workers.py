"""The processes of ``accelerate launch``: rows are split, every process gets all results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """This process and its siblings; one alone where nothing was launched.

    All processes run the same program and call the same methods in the same order.

    Attributes:
        rank, count: which process this is, and of how many.
        device: the one that belongs to this process; None where it is alone.
    """

    def __init__(self, alone: bool = False) -> None:
        self.rank, self.count, self.device = 0, 1, None
        if not alone and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            import torch
            from accelerate import PartialState

            # Without a GPU it would take every process for one alone unless told to use the CPU.
            state = PartialState(cpu=not torch.cuda.is_available())
            self.rank, self.count = state.process_index, state.num_processes
            self.device = str(state.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Every `count`-th item, so that each process has rows of every kind."""
        return items[self.rank :: self.count]

    def map(self, work: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
        """``work(items)``, each process on its share; all results, in order, in every process."""
        if self.count == 1:
            return list(work(items))
        mine = self.share(items)
        found: list[Any] = [None] * len(items)
        for rank, part in enumerate(self.gather(list(work(mine)) if mine else [])):
            found[rank :: self.count] = part
        return found

    def gather(self, mine: T) -> list[T]:
        """What every process has, by rank."""
        if self.count == 1:
            return [mine]
        from accelerate.utils import gather_object

        return gather_object([mine])

    def first(self, ask: Callable[[], T]) -> T:
        """The answer of the main process, which alone is asked, in every process."""
        if self.count == 1:
            return ask()
        from accelerate.utils import broadcast_object_list

        answer = [ask() if self.main else None]
        broadcast_object_list(answer)
        return answer[0]
