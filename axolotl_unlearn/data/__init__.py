"""Records on disk, their tokens, and how forget and retain rows meet in a batch.

`records` and `checks` need nothing but the standard library (and pyarrow for parquet); the dataset
types `forget`, `retain`, `alternative` and `memorise` are what Axolotl's ``datasets: - type:``
names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def loader(role: str) -> Callable[..., Any]:
    """What Axolotl calls for a dataset type: `axolotl_unlearn.data.strategy.load_strategy`."""

    def load(tokenizer: Any, cfg: Any, ds_cfg: Any = None) -> Any:
        from axolotl_unlearn.data.strategy import load_strategy

        return load_strategy(role, tokenizer, cfg, ds_cfg)

    return load
