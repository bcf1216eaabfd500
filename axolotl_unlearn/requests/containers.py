"""Every text in a file that can be read without running or unpacking anything: text in UTF-8, 16 or
32, JSON, HTML and links, parquet, arrow, one level of gzip or zip.

What a file is says its content, and its name only where the content does not. Everything else
(weights, pictures, archives in archives, base64) is named, so that nobody takes it for searched.
No reader here runs code of a file, and none reads more than `EXPANDS` times its size.
"""

from __future__ import annotations

import gzip
import html
import io
import re
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from axolotl_unlearn.data.near import strings

Decode = Callable[[list[list[int]]], list[str]]

#: By the end of its name: its numbers are no text.
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".pkl"}
#: How a file begins, or its name ends, that is not looked into.
_CLOSED = {
    **dict.fromkeys(
        (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"OggS", b"fLaC"), "pictures and sound"
    ),
    **dict.fromkeys((b"7z\xbc\xaf", ".7z"), "archives (7z)"),
    **dict.fromkeys((b"Rar!", ".rar"), "archives (rar)"),
    **dict.fromkeys((b"BZh", ".bz2"), "archives (bz2)"),
    **dict.fromkeys((b"\xfd7zXZ\x00", ".xz"), "archives (xz)"),
    **dict.fromkeys((b"\x28\xb5\x2f\xfd", ".zst"), "archives (zstd)"),
    **dict.fromkeys((".tar", ".tgz"), "archives (tar)"),
    **dict.fromkeys((b"%PDF", ".pdf"), "PDF"),
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "pickles"),
    **dict.fromkeys(WEIGHTS, "weights"),
}
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
#: What is packed may be so many times as large as its file (and `_FREE` bytes more); a zip has a
#: list of members of so many bytes at most.
EXPANDS, _FREE, _MEMBERS = 100, 2**26, 2**24
#: Text is read in parts of this many characters, which overlap by some words.
_PART, _OVERLAP = 2**22, 2**12
#: Rows of a table at a time.
_ROWS = 256
#: Backslashes of JSON within JSON double.
_ESCAPE = re.compile(r"((?:\\+u[0-9a-fA-F]{4})+)|\\+[nrt\"/\\]")
_TAG = re.compile(r"<[^<>]{1,2000}>")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{60,76}\r?\n){2}|[A-Za-z0-9+/_-]{200}")


def texts_of(path: Path, decode: Decode | None, unread: set[str]) -> Iterator[str]:
    """The texts of a file, in parts.

    Args:
        decode: Lists of token ids to texts.
        unread: Gets the kinds of what is in there and cannot be searched.

    Raises:
        OSError, ValueError, EOFError: It is damaged, or token ids have no tokenizer.
    """
    with path.open("rb") as file:
        if path.suffix == ".safetensors":  # what stands before the numbers
            size = int.from_bytes(file.read(8), "little")
            yield from forms(file.read(min(size, _FREE)).decode("utf-8", "replace"))
            file.seek(0)
        budget = _Budget(EXPANDS * path.stat().st_size + _FREE, unread)
        try:
            yield from _stream(file, path.name, decode, unread, budget)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
            raise ValueError(str(error)) from None


class _Budget:
    """How many bytes may still come out of what is packed."""

    def __init__(self, left: int, unread: set[str]) -> None:
        self.left, self.unread = left, unread

    def take(self, count: int) -> bool:
        self.left -= count
        if self.left < 0:
            self.unread.add(f"parts that unpack to over {EXPANDS} times their file")
        return self.left >= 0


class _Bounded(io.RawIOBase):
    """What a packed stream gives, until the budget is spent; then it ends."""

    def __init__(self, file: IO[bytes], budget: _Budget) -> None:
        self.file, self.budget = file, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        content = self.file.read(min(len(buffer), 2**16))
        if not self.budget.take(len(content)):
            return 0
        buffer[: len(content)] = content
        return len(content)


