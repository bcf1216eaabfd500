"""Which files still hold deleted texts? Windows of eight words, found in text and in Arrow tables.

A prepared data set holds no text but token ids, so those are decoded. Weights, compressed archives
and pictures cannot be searched this way; they are counted, so that nobody takes them for clean.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.near import strings
from axolotl_unlearn.normal_form import normal_form

#: Words of a window: eight in a row are hardly ever the same by chance.
WINDOW = 8
#: A shorter text is searched whole; below this many words it would be found everywhere.
SHORTEST = 4
#: Scripts without spaces: each character is a word.
_WORD = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
    "|[^\\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
_ESCAPE = re.compile(r"((?:\\u[0-9a-fA-F]{4})+)|\\[nrt\"/\\]")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".pkl"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".zst", ".xz", ".bz2", ".7z", ".png", ".jpg", ".pdf"}
_TABLES = {".arrow", ".parquet", ".feather"}
#: Never looked into: nothing in there is read by a training run.
_SKIPPED_NAMES = {".git", ".venv", "venv", "node_modules", "__pycache__"}
#: Text is read in parts of this many characters, which overlap by some words.
_PART = 2**22
_KEYS = 64


def words(text: str) -> list[str]:
    """Letters and digits in their normal form; punctuation, spaces and line ends do not count."""
    return _WORD.findall(normal_form(text))


@dataclass(frozen=True)
class Texts:
    """What to look for.

    Attributes:
        windows: Windows of the deleted texts that no kept text has.
        sizes: Their lengths.
        keys: A word of each window; a text without any of them has no window. Empty where they
            are too many to look for one by one.
        too_short: Deleted texts of fewer than `SHORTEST` words, for which nothing is searched.
    """

    windows: frozenset[tuple[str, ...]]
    sizes: tuple[int, ...]
    keys: tuple[str, ...] = ()
    too_short: int = 0

    @classmethod
    def of(cls, deleted: Iterable[str], kept: Iterable[str] = ()) -> Texts:
        """
        Args:
            kept: Texts that stay, such as a system prompt: their windows say nothing.
        """
        windows: set[tuple[str, ...]] = set()
        too_short = 0
        for text in set(deleted):
            found = words(text)
            if len(found) < SHORTEST:
                too_short += bool(found)
                continue
            windows.update(_windows(found, min(WINDOW, len(found))))
        sizes = tuple(sorted({len(window) for window in windows}))
        for text in set(kept):
            found = words(text)
            for size in sizes:
                windows.difference_update(_windows(found, size))
        sizes = tuple(sorted({len(window) for window in windows}))
        keys = tuple({max(window, key=len) for window in windows})
        return cls(frozenset(windows), sizes, keys if len(keys) <= _KEYS else (), too_short)

    def among(self, text: str) -> set[tuple[str, ...]]:
        """The windows that a text has."""
        if self.keys:
            folded = normal_form(text)
            if not any(key in folded for key in self.keys):
                return set()
        found = words(text)
        return {w for size in self.sizes for w in _windows(found, size) if w in self.windows}


def _windows(found: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(found[i:] for i in range(size)), strict=False)


@dataclass
class Found:
    """Where deleted texts are left.

    Attributes:
        left: Path to number of windows.
        files, searched_bytes: How much was searched.
        unsearched: Files of weights, archives and pictures.
        unreadable: Files that could not be read.
    """

    left: dict[Path, int] = field(default_factory=dict)
    files: int = 0
    searched_bytes: int = 0
    unsearched: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)


def search(
    places: Iterable[Path],
    texts: Texts,
    decode: Callable[[list[list[int]]], list[str]] | None = None,
    skip: Iterable[Path] = (),
) -> Found:
    """Look into every file below the places.

    Args:
        decode: Lists of token ids to texts; without it prepared data sets cannot be searched.
        skip: Folders and files that are not looked into.
    """
    found = Found()
    skipped = {path.resolve() for path in skip}
    seen: set[Path] = set()
    for path in _files(places, skipped):
        real = path.resolve()
        if real in seen:
            continue
        seen.add(real)
        searched = path.suffix not in _WEIGHTS | _ARCHIVES
        if not searched:
            found.unsearched.append(path)
            if path.suffix != ".safetensors":
                continue
        try:
            windows: set[tuple[str, ...]] = set()
            for text in _texts(path, decode):
                windows |= texts.among(text)
                if len(windows) == len(texts.windows):
                    break
            found.files += searched
            found.searched_bytes += path.stat().st_size * searched
        except (OSError, ValueError, EOFError):
            found.unreadable.append(path)
            continue
        if windows:
            found.left[path] = len(windows)
    return found


def _files(places: Iterable[Path], skipped: set[Path]) -> Iterator[Path]:
    for place in places:
        if place.resolve() in skipped or place.name in _SKIPPED_NAMES:
            continue
        if place.is_dir() and not place.is_symlink():
            yield from _files(sorted(place.iterdir()), skipped)
        elif place.is_file():
            yield place


def _texts(path: Path, decode: Callable[[list[list[int]]], list[str]] | None) -> Iterator[str]:
    if path.suffix in _TABLES:
        yield from _table_texts(path, decode)
        return
    if path.suffix == ".safetensors":  # what stands before the weights
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            yield _plain(file.read(min(size, 2**27)).decode("utf-8", "replace"))
        return
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        rest = ""
        while part := file.read(_PART):
            text = rest + part
            yield _plain(text)
            # A window may go across the end of a part.
            rest = text[-40 * WINDOW :]


def _plain(text: str) -> str:
    """JSON's escapes as the characters that they stand for; other text is hardly changed."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda m: _characters(m[1]) if m[1] else " ", text)


def _characters(escapes: str) -> str:
    """Of a run of ``\\uXXXX``: two may be one character."""
    units = bytes.fromhex(escapes.replace("\\u", ""))
    return units.decode("utf-16-be", "replace")


def _table_texts(
    path: Path, decode: Callable[[list[list[int]]], list[str]] | None
) -> Iterator[str]:
    for batch in _batches(path):
        for name in batch.schema.names:
            column = batch.column(name)
            if name in ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids") or (
                name.endswith("input_ids")
            ):
                if decode is None:
                    raise ValueError("token ids and no tokenizer")
                yield from decode([ids for ids in column.to_pylist() if ids])
            elif _has_text(column.type):
                yield from strings(column.to_pylist())


def _has_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    return any(_has_text(kind.field(i).type) for i in range(kind.num_fields))


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        yield from pq.ParquetFile(path).iter_batches()
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(source)
            yield from (file.get_batch(i) for i in range(file.num_record_batches))
            return
        yield from reader


def row_texts(path: Path) -> list[str]:
    """Every text of a file of JSON lines with a field ``row``, as a request keeps them."""
    found: list[str] = []
    if path.is_file():
        for line in path.read_text("utf-8").split("\n"):
            if line.strip():
                row = json.loads(line)
                found += strings(row.get("row", row))
    return found
