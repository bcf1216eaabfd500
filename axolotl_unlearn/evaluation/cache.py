"""Measurements by content: weights, data, task version and settings make the key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.evaluation.measurement import Measured, Settings
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.evaluation.tasks import TASK_VERSION
from axolotl_unlearn.evaluation.workers import Workers
from axolotl_unlearn.models import ModelSpec, weights_digest
from axolotl_unlearn.store import Store

#: Raised when what is measured or how it is stored changes.
_CACHE_VERSION = 4


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
        found = Measured(**stored)
        if settings.keep_texts and len(found.texts) < len(sets.rows):
            return None  # texts are asked for now but were not stored then
        return found

    def save(self, key: str, found: Measured, settings: Settings) -> None:
        self.put(key, found.stored(settings.keep_texts))
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
