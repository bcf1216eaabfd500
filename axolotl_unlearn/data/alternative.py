"""Dataset type for other answers to forget rows: ``type: axolotl_unlearn.data.alternative``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axolotl_unlearn.data.strategy import RecordStrategy


def load(tokenizer: Any, cfg: Any, ds_cfg: Any = None) -> RecordStrategy:
    """Called by Axolotl; see `axolotl_unlearn.data.strategy.load_strategy`."""
    from axolotl_unlearn.data.strategy import load_strategy

    return load_strategy("alternative", tokenizer, cfg, ds_cfg)
