"""Which files still hold deleted texts? Windows of eight words, and short texts whole.

Read is what needs no program and no unpacking beyond one level: text in UTF-8, in UTF-16 and UTF-32
with their mark, JSON, HTML and links, parquet, arrow, gzip, zip. A file is what its content says,
and its name only where the content says nothing. The rest (weights, pictures, archives in archives,
git, base64) is counted under its name, so that nobody takes it for clean.
"""

from __future__ import annotations

import codecs
import gzip
import html
import json
import re
import urllib.parse
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.normal_form import WORD, normal_form, words

Decode = Callable[[list[list[int]]], list[str]]
Part = TypeVar("Part", bytes, str)

#: Words of a window: eight in a row are hardly ever the same by chance.
WINDOW = 8
#: Words of a text that is searched whole and hardly ever found by chance. Below that only names and
#: numbers are searched, and what they are found in is named but not removed.
SHORTEST = 4
#: Digits of a number that may name somebody.
LEAST_DIGITS = 5
_KEYS = 64
_FLOATS = re.compile("(large_|fixed_size_)?list<.*: (halffloat|float|double)>")
_BESIDE_IDS = ("labels", "attention_mask", "position_ids", "token_type_ids")
#: Not looked into, and said: programs of others, and what a link must not lead to.
_SKIPPED = {".venv", "venv", "node_modules", "__pycache__", "site-packages"}
_SYSTEM = {Path(name) for name in ("/", "/bin", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr")}
_ARCHIVES = "archives (7z rar bz2 xz zstd tar)"
#: Not looked into, and said: how such a file begins, or how its name ends.
_CLOSED: dict[str, tuple[str | bytes, ...]] = {
    "weights": (
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npy", ".npz", ".pkl"),
    ),
    "pictures and sound": (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"OggS", b"fLaC"),
    _ARCHIVES: (
        *(b"7z\xbc\xaf", b"Rar!", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"),
        *(".7z", ".rar", ".bz2", ".xz", ".zst", ".tar", ".tgz"),
    ),
    "PDF": (b"%PDF", ".pdf"),
    "pickles": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
}
_GZIP, _ZIP, _TABLE = b"\x1f\x8b", b"PK\x03\x04", (b"PAR1", b"ARROW1")
_NESTED = "archives and tables within archives"
#: What is packed may be so many times as large as its file (and `_FREE` bytes more); a zip has a
#: list of members of so many bytes at most.
_EXPANDS, _FREE, _MEMBERS = 100, 2**26, 2**24
_BOMB = f"parts that unpack to over {_EXPANDS} times their file"
#: Bytes that are read at once, characters of the last part that are read again (a window may go
#: across), rows of a table at a time.
_PART, _OVERLAP, _ROWS = 2**22, 2**12, 256
#: Backslashes of JSON within JSON double.
_ESCAPE = re.compile(
    r"((?:\\+u[0-9a-fA-F]{4})+)|\\+(?:x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,5})\})|\\+[bfnrt\"/\\]"
)
_OBJECT, _DECODER = re.compile(r'\{\s*"'), json.JSONDecoder()
_TAG = re.compile(r"<[^<>]{1,2000}>")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{60,76}\r?\n){2}|[A-Za-z0-9+/_-]{200}")


@dataclass(frozen=True)
class Texts:
    """What to look for.

    Attributes:
        windows: Windows of the deleted texts that no kept text has.
        sizes: Their lengths.
        keys: A word of each window; a text without any of them has no window. Empty where they
            are too many to look for one by one.
        too_short: Deleted texts of a common word or a short number, which no kept text is: nothing
            is searched for them.
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
        too_short: set[tuple[str, ...]] = set()
        # Read as files are: these are known by what their escapes stand for alone.
        for spoken in map(words, {next(forms(text)) for text in deleted}):
            letters = "".join(spoken)
            # A name or a number: two words, or digits.
            telling = sum(map(str.isdigit, letters)) >= LEAST_DIGITS
            telling |= len(spoken) > 1 and len(letters) >= 6
            if len(spoken) >= SHORTEST or telling:
                windows.update(in_a_row(spoken, min(WINDOW, len(spoken))))
            elif spoken:
                too_short.add(tuple(spoken))
        sizes = tuple(sorted({len(window) for window in windows}))
        for spoken in map(words, {next(forms(text)) for text in kept}):
            too_short.discard(tuple(spoken))
            for size in sizes:
                windows.difference_update(in_a_row(spoken, size))
        keys = tuple({max(window, key=len) for window in windows})
        return cls(frozenset(windows), sizes, keys if len(keys) <= _KEYS else (), len(too_short))

    @property
    def whole(self) -> int:
        """Number of windows but those of names and numbers."""
        return sum(len(window) >= SHORTEST for window in self.windows)

    def among(self, text: str) -> set[tuple[str, ...]]:
        """The windows that a text has."""
        folded = normal_form(text)
        if self.keys and not any(key in folded for key in self.keys):
            return set()
        spoken = WORD.findall(folded)
        return {w for size in self.sizes for w in in_a_row(spoken, size) if w in self.windows}


def in_a_row(run: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Every run of so many words."""
    return zip(*(run[i:] for i in range(size)), strict=False)


@dataclass
class Found:
    """Where deleted texts are left.

    Attributes:
        left: Path to number of windows.
        named: Path to number of short texts (names, numbers) where there is no whole window.
        files, searched_bytes: How much was searched.
        unsearched: Path to what of it cannot be searched ("weights", "pictures and sound").
        unreadable: Files that could not be read.
    """

    left: dict[Path, int] = field(default_factory=dict)
    named: dict[Path, int] = field(default_factory=dict)
    files: int = 0
    searched_bytes: int = 0
    unsearched: dict[Path, str] = field(default_factory=dict)
    unreadable: list[Path] = field(default_factory=list)

    def not_searched(self) -> str:
        """ "3 weights, 1 PDF", or nothing."""
        counts = Counter(kind for kinds in self.unsearched.values() for kind in kinds.split(", "))
        counts += Counter({"unreadable": len(self.unreadable)})
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def search(places: Iterable[Path], texts: Texts, decode: Decode | None = None) -> Found:
    """Look into every file below the places, behind links too, each once.

    Args:
        decode: Lists of token ids to texts; without it prepared data sets cannot be searched.
    """
    result = Found()
    for path in walk(places, (), result):
        unread: set[str] = set()
        windows: set[tuple[str, ...]] = set()
        try:
            for text in _texts_of(path, decode, unread):
                windows |= texts.among(text)
                if len(windows) == len(texts.windows):
                    break
            if "weights" not in unread:
                result.files += 1
                result.searched_bytes += path.stat().st_size
        except Exception:  # a reader raises what its parts raise, a tokenizer too
            result.unreadable.append(path)  # what came before the fault counts all the same
        if unread:
            result.unsearched[path] = ", ".join(sorted(unread))
        long = sum(len(window) >= SHORTEST for window in windows)
        if windows:
            (result.left if long else result.named)[path] = long or len(windows)
    return result


def walk(places: Iterable[Path], skip: Iterable[Path], result: Found) -> Iterator[Path]:
    """Files below the places, each by its real path once; ``result`` gets what was left out."""
    pending = list(places)[::-1]
    # A link must not lead to the whole disk; what was asked for is searched all the same.
    asked, seen = {place.resolve() for place in pending}, {path.resolve() for path in skip}
    above = {folder for place in asked for folder in place.parents}
    above = {folder for folder in above if asked.isdisjoint([folder, *folder.parents])} | _SYSTEM
    while pending:
        place = pending.pop()
        if (real := place.resolve()) in seen:
            continue
        seen.add(real)
        try:  # a folder of others may not even be asked what is in it
            if place.is_file():
                yield place
            elif not place.is_dir():
                continue
            elif place.name in _SKIPPED:
                result.unsearched[place] = f"folders called {place.name}"
            elif (place / "objects").is_dir() and (place / "HEAD").is_file():
                result.unsearched[place] = "git repositories"
            elif real in above:
                result.unsearched[place] = "links to folders above or of the system"
            else:
                pending += sorted(place.iterdir(), reverse=True)
        except OSError:
            result.unreadable.append(place)


# --- what a file says ----------------------------------------------------------------------------


def _texts_of(path: Path, decode: Decode | None, unread: set[str]) -> Iterator[str]:
    """The texts of a file, in parts; ``unread`` gets the kinds of what cannot be searched.

    Raises what readers raise: it is damaged, or token ids have no tokenizer.
    """
    most = _EXPANDS * path.stat().st_size + _FREE
    with path.open("rb") as file:
        head = file.read(512)
        if path.suffix == ".safetensors":  # what stands before the numbers
            file.seek(8)
            size = min(int.from_bytes(head[:8], "little"), _FREE)
            yield from forms(file.read(size).decode("utf-8", "replace"))
        file.seek(0)
        if kind := _closed(head, path):
            unread.add(kind)
        elif _is_table(head, path):
            for text in _bounded(_tables(file, decode, unread), most, unread):
                yield from forms(text)
        elif head.startswith(_GZIP):
            with gzip.open(file) as inner:
                yield from _packed(_bounded(_parts(inner), most, unread), path.with_suffix(""),
                                   unread)  # fmt: skip
        elif head.startswith(_ZIP):  # also an office document, an e-book, a jar
            yield from _members(file, most, unread)
        else:
            if path.suffix in (".zip", ".gz"):
                unread.add("archives of an unknown kind")
            yield from _text(_parts(file), unread)


def _closed(head: bytes, path: Path) -> str:
    suffix = path.suffix.lower()
    for kind, signs in _CLOSED.items():
        if any(
            sign == suffix if isinstance(sign, str) else head.startswith(sign) for sign in signs
        ):
            return kind
    return _ARCHIVES if head[257:262] == b"ustar" else ""


def _is_table(head: bytes, path: Path) -> bool:
    return head.startswith(_TABLE) or path.suffix in (".parquet", ".arrow", ".feather")


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.read, _PART), b"")