def _stream(
    file: io.BufferedReader, name: str, decode: Decode | None, unread: set[str], budget: _Budget,
    packed: bool = False,
) -> Iterator[str]:  # fmt: skip
    head, suffix = file.peek(512)[:512], Path(name).suffix.lower()
    closed = next((kind for magic, kind in _CLOSED.items()
                   if isinstance(magic, bytes) and head.startswith(magic)), None)  # fmt: skip
    closed = (
        closed or _CLOSED.get(suffix) or ("archives (tar)" if head[257:262] == b"ustar" else "")
    )
    table = head.startswith((b"PAR1", b"ARROW1")) or suffix in (".parquet", ".arrow", ".feather")
    if packed and (table or head.startswith((_GZIP, _ZIP))):
        closed = closed or "archives and tables within archives"
    if closed:
        unread.add(closed)
        return
    if table:
        parquet = head.startswith(b"PAR1") or suffix == ".parquet"
        for text in _tables(file, decode, parquet=parquet):
            if not budget.take(len(text)):
                return
            yield from forms(text)
    elif head.startswith(_GZIP):
        with gzip.open(file) as inner:
            inside = io.BufferedReader(_Bounded(inner, budget))
            yield from _stream(inside, Path(name).stem, decode, unread, budget, packed=True)
    elif head.startswith(_ZIP):  # also an office document, an e-book, a jar
        yield from _members(file, decode, unread, budget)
    else:
        if suffix in (".zip", ".gz"):
            unread.add("archives of an unknown kind")
        encoding = _encoding(head)
        if encoding == "utf-8" and b"\0" in head:
            unread.add("binary files")  # of which the text is searched
        yield from _text(file, encoding, unread)


def _members(
    file: IO[bytes], decode: Decode | None, unread: set[str], budget: _Budget
) -> Iterator[str]:
    """Of a zip whose list of members is short enough to be read."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 2**16 - 22))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or int.from_bytes(tail[at + 12 : at + 16], "little") > _MEMBERS:
        unread.add("archives that are cut off or have very many members")
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            yield member.filename
            if member.flag_bits & 1:
                unread.add("encrypted archives")
            elif not member.is_dir():
                with archive.open(member) as inner:
                    inside = io.BufferedReader(_Bounded(inner, budget))
                    yield from _stream(inside, member.filename, decode, unread, budget, packed=True)
            if budget.left < 0:
                return


def _encoding(head: bytes) -> str:
    """UTF-8 unless it is UTF-16 or UTF-32, with or without their mark."""
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    half = max(1, len(head) // 2)
    for name, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if len(head) > 8 and zeros.count(0) > 0.4 * half and head.count(0) < 0.6 * len(head):
            return name
    return "utf-8"


def _text(file: io.BufferedReader, encoding: str, unread: set[str]) -> Iterator[str]:
    reader = io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="")
    rest = ""
    while part := reader.read(_PART):
        text = rest + part
        yield from forms(text)
        if _BASE64.search(text):
            unread.add("encoded text (base64)")
        rest = text[-_OVERLAP:]  # a window may go across the end of a part
    reader.detach()  # whoever opened the file closes it


def forms(text: str) -> Iterator[str]:
    """A text, and what it may stand for: escapes, entities, without tags, of a link."""

    def characters(escape: re.Match[str]) -> str:  # of a run of \uXXXX: two may be one character
        units = bytes.fromhex(re.sub(r"\\+u", "", escape[1] or ""))
        return units.decode("utf-16-be", "replace") or " "

    plain = _ESCAPE.sub(characters, text)
    if "&" in plain:
        plain = html.unescape(plain)
    yield plain
    if "<" in plain and (bare := _TAG.sub("", plain)) != plain:
        yield bare  # a word may be cut by a tag
        yield _TAG.sub(" ", plain)
    if "%" in plain and _PERCENT.search(plain):
        yield urllib.parse.unquote_plus(plain)


def _tables(file: IO[bytes], decode: Decode | None, *, parquet: bool) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if parquet:
        batches = pq.ParquetFile(file).iter_batches(batch_size=_ROWS)
    else:
        try:
            batches = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            file.seek(0)
            whole = pa.ipc.open_file(file)
            batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
    for batch in batches:
        for name in batch.schema.names:
            column = batch.column(name)
            if name.endswith("input_ids") or name in ("prompt_ids", "chosen_ids", "rejected_ids"):
                if decode is None:
                    raise ValueError("token ids and no tokenizer")
                yield from decode([ids for ids in column.to_pylist() if ids])
            elif "string" in str(column.type):  # of lists, structs and dictionaries too
                yield from strings(column.to_pylist())
