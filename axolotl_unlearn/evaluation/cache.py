"""Measurements by content: weights, data, settings and the code's versions make the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from axolotl_unlearn.evaluation.measurement import Measured, Settings
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.evaluation.tasks import CODE
from axolotl_unlearn.store import Store, content_key, sealed, unsealed, versions

#: Raised when what is measured or how it is stored changes.
_CACHE_VERSION = 8


class Cache(Store):
    """A folder of measurements; rows that are being generated have a file of lines of their own."""

    def key(self, weights: str, sets: EvaluationSets, settings: Settings) -> str:
        own = weights, sets.digest, settings.key
        return content_key(_CACHE_VERSION, CODE, versions(), *own)

    def load(self, key: str, sets: EvaluationSets, settings: Settings) -> Measured | None:
        stored = self.get(key)
        if stored is None:
            return None
        measured = Measured(**stored)
        each = [one["attacks"].values() for one in measured.member + measured.nonmember]
        each.append(one["logp"] for one in measured.answers)
        if not all(map(math.isfinite, chain.from_iterable(each))):
            return None  # of older code; now it is refused where it is measured
        if settings.keep_texts and len(measured.texts) < len(sets.rows):
            return None  # texts are asked for now but were not stored then
        return measured

    def save(self, key: str, measured: Measured, settings: Settings) -> None:
        self.put(key, vars(measured) | ({} if settings.keep_texts else {"texts": {}}))
        for path in self.folder.glob(f"{key}*.partial.jsonl") if self.folder else ():
            path.unlink(missing_ok=True)  # another evaluation may share the folder

    def rows_so_far(self, key: str) -> list[dict[str, Any]]:
        """Rows of an interrupted run, but for those that it wrote in part."""
        path = self.folder and self.folder / f"{key}.partial.jsonl"
        there = path.read_text("utf-8", errors="replace") if path and path.is_file() else ""
        return [*filter(None, map(unsealed, there.split("\n")))]

    def add_rows(self, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{key}.partial.jsonl"
        path.touch(0o600)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(map(sealed, rows))
