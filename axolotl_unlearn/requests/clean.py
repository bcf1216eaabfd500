"""After a run: what it listed in ``run_manifest.json`` goes, and a search proves that it is gone.

The model stays: weights are what the run was for (`requests.erase` gives up a model). Nothing is
removed outside the folder that is named, but for prepared data, which only we name like that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from axolotl_unlearn.data.prepared import is_prepared
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import MANIFEST, read_manifest
from axolotl_unlearn.requests.erase import Item, hub_cache, size_of, tokenizer_of, within
from axolotl_unlearn.requests.search import Found, Texts, search, strings


@dataclass
class Cleaning:
    """What `clean` would remove and how it would look for the rest.

    Attributes:
        items: What the manifests list and is there; with ``why`` it stays.
        sources: The user's own files of forget rows: they stay, and say what to look for.
        texts: What is looked for.
        places: Where.
    """

    out: Path
    manifests: list[Path]
    sources: list[Path]
    items: list[Item] = field(default_factory=list)
    texts: Texts = field(default_factory=lambda: Texts(frozenset(), ()))
    places: list[Path] = field(default_factory=list)

    @property
    def removable(self) -> list[Item]:
        return [item for item in self.items if item.why is None]


def plan(
    out: Path,
    *,
    forget: Iterable[Path] = (),
    places: Iterable[Path] = (),
    keep_log_probs: bool = False,
) -> Cleaning:
    """Look, and change nothing.

    Args:
        forget: Files of the forget rows, where those of the manifest are gone.
        places: Where else to search.

    Raises:
        UnlearnError: No manifest, a damaged one, a deletion request, or no rows to search for.
    """
    manifests = sorted(out.rglob(MANIFEST)) if out.is_dir() else []
    if not manifests:
        raise UnlearnError(f"{out} has no {MANIFEST}: no run of ours wrote it, or it is clean.")
    requests = [*out.glob("request.json"), *out.glob("ledger.jsonl")]
    if requests:
        raise UnlearnError(
            f"{out} belongs to deletion requests; use `axolotl unlearn request erase`."
        )
    known = _named(manifests, "sources")
    sources = [path for path in [*forget] or dict.fromkeys(known) if path.is_file()]
    if not sources:
        raise UnlearnError(
            f"the forget rows of {out} are not where they were, so nothing could be searched for; "
            "name them: `--forget FILE`."
        )
    found = Cleaning(out, manifests, sources)
    found.items = list({item.path: item for m in manifests for item in _items(m, out)}.values())
    if keep_log_probs:
        found.items = [i for i in found.items if i.kind != "log-probs"]
    kept = [path for path in _named(manifests, "retained") if path.is_file()]
    found.texts = Texts.of(_texts(sources), _texts(kept))
    # Prepared data alone: a list that was tampered with may name any place.
    outside = [
        item.path.parent
        for item in found.items
        if item.why is None and not within(item.path.resolve(), out.resolve())
    ]
    found.places = [out, *outside, *hub_cache(), *places]
    return found


def _named(manifests: Iterable[Path], key: str) -> list[Path]:
    return [
        Path(os.path.normpath(manifest.parent / name))
        for manifest in manifests
        for name in read_manifest(manifest.parent)[key]
    ]


def _texts(files: Iterable[Path]) -> Iterator[str]:
    return (text for path in files for _, row in read_rows(path) for text in strings(row))


def _items(manifest: Path, out: Path) -> Iterator[Item]:
    for entry in read_manifest(manifest.parent)["entries"]:
        path = Path(os.path.normpath(manifest.parent / entry["path"]))
        drafts = path.parent.glob(f"{path.name}.*.tmp") if path.parent.is_dir() else ()
        for one in (path, *drafts):
            if os.path.lexists(one):
                yield Item(str(entry.get("holds")), one, size_of(one), _reason(one, out))


def _reason(path: Path, out: Path) -> str | None:
    real = path.parent.resolve() / path.name
    if real != out.resolve() and within(real, out.resolve()):
        return None
    if is_prepared(path):
        return None
    return "it is outside; remove it by hand"


def strip(out: Path) -> None:
    """Remove what a run listed within ``out``, and the list: before the folder is handed over."""
    manifest = out / MANIFEST
    for item in _items(manifest, out) if manifest.is_file() else ():
        if within(item.path.resolve(), out.resolve()) and item.why is None:
            _remove(item.path)
    manifest.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(planned: Cleaning) -> Found:
    """Remove, forget the lists, and search everything again; ``left`` is what still holds texts."""
    decode = tokenizer_of([planned.out, *(one.parent for one in planned.manifests)])
    for item in planned.removable:
        _remove(item.path)
    kept = [item.path for item in planned.items if item.why is not None]
    found = search(planned.places, planned.texts, decode, skip=planned.sources)
    if not found.left and not kept:
        for manifest in planned.manifests:
            if not any(os.path.lexists(item.path) for item in _items(manifest, planned.out)):
                manifest.unlink()
    return found
