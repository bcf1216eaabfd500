"""Rows of numbers on disk under the hash of what they were computed from.

A `RowStore` behaves like a dict from 16-byte keys to tensors. Values lie end to end in a data file
and are read through a memory map; an index file holds fixed records with a checksum. Each process
writes files of its own and reads everybody's, so a run may stop anywhere and go on with any number
of processes. (`axolotl_unlearn.store`, JSON in a file each, takes 30 times as long and 5 times the
space.)
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError

#: key, offset in the data file, rows, columns (0: one-dimensional), dtype number, CRC32 of the data
_RECORD = struct.Struct("<16sqqqii")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Bytes of data that must be written before the index names them again.
_FLUSH = 1 << 20


class RowStore:
    """A dict of tensors on disk.

    Args:
        folder: Made if it is not there.
        name: Files are ``<name>-<part>.bin`` and ``.index``.
        part: This process's own part.
        alone: Other parts are not read.
        limit: Bytes of data above which a value is not kept.

    Raises:
        UnlearnError: On reading a value whose checksum is wrong.
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
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.part = part
        self.alone = alone
        self.limit = limit
        self._where: dict[bytes, tuple[Path, tuple]] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._data: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self.refresh()

    def refresh(self) -> None:
        """Read all parts' indices, up to what their data files hold."""
        self.flush()
        self._maps.clear()
        parts = str(self.part) if self.alone else "*"
        for index in sorted(self.folder.glob(f"{self.name}-{parts}.index")):
            data = index.with_suffix(".bin")
            size = data.stat().st_size if data.exists() else 0
            raw = index.read_bytes()
            for start in range(0, len(raw) - _RECORD.size + 1, _RECORD.size):
                record = _RECORD.unpack_from(raw, start)
                if record[1] + _bytes(record) <= size:
                    self._where[record[0]] = (data, record)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._where)

    def __setitem__(self, key: bytes, value: Tensor) -> None:
        if key in self._where:
            return
        if self._data is None:
            self._open()
        offset = self._data.tell()
        if offset + value.numel() * value.element_size() > self.limit:
            return
        value = value.detach().contiguous()
        value = value.cpu() if value.device.type != "cpu" else value
        raw = value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        columns = value.shape[1] if value.dim() == 2 else 0
        self._data.write(raw)
        checksum = zlib.crc32(raw) & 0x7FFFFFFF
        record = (key, offset, len(value), columns, _DTYPES.index(value.dtype), checksum)
        self._where[key] = (Path(self._data.name), record)
        self._pending.append(_RECORD.pack(*record))
        self._pending_bytes += len(raw)
        if self._pending_bytes > _FLUSH:
            self.flush()

    def __getitem__(self, key: bytes) -> Tensor:
        path, record = self._where[key]
        _, offset, rows, columns, dtype, checksum = record
        stop = offset + _bytes(record)
        if path not in self._maps or len(self._maps[path]) < stop:
            self.flush()
            if path.stat().st_size == 0:
                return torch.zeros(0)
            self._maps[path] = np.memmap(path, np.uint8, mode="r")
        raw = np.array(self._maps[path][offset:stop])  # a copy: the map is read-only
        if zlib.crc32(raw) & 0x7FFFFFFF != checksum:
            raise UnlearnError(
                f"{path} is damaged; delete the folder {self.folder} and it is made again."
            )
        shape = (rows, columns) if columns else (rows,)
        return torch.from_numpy(raw).view(_DTYPES[dtype]).view(shape)

    def keep(self, count: int) -> None:
        """Forget all but the first values of this part (`alone`), on disk too."""
        self.close()
        self._where.clear()
        index = self.folder / f"{self.name}-{self.part}.index"
        raw = index.read_bytes()[: count * _RECORD.size] if index.exists() else b""
        whole = len(raw) // _RECORD.size
        index.write_bytes(raw[: whole * _RECORD.size])
        last = _RECORD.unpack_from(raw, (whole - 1) * _RECORD.size) if whole else None
        data = index.with_suffix(".bin")
        data.touch()
        with data.open("r+b") as file:
            file.truncate(last[1] + _bytes(last) if last else 0)
        self.refresh()

    def _open(self) -> None:
        """Append to this part, after cutting off what an interrupted run left half-written."""
        data = self.folder / f"{self.name}-{self.part}.bin"
        index = data.with_suffix(".index")
        for path in (data, index):
            path.touch()
        records = index.stat().st_size // _RECORD.size * _RECORD.size
        with index.open("r+b") as file:
            file.truncate(records)
        self._data = data.open("ab")
        self._index = index.open("ab")

    def flush(self) -> None:
        """Data first, then the index that names it."""
        if self._data is None:
            return
        self._data.flush()
        self._index.write(b"".join(self._pending))
        self._index.flush()
        self._pending.clear()
        self._pending_bytes = 0

    def close(self) -> None:
        """Flush and close the files; reading still works."""
        self.flush()
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        self._data = self._index = None


def _bytes(record: tuple) -> int:
    _, _, rows, columns, dtype, _ = record
    return rows * max(1, columns) * _DTYPES[dtype].itemsize
