"""Dataset type for other answers to forget rows: ``type: axolotl_unlearn.data.alternative``."""

from functools import partial

from axolotl_unlearn.data.strategy import load_strategy

load = partial(load_strategy, "alternative")
