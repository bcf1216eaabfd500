"""A plan, its removal, and a search for what is left, of a request (`erase`) or a run (`clean`).

Of a run what it listed in ``run_manifest.json`` goes. The model stays: weights are what the run was
for. Nothing is removed outside the folder that is named, but for prepared data, which only we name
like that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.prepared import is_prepared
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import MANIFEST, read_manifest, remove
from axolotl_unlearn.requests.request import counted
from axolotl_unlearn.requests.search import Found, Texts, search, strings


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
        items: Files and folders that a run has left.
        sources: The user's own files of the rows, which stay and are not searched.
        skip: Likewise, without a word.
        models: Whose tokenizer reads token ids.
        found: Where deleted texts were found by the last `look`.
    """

    folder: Path
    texts: Texts
    places: list[Path]
    models: list[str]
    items: list[Item] = field(default_factory=list)
    sources: list[Path] = field(default_factory=list)
    skip: list[Path] = field(default_factory=list)
    found: Found = field(default_factory=Found)

    @property
    def removable(self) -> list[Item]:
        return [item for item in self.items if item.why is None]

    def look(self, *, removing: bool = False) -> Found:
        """Search all places, after the removal of what can be removed if asked for."""
        decode = _tokenizer(self.models)  # before its folder may go
        for item in self.removable if removing else ():
            remove(item.path)
        skip = [*self.sources, *self.skip]
        self.found = search(self.places, self.texts, decode, skip=skip)
        return self.found

    def stays(self, places: Mapping[Path, int]) -> dict[Path, int]:
        """What was found in none of the items that are listed."""
        gone = [item.path.resolve() for item in self.items]
        return {
            path: count
            for path, count in sorted(places.items())
            if not any(within(path.resolve(), item) for item in gone)
        }

    def lines(self) -> Iterator[str]:
        """What goes and what stays, for a reader."""
        for item in self.items:
            said, why = ("keep  ", f" ({item.why})") if item.why else ("remove", "")
            yield f"{said}  {sized(item.bytes):>9}  {item.kind}: {shown(item.path)}{why}"
        for path in self.sources:
            yield f"yours   {_at(path)}forget rows: {shown(path)}"

    def facts(self) -> dict[str, Any]:
        """Of the last search, for programs."""
        result = self.found
        return {
            "left": self.stays(result.left),
            "named": self.stays(result.named),
            "searched": {"files": result.files, "bytes": result.searched_bytes}
            | {"windows": self.texts.whole},
            "unsearched": result.unsearched,
            "unreadable": result.unreadable,
        }

    def found_lines(self) -> Iterator[str]:
        """What the last search has found in what stays, and what it did not look into; no text."""
        result, texts, whole = self.found, self.texts, self.texts.whole
        for path, counts in _by_folder(self.stays(result.left)):
            said = f"{max(counts)} of {whole} windows{_files(counts)}"
            yield f"left    {_at(path)}still holds deleted texts, {said}: {shown(path)}"
        for path, counts in _by_folder(self.stays(result.named)):
            said = f"holds {max(counts)} short texts (names, numbers){_files(counts)}"
            yield f"named   {_at(path)}{said}: {shown(path)}"
        for path, counts in _by_folder(dict.fromkeys(result.unreadable, 0)):
            yield f"unread  {_at(path)}look yourself{_files(counts)}: {shown(path)}"
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


def sized(count: int) -> str:
    from rich.filesize import decimal

    return decimal(count)


def _by_folder(files_by_path: Mapping[Path, int]) -> Iterator[tuple[Path, list[int]]]:
    """Files with their count; those of a cache of Hugging Face by its folders."""
    caches, groups = hub_cache(), {}
    for path, count in files_by_path.items():
        cache = next((one for one in caches if one in path.parents), None)
        place = cache / path.relative_to(cache).parts[0] if cache else path
        groups.setdefault(place, {})[path] = count
    for place, files in groups.items():
        yield place if len(files) > 1 else next(iter(files)), list(files.values())


