"""mergekit merges; here is what it does not say: whether a recipe's models belong together."""

from __future__ import annotations

#: Last names of embeddings and heads; in many models one matrix is both.
ENDS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "lm_head", "embed_out")