def _bounded(parts: Iterable[Part], most: int, unread: set[str]) -> Iterator[Part]:
    """Until they are larger together than anything that is meant to be read."""
    for part in parts:
        if (most := most - len(part)) < 0:
            unread.add(_BOMB)
            return
        yield part


def _packed(parts: Iterator[bytes], path: Path, unread: set[str]) -> Iterator[str]:
    """A file in an archive, of which text alone is read."""
    head = next(parts, b"")
    kind = _closed(head[:512], path)
    if not kind and (_is_table(head, path) or head.startswith((_GZIP, _ZIP))):
        kind = _NESTED
    if kind:
        unread.add(kind)
    else:
        yield from _text(chain([head], parts), unread)


def _members(file: IO[bytes], most: int, unread: set[str]) -> Iterator[str]:
    """Of a zip whose list of members is short enough to be read."""
    file.seek(-min(file.seek(0, 2), 2**16 + 22), 2)
    _, found, end = file.read().rpartition(b"PK\x05\x06")
    if not found or int.from_bytes(end[8:12], "little") > _MEMBERS:
        unread.add("archives that are cut off or have very many members")
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            yield member.filename
            most -= member.file_size  # no more than that is read
            if member.flag_bits & 1:
                unread.add("encrypted archives")
            elif most < 0:
                unread.add(_BOMB)
            elif not member.is_dir():
                with archive.open(member) as inner:
                    yield from _packed(_parts(inner), Path(member.filename), unread)


