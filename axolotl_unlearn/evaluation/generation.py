"""What a model wrote, whoever made it write: transformers, vLLM or a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """What a model wrote.

    Attributes:
        text: decoded without special tokens.
        tokens: number of new tokens, the end-of-sequence token included.
        stopped: whether it ended by itself, before the limit.
    """

    text: str
    tokens: int
    stopped: bool


OnBatch = Callable[[list[int], list[Generation]], None]
