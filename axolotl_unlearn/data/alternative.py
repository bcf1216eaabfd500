"""Dataset type for other answers to forget rows: ``type: axolotl_unlearn.data.alternative``."""

from axolotl_unlearn.data import loader

load = loader("alternative")
