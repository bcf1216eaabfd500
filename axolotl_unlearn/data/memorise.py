"""Dataset type for ordinary fine-tuning on records: ``type: axolotl_unlearn.data.memorise``.

Rows are joined as for forgetting (`unlearn.data` if the config has it, else its defaults), with a
label on every token unless `unlearn.data.labels` is given. It needs no plugin and no ``unlearn:``
block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axolotl_unlearn.data.strategy import RecordStrategy


def load(tokenizer: Any, cfg: Any, ds_cfg: Any = None) -> RecordStrategy:
    """Called by Axolotl; see `axolotl_unlearn.data.strategy.load_strategy`."""
    from axolotl_unlearn.data.strategy import load_strategy

    return load_strategy("memorise", tokenizer, cfg, ds_cfg)
