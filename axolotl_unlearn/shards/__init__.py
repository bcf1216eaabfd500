"""Routed shards: people by keyed hash in shards, and a router to the shard that knows them."""

from __future__ import annotations

from pathlib import Path

#: The router of a routed folder, which makes it one.
NAME = "adapter_router.safetensors"


def is_routed(folder: Path | str) -> bool:
    """Whether a folder holds adapters of shards and their router."""
    return (Path(folder) / NAME).is_file()
