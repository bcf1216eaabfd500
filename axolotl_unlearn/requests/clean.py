"""After a run: what it listed in ``run_manifest.json`` goes, and a search proves that it is gone.

The model stays: weights are what the run was for (`requests.erase` gives up a model). Nothing is
removed outside the folder that is named, but for prepared data, which only we name like that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from axolotl_unlearn.data.prepared import is_prepared
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import MANIFEST, read_manifest
from axolotl_unlearn.requests.removal import Item, Plan, hub_cache, within
from axolotl_unlearn.requests.search import Found, Texts, strings


def plan(out: Path, *, forget: Iterable[Path] = (), places: Iterable[Path] = ()) -> Plan:
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
