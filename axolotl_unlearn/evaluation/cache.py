"""Measurements by content: weights, data, task version and settings make the key. Of several
processes each has its rows, and all get all results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.device import accelerator
from axolotl_unlearn.evaluation.measurement import Measured, Settings
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.evaluation.tasks import TASK_VERSION
from axolotl_unlearn.models import ModelSpec, weights_digest
from axolotl_unlearn.store import Store

T = TypeVar("T")
R = TypeVar("R")
#: Raised when what is measured or how it is stored changes.
_CACHE_VERSION = 6


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
            from accelerate import PartialState

            # Without an accelerator it would take every process for one alone unless told so.
            state = PartialState(cpu=accelerator() is None)
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
        results: list[Any] = [None] * len(items)
        for rank, part in enumerate(self.gather(list(work(mine)) if mine else [])):
            results[rank :: self.count] = part
        return results

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


class Cache(Store):
    """Of several processes the main one reads for all and writes; only rows that are being
    generated are written by each, into a file of its own."""

    def __init__(self, folder: Path | None, workers: Workers | None = None) -> None:
        super().__init__(folder)
        self.workers = workers or Workers()

    def get(self, key: str) -> Any:
        return self.workers.first(lambda: super(Cache, self).get(key))

    def put(self, key: str, value: Any) -> None:
        if self.workers.main:
            super().put(key, value)

    def weights(self, spec: ModelSpec) -> str:
        """Digest of a model's weights, configs and tokenizer."""
        if spec.served:
            from axolotl_unlearn.evaluation.served import Served

            return self.workers.first(lambda: Served(spec.model).digest())
        return self.workers.first(lambda: weights_digest(spec))

    def key(self, weights: str, sets: EvaluationSets, settings: Settings) -> str:
        parts = [_CACHE_VERSION, TASK_VERSION, weights, sets.digest, settings.key]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def load(self, key: str, sets: EvaluationSets, settings: Settings) -> Measured | None:
        stored = self.get(key)
        if stored is None:
            return None
        measured = Measured(**stored)
        if settings.keep_texts and len(measured.texts) < len(sets.rows):
            return None  # texts are asked for now but were not stored then
        return measured

    def save(self, key: str, measured: Measured, settings: Settings) -> None:
        self.put(key, measured.stored(settings.keep_texts))
        if self.workers.main:
            for path in self.folder.glob(f"{key}*.partial*.jsonl") if self.folder else ():
                path.unlink()

    def _partials(self, key: str) -> list[Path]:
        """Rows of a model that is being measured, one JSON line each, one file a process."""
        return [] if self.folder is None else sorted(self.folder.glob(f"{key}.partial*.jsonl"))

    def rows_so_far(self, key: str, need_texts: bool) -> list[dict[str, Any]]:
        """Rows of an interrupted run, whatever number of processes it had."""

        def read() -> list[dict[str, Any]]:
            rows = [row for path in self._partials(key) for row in read_json_lines(path, cut=True)]
            return [row for row in rows if not need_texts or row.get("text") is not None]

        return self.workers.first(read)

    def add_rows(self, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}.partial{self.workers.rank or ''}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
