"""Merging complementary unlearned models: recipes, checks, merges.

from axolotl_unlearn.merging import merge
merge(["out/over", "out/under"], "out/memorised", "out/merged", method="ties", density=0.8)
"""

from __future__ import annotations

import importlib

#: Last names of embeddings and heads; in many models one matrix is both.
ENDS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "lm_head", "embed_out")
_HOMES = {"Recipe": "recipe", "merge": "run", "open_base": "sources"}


def __getattr__(name: str):
    """Public names, imported when they are used: a command that does not merge loads no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
