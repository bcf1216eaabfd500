"""Dataset type for rows to forget: ``type: axolotl_unlearn.data.forget``."""

from axolotl_unlearn.data import loader

load = loader("forget")