def _text(parts: Iterator[bytes], unread: set[str]) -> Iterator[str]:
    head, rest = next(parts, b""), ""
    encoding, binary = _encoding(head[:512]), b"\0" in head[:512]
    if encoding == "utf-8" and binary:
        unread.add("binary files")  # of which the text is searched
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    before = b""
    for part in chain([head], parts, [b""]):
        new = decoder.decode(part, final=not part)
        text = rest + new
        yield from forms(text)
        strange = new.count("\ufffd") > part.count("\ufffd".encode())
        if strange and encoding == "utf-8" and b"\0" in part:
            unread.add("binary files")
        elif strange and encoding == "utf-8" and not binary:
            unread.add("text in another encoding")
            yield from forms((before + part).decode("cp1252", "replace"))  # a likely one
        before = part[-_OVERLAP:]
        if _BASE64.search(text):
            unread.add("encoded text (base64)")
        rest = text[-_OVERLAP:]


def _encoding(head: bytes) -> str:
    """UTF-8 unless a mark says UTF-16 or UTF-32."""
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    return "utf-8"


def forms(text: str) -> Iterator[str]:
    """A text, and what it may stand for: escapes, entities, without tags, of a link."""

    def characters(escape: re.Match[str]) -> str:  # of a run of \uXXXX: two may be one character
        if code := escape[2] or escape[3]:
            return chr(int(code, 16))
        units = bytes.fromhex(re.sub(r"\\+u", "", escape[1] or ""))
        return units.decode("utf-16-be", "replace") or " "

    plain = html.unescape(_ESCAPE.sub(characters, text))
    yield plain
    if "<" in plain and (bare := _TAG.sub("", plain)) != plain:
        yield bare  # a word may be cut by a tag
        yield _TAG.sub(" ", plain)
    if _PERCENT.search(plain):
        yield urllib.parse.unquote_plus(plain)


