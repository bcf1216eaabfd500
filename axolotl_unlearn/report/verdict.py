"""Moved: see `axolotl_unlearn.metrics.verdict`."""

from axolotl_unlearn.metrics.verdict import reading_of, verdict

__all__ = ["reading_of", "verdict"]
