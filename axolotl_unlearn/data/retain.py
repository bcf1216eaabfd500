"""Dataset type for rows to keep: ``type: axolotl_unlearn.data.retain``."""

from axolotl_unlearn.data import loader

load = loader("retain")