def _files(counts: Sequence[int]) -> str:
    return f", in {len(counts)} files" if len(counts) > 1 else ""


def _at(path: Path) -> str:
    size = path.stat().st_size if path.is_file() else size_of(path)
    return f"{sized(size):>9}  "


def size_of(path: Path) -> int:
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


def _tokenizer(models: Iterable[str]) -> Callable[[list[list[int]]], list[str]] | None:
    """Token ids to text, by the first of the models that has a tokenizer; else None."""
    from axolotl_unlearn.models import load_tokenizer, parse_models

    for model in models:
        try:
            tokenizer = load_tokenizer(parse_models([model])[0])
        except UnlearnError:
            continue
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    return None


# --- of a run ------------------------------------------------------------------------------------


def of_run(out: Path, *, forget: Iterable[Path] = (), places: Iterable[Path] = ()) -> Plan:
    """What the lists below a folder name, and what to search for; changes nothing.

    Args:
        forget: Files of the forget rows, where those of the lists are gone.
        places: Where else to search.

    Raises:
        UnlearnError: No list, a damaged one, a deletion request, or no rows to search for.
    """
    manifests = _manifests(out)
    if not manifests:
        raise UnlearnError(f"{out} has no {MANIFEST}: no run of ours wrote it, or it is clean.")
    if [*out.glob("request.json"), *out.glob("ledger.jsonl")]:
        raise UnlearnError(
            f"{out} belongs to deletion requests; use `axolotl-unlearn request erase`."
        )
    known = _named(manifests, "sources")
    sources = [path for path in [*forget] or dict.fromkeys(known) if path.is_file()]
    if not sources:
        raise UnlearnError(
            f"the forget rows of {out} are not where they were, so nothing could be searched for; "
            "name them: `--forget FILE`."
        )
    items = list({item.path: item for one in manifests for item in _items(one, out)}.values())
    kept = [path for path in _named(manifests, "retained") if path.is_file()]
    # Prepared data alone: a list that was tampered with may name any place.
    free = [item.path.parent for item in items if item.why is None]
    outside = [path for path in free if not within(path.resolve(), out.resolve())]
    texts = ((t for path in files for _, row in read_rows(path) for t in strings(row))
             for files in (sources, kept))  # fmt: skip
    models = [str(out), *(str(one.parent) for one in manifests)]
    searched = [out, *outside, *hub_cache(), *places]
    return Plan(out, Texts.of(*texts), searched, models, items, sources)


def clean(planned: Plan) -> Found:
    """Remove, search everything again, and drop the lists if nothing is left."""
    result = planned.look(removing=True)
    if not result.left and len(planned.removable) == len(planned.items):
        for manifest in _manifests(planned.folder):
            if not any(_items(manifest, planned.folder)):
                manifest.unlink()
    return result


def _manifests(out: Path) -> list[Path]:
    return sorted(out.rglob(MANIFEST)) if out.is_dir() else []


def _named(manifests: Iterable[Path], key: str) -> list[Path]:
    return [
        Path(os.path.normpath(manifest.parent / name))
        for manifest in manifests
        for name in read_manifest(manifest.parent)[key]
    ]


def _items(manifest: Path, out: Path) -> Iterator[Item]:
    for entry in read_manifest(manifest.parent)["entries"]:
        path = Path(os.path.normpath(manifest.parent / entry["path"]))
        drafts = path.parent.glob(f"{path.name}.*.tmp") if path.parent.is_dir() else ()
        for one in (path, *drafts):
            if os.path.lexists(one):
                real = one.parent.resolve() / one.name
                inside = real != out.resolve() and within(real, out.resolve())
                why = None if inside or is_prepared(one) else "it is outside; remove it by hand"
                yield Item.at(str(entry.get("holds")), one, why)
