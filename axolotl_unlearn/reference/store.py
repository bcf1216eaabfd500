"""Rows of numbers on disk under the hash of what they were computed from.

A `RowStore` behaves like a dict from 16-byte keys to tensors. Records (a head with a checksum, the
values) lie end to end in a file that is read through a memory map. Each process writes a file of
its own and reads everybody's, so a run may stop anywhere and go on with any number of processes.
What is put in between two flushes is written at once: rows that were computed together are known
together, and what is lacking is computed in the same batch again, to the same last bit.
(`axolotl_unlearn.store`, JSON in a file each, takes 30 times as long and 5 times the space.)
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator
from io import FileIO
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError

#: CRC32 of the rest, key, rows, columns (0: one-dimensional), dtype number.
_HEAD = struct.Struct("<I16sqqi")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _damaged(path: Path) -> UnlearnError:
    return UnlearnError(f"{path} is damaged; delete the folder {path.parent} and it is made again.")


def _records(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Key, start and stop of each record of a file, up to one that is half-written."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start + _HEAD.size <= size:
            file.seek(start)
            _, key, rows, columns, dtype = _HEAD.unpack(file.read(_HEAD.size))
            if min(rows, columns, dtype) < 0 or dtype >= len(_DTYPES):
                raise _damaged(path)
            stop = start + _HEAD.size + rows * max(1, columns) * _DTYPES[dtype].itemsize
            if stop > size:
                return
            yield key, start, stop
            start = stop


class RowStore:
    """A dict of tensors (on the host, without gradient) on disk.

    Args:
        folder: Made if it is not there.
        name: Files are ``<name>-<part>.bin``.
        part: This process's own part.
        alone: Other parts are not read.
        limit: Bytes of this part's file above which a value of two dimensions is not kept.

    Raises:
        UnlearnError: A head cannot be, or on reading a value its checksum is wrong.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        part: int = 0,
        *,
        alone: bool = False,
        limit: float = math.inf,
    ) -> None:
        self.path, self.limit = Path(folder) / f"{name}-{part}.bin", limit
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._read = self.path.name if alone else f"{name}-*.bin"
        self._where: dict[bytes, tuple[Path, int, int]] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._file: FileIO | None = None
        self._pending: list[bytes] = []
        self._end = 0  # of the file, once all is written
        self.refresh()

    def refresh(self) -> None:
        """Find what all parts hold."""
        self.flush()
        self._maps.clear()
        for path in sorted(self.path.parent.glob(self._read)):
            self._where |= {key: (path, *place) for key, *place in _records(path)}

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._where)

    def __setitem__(self, key: bytes, value: Tensor) -> None:
        if key in self._where:
            return
        if self._file is None:
            self._cut()
            self._file = self.path.open("ab", buffering=0)
            self._end = self._file.tell()
        value = value.contiguous()
        raw = value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        columns = value.shape[1] if value.dim() == 2 else 0
        head = _HEAD.pack(0, key, len(value), columns, _DTYPES.index(value.dtype))[4:]
        stop = self._end + _HEAD.size + len(raw)
        if stop <= self.limit or not columns:
            checksum = zlib.crc32(raw, zlib.crc32(head))
            self._pending += [checksum.to_bytes(4, "little"), head, raw]
            self._where[key] = self.path, self._end, stop
            self._end = stop

    def __getitem__(self, key: bytes) -> Tensor:
        path, start, stop = self._where[key]
        if path not in self._maps or len(self._maps[path]) < stop:
            self.flush()
            self._maps[path] = np.memmap(path, np.uint8, mode="r")
        record = np.array(self._maps[path][start:stop])  # a copy: the map is read-only
        checksum, _, rows, columns, dtype = _HEAD.unpack_from(record)
        if zlib.crc32(record[4:]) != checksum:
            raise _damaged(path)
        values = record[_HEAD.size :]
        if columns:
            values = values.reshape(rows, columns * _DTYPES[dtype].itemsize)
        return torch.from_numpy(values).view(_DTYPES[dtype])

    def keep(self, count: int) -> None:
        """Forget all but the first values of this part (`alone`), on disk too."""
        self.close()
        self._where.clear()
        self._cut(count)
        self.refresh()

    def _cut(self, count: int | None = None) -> None:
        """Cut off what an interrupted run left half-written, and all after ``count`` records."""
        self.path.touch()
        ends = [stop for _, _, stop in islice(_records(self.path), count)]
        os.truncate(self.path, ends[-1] if ends else 0)

    def flush(self) -> None:
        """Write what was put in."""
        if self._pending:
            left = memoryview(b"".join(self._pending))
            while left:
                left = left[self._file.write(left) :]
            self._pending.clear()

    def close(self) -> None:
        """Flush and close the file; reading still works."""
        self.flush()
        if self._file is not None:
            self._file.close()
        self._file = None
