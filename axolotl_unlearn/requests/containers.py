"""Every text in a file, whatever holds it: JSON, tables, archives in archives, git, UTF-16, base64.

What a file is says its content, and its name only where the content does not. What cannot be read
as text (weights, pictures, encrypted archives) is named, so that nobody takes it for searched.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import html
import io
import lzma
import os
import re
import subprocess
import tarfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from axolotl_unlearn.data.near import strings

Decode = Callable[[list[list[int]]], list[str]]

#: By the end of its name: its numbers are no text.
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".pkl"}
_CLOSED = {".7z": "archives (7z)", ".rar": "archives (rar)", ".pdf": "PDF"}
_ARCHIVES = set(".zip .tar .tgz .gz .bz2 .xz .zst .docx .xlsx .jar .epub".split())
_MEDIA = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"OggS", b"fLaC")
_MAGIC = dict.fromkeys(_MEDIA, "pictures and sound") | {
    b"7z\xbc\xaf": "archives (7z)",
    b"Rar!": "archives (rar)",
    b"%PDF": "PDF",
}
_GZIP, _ZIP, _ZSTD = b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"
_COMPRESSED = {_GZIP: gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
#: Text is read in parts of this many characters, which overlap by some words.
_PART, _OVERLAP = 2**22, 2**12
#: Archives within archives; deeper ones are named.
_DEEPEST = 4
#: Backslashes of JSON within JSON double.
_ESCAPE = re.compile(r"((?:\\+u[0-9a-fA-F]{4})+)|\\+[nrt\"/\\]")
_TAG = re.compile(r"<[^<>]{1,2000}>")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
#: 32 bytes at least; lines of e-mails and PEM are 64 or 76 characters.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{40,}[\r\n]{0,2}){1,}[A-Za-z0-9+/_-]*={0,2}")


def texts_of(path: Path, decode: Decode | None, unread: set[str]) -> Iterator[str]:
    """The texts of a file, in parts.

    Args:
        decode: Lists of token ids to texts.
        unread: Gets the kinds of what is in there and cannot be searched.

    Raises:
        OSError, ValueError, EOFError: It is damaged, or token ids have no tokenizer.
    """
    if path.suffix in WEIGHTS:
        unread.add("weights")
        if path.suffix == ".safetensors":  # what stands before them
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                yield from forms(file.read(min(size, 2**27)).decode("utf-8", "replace"))
        return
    with path.open("rb") as file:
        try:
            yield from _stream(file, path.name, decode, unread, 0)
        except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(str(error)) from None


def _stream(
    file: IO[bytes], name: str, decode: Decode | None, unread: set[str], depth: int
) -> Iterator[str]:
    head = file.read(512)
    file.seek(0)
    suffix = Path(name).suffix.lower()
    closed = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    closed = closed or _CLOSED.get(suffix) or ("weights" if depth and suffix in WEIGHTS else None)
    opened = _opened(file, head)
    zipped, tarred = head.startswith(_ZIP), head[257:262] == b"ustar"
    if (opened or zipped or tarred) and depth >= _DEEPEST:
        closed = "archives within archives"
    if head.startswith(_ZSTD) and opened is None:
        closed = "archives (zstd)"
    if closed:
        unread.add(closed)
    elif opened is not None:
        with opened:
            yield from _stream(opened, Path(name).stem, decode, unread, depth + 1)
    elif zipped:  # also an office document, an e-book, a jar
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                yield member.filename
                if member.flag_bits & 1:
                    unread.add("encrypted archives")
                elif not member.is_dir():
                    with archive.open(member) as inner:
                        yield from _stream(inner, member.filename, decode, unread, depth + 1)
    elif tarred:
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                yield member.name
                if member.isfile():
                    inner = archive.extractfile(member)
                    yield from _stream(inner, member.name, decode, unread, depth + 1)
            file.seek(archive.offset)  # it takes a damaged member for the end
            if any(part.strip(b"\0") for part in iter(lambda: file.read(2**20), b"")):
                unread.add("parts of damaged archives")
    elif head.startswith(b"PAR1") or suffix == ".parquet":
        yield from _tables(file, decode, parquet=True)
    elif head.startswith(b"ARROW1") or suffix in (".arrow", ".feather"):
        yield from _tables(file, decode)
    else:
        if suffix in _ARCHIVES:
            unread.add("archives of an unknown kind")
        yield from _text(file, _encoding(head))


def _opened(file: IO[bytes], head: bytes) -> IO[bytes] | None:
    """What one compressed stream holds; its head is looked at, so it can go back."""
    for magic, open_ in _COMPRESSED.items():
        if head.startswith(magic):
            return open_(file)
    if not head.startswith(_ZSTD):
        return None
    try:
        import zstandard
    except ImportError:
        return None
    copy = SpooledTemporaryFile(2**26)
    zstandard.ZstdDecompressor().copy_stream(file, copy)
    copy.seek(0)
    return copy


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


def _text(file: IO[bytes], encoding: str) -> Iterator[str]:
    reader = io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="")
    rest = ""
    while part := reader.read(_PART):
        text = rest + part
        yield from forms(text)
        rest = text[-_OVERLAP:]  # a window may go across the end of a part
    reader.detach()  # whoever opened the file closes it


def forms(text: str) -> Iterator[str]:
    """A text, and what it may stand for: escapes, entities, without tags, out of base64."""

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
    for run in _BASE64.finditer(plain):
        yield from _out_of_base64(run[0])


def _out_of_base64(run: str) -> Iterator[str]:
    letters = re.sub(r"[\r\n=]", "", run).replace("-", "+").replace("_", "/")
    for start in range(4):  # where a part of the file begins within it
        cut = letters[start:]
        content = base64.b64decode(cut + "A" * (-len(cut) % 4))  # zeros at the end
        if content.startswith(_GZIP):
            with suppress(zlib.error):
                content = zlib.decompressobj(31).decompress(content)
        yield content.decode(_encoding(content[:512]), "replace")


# --- tables --------------------------------------------------------------------------------------


def _tables(file: IO[bytes], decode: Decode | None, *, parquet: bool = False) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if parquet:
        batches = pq.ParquetFile(file).iter_batches()
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
                for text in strings(column.to_pylist()):
                    yield from forms(text)


# --- git -----------------------------------------------------------------------------------------


def is_git(folder: Path) -> bool:
    """A repository's own folder: ``.git``, or a bare one."""
    return (folder / "objects").is_dir() and (folder / "HEAD").is_file()


def git_texts(folder: Path, unread: set[str]) -> Iterator[str]:
    """Every object that a repository holds, on a branch or not: files of all commits, messages."""
    command = ["git", "-c", "safe.directory=*", f"--git-dir={folder}", "cat-file"]
    command += ["--batch-all-objects", "--batch", "--unordered"]
    own = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=nowhere, env=own)
    except OSError:
        unread.add("git repositories (`git` is missing)")
        return
    with process:
        try:
            while header := process.stdout.readline().split():
                content = process.stdout.read(int(header[2]))
                process.stdout.read(1)
                if header[1] != b"tree":
                    yield from _stream(io.BytesIO(content), "", None, unread, 1)
            if process.wait():
                unread.add("git repositories that `git` cannot read")
        except (ValueError, IndexError, OSError, EOFError, zlib.error):
            unread.add("git objects")
        finally:  # the caller may have had enough
            process.kill()
