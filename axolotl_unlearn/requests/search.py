"""Which files still hold deleted texts? Windows of eight words, and short texts whole.

Every file is opened as what it is (`requests.containers`). What cannot be searched without running
or unpacking it, such as weights, pictures and the history of a git repository, is counted under its
name, so that nobody takes it for clean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.near import strings
from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.normal_form import normal_form, words
from axolotl_unlearn.requests.containers import Decode, texts_of

#: Words of a window: eight in a row are hardly ever the same by chance.
WINDOW = 8
#: Words of a text that is searched whole and hardly ever found by chance. Below that only names and
#: numbers are searched, and what they are found in is named but not removed.
SHORTEST = 4
#: Digits of a number that may name somebody.
LEAST_DIGITS = 5
#: Not looked into, and said: programs of others.
_SKIPPED = {".venv", "venv", "node_modules", "__pycache__", "site-packages"}
_GIT = "git repositories"
_SYSTEM = {Path(name) for name in ("/", "/bin", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr")}
_KEYS = 64


@dataclass(frozen=True)
class Texts:
    """What to look for.

    Attributes:
        windows: Windows of the deleted texts that no kept text has.
        sizes: Their lengths.
        keys: A word of each window; a text without any of them has no window. Empty where they
            are too many to look for one by one.
        too_short: Deleted texts of one common word or less, for which nothing is searched.
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
        for spoken in map(words, set(deleted)):
            if len(spoken) >= SHORTEST or _telling(spoken):
                windows.update(in_a_row(spoken, min(WINDOW, len(spoken))))
            else:
                too_short += bool(spoken)
        sizes = {len(window) for window in windows}
        for spoken in map(words, set(kept)):
            for size in sizes:
                windows.difference_update(in_a_row(spoken, size))
        keys = tuple({max(window, key=len) for window in windows})
        sizes = tuple(sorted({len(window) for window in windows}))
        return cls(frozenset(windows), sizes, keys if len(keys) <= _KEYS else (), too_short)

    @property
    def whole(self) -> int:
        """Number of windows but those of names and numbers."""
        return sum(len(window) >= SHORTEST for window in self.windows)

    def among(self, text: str) -> set[tuple[str, ...]]:
        """The windows that a text has."""
        if self.keys:
            folded = normal_form(text)
            if not any(key in folded for key in self.keys):
                return set()
        spoken = words(text)
        return {w for size in self.sizes for w in in_a_row(spoken, size) if w in self.windows}


def _telling(spoken: Sequence[str]) -> bool:
    """A name or a number: two words, or digits, or a word that is hardly a common one."""
    letters = "".join(spoken)
    digits = sum(map(str.isdigit, letters))
    return digits >= LEAST_DIGITS or (len(spoken) > 1 and len(letters) >= 6)


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
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def search(
    places: Iterable[Path],
    texts: Texts,
    decode: Decode | None = None,
    skip: Iterable[Path] = (),
) -> Found:
    """Look into every file below the places, behind links too, each once.

    Args:
        decode: Lists of token ids to texts; without it prepared data sets cannot be searched.
        skip: Folders and files that are not looked into.
    """
    result = Found()
    for path in _files(places, {path.resolve() for path in skip}, result):
        unread: set[str] = set()
        windows: set[tuple[str, ...]] = set()
        try:
            for text in texts_of(path, decode, unread):
                windows |= texts.among(text)
                if len(windows) == len(texts.windows):
                    break
            if "weights" not in unread:
                result.files += 1
                result.searched_bytes += path.stat().st_size
        except (OSError, ValueError, EOFError):
            result.unreadable.append(path)  # what came before the fault counts all the same
        if unread:
            result.unsearched[path] = ", ".join(sorted(unread))
        long = sum(len(window) >= SHORTEST for window in windows)
        if long:
            result.left[path] = long
        elif windows:
            result.named[path] = len(windows)
    return result


def _files(places: Iterable[Path], skipped: set[Path], result: Found) -> Iterator[Path]:
    """Files, each by its real path once."""
    pending = list(places)[::-1]
    # A link must not lead to the whole disk; what was asked for is searched all the same.
    asked, seen = {place.resolve() for place in pending}, set(skipped)
    above = {folder for place in asked for folder in place.parents}
    above = {folder for folder in above if asked.isdisjoint([folder, *folder.parents])} | _SYSTEM
    while pending:
        place = pending.pop()
        if (real := place.resolve()) in seen:
            continue
        seen.add(real)
        if place.is_file():
            yield place
        elif place.is_dir() and place.name in _SKIPPED:
            result.unsearched[place] = f"folders called {place.name}"
        elif (place / "objects").is_dir() and (place / "HEAD").is_file():
            result.unsearched[place] = _GIT
        elif place.is_dir() and real in above:
            result.unsearched[place] = "links to folders above or of the system"
        elif place.is_dir():
            try:
                inside = sorted(place.iterdir())
            except OSError:
                result.unreadable.append(place)
                continue
            pending += inside[::-1]


def row_texts(path: Path) -> list[str]:
    """Every text of a file of JSON lines with a field ``row``, as a request keeps them."""
    rows = (row.get("row", row) for row in read_json_lines(path)) if path.is_file() else ()
    return [text for row in rows for text in (*strings(row), *_numbers(row))]


def _numbers(value: Any) -> Iterator[str]:
    """Numbers that may name somebody: a telephone, a policy."""
    if isinstance(value, (Mapping, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(one)
    elif isinstance(value, int) and abs(value) >= 10**LEAST_DIGITS:
        yield str(value)
