"""Dataset type for rows to forget: ``type: axolotl_unlearn.data.forget``."""

from functools import partial

from axolotl_unlearn.data.strategy import load_strategy

load = partial(load_strategy, "forget")
