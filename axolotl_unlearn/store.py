"""Results under the hash of what they follow from: the one store of a job.

A key is made of content (weights, data, settings, versions), never of names, places or the order
of calls. So a result is found again by whoever asks the same, and nobody else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write

#: Whose version can change a result of a command.
PACKAGES = ("axolotl-unlearn", "axolotl", "torch", "transformers", "peft", "mergekit", "lm_eval")


def content_key(*facts: Any) -> str:
    """Hash of JSON-like facts; keys of mappings in any order."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def versions() -> dict[str, str]:
    """Versions of the installed packages that results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def digest(path: Path) -> str:
    """SHA-256 of a file. Raises OSError: It is a pipe or a device, which would be read for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _digest_at(path: Path, size: int, changed: int) -> str:
    return digest(path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read once a process as long as it does not change."""
    stat = path.stat()
    return _digest_at(path, stat.st_size, stat.st_mtime_ns)


def sealed(value: Any) -> str:
    """A JSON value as a line with its checksum in front: what is damaged later is not believed."""
    text = json.dumps(value)
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def unsealed(line: str) -> Any:
    """The value of a line of `sealed`; None of any other line."""
    checksum, _, text = line.rstrip("\n").partition(" ")
    return json.loads(text) if checksum == f"{zlib.crc32(text.encode()):08x}" else None


class Store:
    """JSON values on disk, one file a key; many processes may share the folder.

    Args:
        folder: None stores nothing and knows nothing.
    """

    def __init__(self, folder: Path | str | None) -> None:
        self.folder = None if folder is None else Path(folder)

    def get(self, key: str) -> Any:
        """The value, or None where it is not known (or its file was damaged)."""
        path = self.folder and self.folder / f"{key}.json"
        return unsealed(path.read_text("utf-8", "replace")) if path and path.is_file() else None

    def put(self, key: str, value: Any) -> None:
        """Whole or not at all: a killed run leaves no half file."""
        if self.folder is not None:
            write(self.folder / f"{key}.json", sealed(value), private=True)
