"""What `erase` plans to remove: the items, their removal, and a search for what is left."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal as sized

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import read_manifest, remove
from axolotl_unlearn.requests.request import counted
from axolotl_unlearn.requests.search import Decode, Found, Texts, search


@dataclass(frozen=True)
class Item:
    """One file or folder that may hold deleted data.

    Attributes:
        why: Why it stays; None if it can be removed.
    """

    kind: str
    path: Path
    bytes: int
    why: str | None = None

    @classmethod
    def at(cls, kind: str, path: Path, why: str | None = None) -> Item:
        return cls(kind, path, size_of(path), why)


@dataclass
class Plan:
    """What goes, and what is searched for where.

    Attributes:
        models: Whose tokenizer reads token ids.
        items: Files and folders that may hold deleted data.
        found: Where deleted texts were found by the last `look`.
    """

    folder: Path
    texts: Texts
    places: list[Path]
    models: list[str]
    items: list[Item] = field(default_factory=list)
    found: Found = field(default_factory=Found)

    @property
    def removable(self) -> list[Item]:
        return [item for item in self.items if item.why is None]

    def look(self, *, removing: bool = False) -> Found:
        """Search all places, after the removal of what can be removed if asked for."""
        decode = _decoder(self.models)  # before its folder may go
        for item in self.removable if removing else ():
            remove(item.path)
        self.found = search(self.places, self.texts, decode)
        return self.found

    def stays(self, places: Mapping[Path, int]) -> dict[Path, int]:
        """What was found in none of the items that are listed."""
        gone = [item.path.resolve() for item in self.items]
        kept = (one for one in sorted(places) if not any(within(one.resolve(), g) for g in gone))
        return {path: places[path] for path in kept}

    def lines(self) -> Iterator[str]:
        """What goes and what stays, for a reader."""
        for item in self.items:
            said, why = ("keep", f" ({item.why})") if item.why else ("remove", "")
            yield f"{said:6}  {sized(item.bytes):>9}  {item.kind}: {shown(item.path)}{why}"

    def facts(self) -> dict[str, Any]:
        """Of the last search, for programs."""
        result = self.found
        searched = {"files": result.files, "bytes": result.searched_bytes}
        return {
            "left": self.stays(result.left),
            "named": self.stays(result.named),
            "searched": searched | {"windows": self.texts.whole},
            "unsearched": result.unsearched,
            "unreadable": result.unreadable,
        }

    def found_lines(self) -> Iterator[str]:
        """What the last search has found in what stays, and what it did not look into; no text."""
        result, texts, whole = self.found, self.texts, self.texts.whole
        left, named = self.stays(result.left), self.stays(result.named)
        for word, places, says in (
            ("left", left, f"still holds deleted texts, {{}} of {whole} windows"),
            ("named", named, "holds {} short texts (names, numbers)"),
            ("unread", dict.fromkeys(result.unreadable, 0), "look yourself"),
        ):
            for path, counts in _by_folder(places).items():
                line = says.format(max(counts))
                line += f", in {len(counts)} files" if len(counts) > 1 else ""
                yield f"{word:6}  {sized(size_of(path)):>9}  {line}: {shown(path)}"
        said = (
            f"searched {result.files} files ({sized(result.searched_bytes)}) for "
            f"{counted(whole, 'window')} of eight words and "
            f"{counted(len(texts.windows) - whole, 'short text')}"
        )
        if not texts.windows:
            said = "nothing could be searched for: the rows are gone, or kept rows say all of it"
        if texts.too_short:
            said += f"; not searched for: {counted(texts.too_short, 'text')} of a single word"
        if result.unsearched:
            said += f"; cannot be searched: {result.not_searched()}"
        if result.unreadable:
            said += f"; {len(result.unreadable)} files were unreadable"
        yield said


def shown(path: Path) -> str:
    """Relative to the working folder where it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _by_folder(files: Mapping[Path, int]) -> dict[Path, list[int]]:
    """Files with their count; several of one folder of a cache of Hugging Face together."""
    groups: dict[Path, list[Path]] = {}
    for path in files:
        cache = next((one for one in hub_cache() if one in path.parents), None)
        place = cache / path.relative_to(cache).parts[0] if cache else path
        groups.setdefault(place, []).append(path)
    return {
        place if len(paths) > 1 else paths[0]: [files[path] for path in paths]
        for place, paths in groups.items()
    }


def size_of(path: Path) -> int:
    """Bytes of a file or link, or of all that is in a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(one.lstat().st_size for one in path.rglob("*") if not one.is_dir())


def within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def hub_cache() -> list[Path]:
    """Caches of Hugging Face: prepared data sets, and what was downloaded."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    datasets = os.environ.get("HF_DATASETS_CACHE", home / "datasets")
    hub = os.environ.get("HF_HUB_CACHE", home / "hub")
    places = dict.fromkeys(Path(place).expanduser() for place in (datasets, hub))
    return [place for place in places if place.is_dir()]


def _decoder(models: Iterable[str]) -> Decode | None:
    """Token ids to text, by the first of the models that has a tokenizer; else None."""
    from axolotl_unlearn.models import load_tokenizer, parse_models

    for model in models:
        try:
            tokenizer = load_tokenizer(parse_models([model])[0])
        except UnlearnError:
            continue
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    return None


def listed(manifest: Path) -> Iterator[tuple[str, Path]]:
    """(what it holds, path) of what the run of a list has written and is there, drafts too."""
    for entry in read_manifest(manifest.parent)["entries"]:
        path = Path(os.path.normpath(manifest.parent / entry["path"]))
        drafts = path.parent.glob(f"{path.name}.*.tmp") if path.parent.is_dir() else ()
        yield from ((str(entry.get("holds")), p) for p in (path, *drafts) if os.path.lexists(p))
