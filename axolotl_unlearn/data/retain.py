"""Dataset type for rows to keep: ``type: axolotl_unlearn.data.retain``."""

from functools import partial

from axolotl_unlearn.data.strategy import load_strategy

load = partial(load_strategy, "retain")