def _tables(file: IO[bytes], decode: Decode | None, unread: set[str]) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.read(4) == b"PAR1":
        batches = pq.ParquetFile(file).iter_batches(batch_size=_ROWS)
    else:
        file.seek(0)
        try:
            batches = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            file.seek(0)
            whole = pa.ipc.open_file(file)
            batches = map(whole.get_batch, range(whole.num_record_batches))
    for batch in batches:
        for name in batch.schema.names:
            column = batch.column(name)
            if name.endswith("input_ids") or name in ("prompt_ids", "chosen_ids", "rejected_ids"):
                if decode is None:
                    raise ValueError("token ids and no tokenizer")
                yield from decode([ids for ids in column.to_pylist() if ids])
            elif _FLOATS.match(str(column.type)):
                unread.add("lists of floats in tables")
            elif not name.endswith(_BESIDE_IDS):
                flat = pa.types.is_primitive(column.type)
                yield from _cells(column.unique() if flat else column, unread)


def _cells(column: Any, unread: set[str]) -> Iterator[str]:
    """Texts of a column; its whole numbers (a telephone, a policy) and dates together."""
    others = []
    try:
        values = column.to_pylist()
    except Exception:  # a time beyond Python's, in a zone that is not known
        unread.add("times in tables")
        return
    for _, one in leaves(values):
        if isinstance(one, str):
            yield one
        elif isinstance(one, bytes):
            try:
                yield one.decode()
            except UnicodeDecodeError:
                unread.add("bytes in tables")
        elif not isinstance(one, (int, float, Decimal)):
            others.append(str(one))
        elif one // 1 == one and abs(one) >= 10 ** (LEAST_DIGITS - 1):
            others.append(str(int(one)))
    yield "\n".join(others)


def row_texts(path: Path) -> list[str]:
    """Every text of a file of JSON lines with a field ``row``, as a request keeps them; of one that
    is JSON itself, as chats of a CSV file are, each of its own."""
    rows = (row.get("row", row) for row in read_json_lines(path)) if path.is_file() else ()
    # Numbers too, which may name somebody: a telephone, a policy.
    every = (one for row in rows for _, one in said(row, whole=False))
    return [str(one) for one in every if not isinstance(one, bool)]


def leaves(value: Any, way: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a row but None by its way, as ``meta.person``."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{way}.{key}" if way else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part, way)
    elif value is not None:
        yield way, value


def said(value: Any, way: str = "", whole: bool = True) -> Iterator[tuple[str, Any]]:
    """`leaves`; of each text that is JSON itself, as arguments of a tool may be, those that it says
    (``whole``: and itself, and those of objects within other text, as in a code fence)."""
    for path, one in leaves(value, way):
        inside = None
        if isinstance(one, str) and one.lstrip()[:1] in ("{", "[", '"'):
            with suppress(ValueError, RecursionError):
                inside = [*leaves(json.loads(one), path)]
        within = _objects(one) if whole and inside is None and isinstance(one, str) else ()
        if whole or inside is None:
            yield path, one
        for place, part in inside or leaves([*within], path):
            yield from said(part, place, whole)


def _objects(text: str) -> Iterator[Any]:
    """The JSON objects within other text."""
    end = 0
    for found in _OBJECT.finditer(text):
        try:
            if found.start() >= end:
                value, end = _DECODER.raw_decode(text, found.start())
                yield value
        except ValueError:
            continue
        except RecursionError:
            return
