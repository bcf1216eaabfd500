"""After a request: the model before, its checkpoints, caches and logs, and what is left elsewhere.

Removed is what the run of the config is known to have written (its model by digest, checkpoints and
Axolotl's log beside it, prepared data by their hash, what a ``run_manifest.json`` lists), the work
of the request, and copies of retained rows in the folders of all requests that hold deleted texts.
Never: what ``datasets`` or ``test_datasets`` name, what the accepted model needs, anything before
`erase` is told to, and nothing at all where a file of the request is not the one of its record.
Everything else that holds deleted texts is named, for the user to remove.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import read_manifest
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests.ledger import Ledger, model_facts, now
from axolotl_unlearn.requests.record import ERASED, amend, read
from axolotl_unlearn.requests.removal import Item, Plan, hub_cache, within
from axolotl_unlearn.requests.request import Request, digest, read_json, write_json
from axolotl_unlearn.requests.rows import DELETED, entries, read_config
from axolotl_unlearn.requests.search import Texts, row_texts
from axolotl_unlearn.requests.suppress import suppress
from axolotl_unlearn.requests.verify import verify
from axolotl_unlearn.requests.ways import way_of

#: Files that the Trainer and PEFT write with a model.
_WEIGHTS = re.compile(
    r".*\.safetensors|(pytorch_model|adapter_model).*\.bin|training_args\.bin|"
    r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth"
)
#: Folders of prepared rows: Axolotl's by their hash, ours.
_PREPARED = re.compile(r"[0-9a-f]{32}|unlearn-[0-9a-f]{16}")
#: Where Axolotl prepares rows if a config names no folder.
PREPARED = "last_run_prepared"
#: Folders of a request that hold its rows, for later audits.
KEPT = ("data", "eval-data")
#: Of those, copies of other people's rows that nothing needs once the request was carried out.
_SPENT = re.compile(r"data/(retain|teacher-\d+)\.jsonl|eval-data/retain\.jsonl")


def plan(folder: Path | str, *, places: Iterable[Path] = (), with_data: bool = False) -> Plan:
    """Look, and change nothing.

    Args:
        places: Where else to search for what is left than in the folders of all requests and of
            the config, the working folder and the caches of Hugging Face.
        with_data: Also the rows that later audits need.

    Raises:
        UnlearnError: The request is not in the ledger, or the model that it made is not as
            recorded: then the old one is not given up.
    """
    folder = Path(folder)
    statement, request = read(folder), Request.load(folder)
    _check_unchanged(request, statement)
    config = read_config(request.path("finetune.yml"))
    deleted, kept = [], []
    for path in sorted((folder / "data").glob("*.jsonl")):
        (deleted if path.stem in DELETED else kept).extend(row_texts(path))
    texts = Texts.of(deleted, kept)
    # A config that writes to the working folder owns nothing of what lies there.
    shared = {
        Path.home(),
        *(p for q in (Path.cwd(), folder.parent.resolve()) for p in (q, *q.parents)),
    }
    roots = [
        one for one in _outputs(request, config) if one.is_dir() and one.resolve() not in shared
    ]
    places = [*roots, folder.parent, *places, Path.cwd(), request.root, *hub_cache()]
    planned = Plan(folder, texts, places, [request.after])
    planned.look()
    needed = _needed(request, config)
    found = sorted({*planned.found.left, *planned.found.named})
    items = [
        *_model_before(request, statement, roots),
        *(item for root in roots for item in _of_run(root, found)),
        *_of_requests(request, found, with_data),
    ]
    items = list({item.path.resolve(): item for item in reversed(items)}.values())[::-1]
    planned.items = [replace(item, why=_why(item.path, needed) or item.why) for item in items]
    return planned


def erase(planned: Plan) -> dict[str, Any]:
    """Remove what a plan lists, search again, write both into the record and the ledger.

    Returns:
        ``removed``, ``kept``, ``left`` and counts, as in ``erased.json``: paths relative to the
        request; ``places``: how many files still hold deleted texts, those kept for audits too. The
        record has ids in the place of names outside its folder.
    """
    folder = planned.folder
    ledger, known = Ledger(folder.parent), folder / ERASED
    places = [_facts(item, folder) for item in planned.removable]
    again = {one["path"] for one in places}
    # What a killed run has not come to is no removed place.
    removed = [
        one
        for one in (read_json(known) or {"removed": []})["removed"]
        if one["path"] not in again and not os.path.lexists(folder / one["path"])
    ] + places

    def public(ones: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """In a record: the name of a file outside may be that of a person."""
        return [
            {"hmac-sha256": ledger.keyed(one["path"])} | {k: one[k] for k in one if k != "path"}
            if one["path"].startswith("..")
            else dict(one)
            for one in ones
        ]

    def counts(places: Mapping[Path, int], what: str) -> list[dict[str, Any]]:
        each = sorted(places.items())
        return [{"path": os.path.relpath(path, folder), what: count} for path, count in each]

    suppress(folder.parent)
    # Before anything goes: a run that is killed leaves a trace of what it was about to remove.
    name = read(folder)["predicate"]["request"]["id"]
    for owner in {one for item in planned.removable if (one := _owner(item.path, folder.parent))}:
        own = [_facts(item, owner) for item in planned.removable if within(item.path, owner)]
        if owner != folder:  # its `verify` knows then why these are gone
            ledger.append("erasing", owner.name, places=own)
    ledger.append("erasing", name, places=public(places))
    write_json(known, {"removed": removed})
    result, texts = planned.look(removing=True), planned.texts
    listed = {
        "removed": removed,
        "kept": [_facts(item, folder) for item in planned.items if item.why is not None],
        "left": counts(result.left, "windows"),
        "named": counts(result.named, "texts"),
    }
    erased = {
        "time": now(),
        "bytes": sum(one["bytes"] for one in removed),
        "places": len(result.left) + len(result.named),
        "windows": texts.whole,
        "names": len(texts.windows) - texts.whole,
        "too_short": texts.too_short,
        "searched_files": result.files,
        "unsearched_files": len(result.unsearched) + len(result.unreadable),
        "unsearched": result.not_searched(),
    }
    write_json(known, erased | listed)
    amend(folder, "erased", erased=erased | {part: public(ones) for part, ones in listed.items()})
    return erased | listed


def _facts(item: Item, folder: Path) -> dict[str, Any]:
    facts = asdict(item) | {"path": os.path.relpath(item.path, folder)}
    return {name: value for name, value in facts.items() if value is not None}


def _owner(path: Path, requests: Path) -> Path | None:
    """The folder of the request that a file belongs to."""
    if not within(path.resolve(), requests.resolve()) or path.resolve() == requests.resolve():
        return None
    return requests / path.resolve().relative_to(requests.resolve()).parts[0]


def _check_unchanged(request: Request, statement: Mapping[str, Any]) -> None:
    """
    Raises:
        UnlearnError: A file of the request or of the model that it made is not the one of the
            record, or that model is gone.
    """
    config = request.path("finetune.yml")
    recorded = statement["predicate"]["config"]["digest"]["sha256"]
    if not config.is_file() or digest(config) != recorded:
        raise UnlearnError(
            f"{config} is not the config of the record, which says what may be erased; restore it.",
            code="erase.other-config",
        )
    verify(request.folder).require()
    current = Ledger(request.folder.parent).current()
    if not request.path("model").exists() and not Path(current["path"]).exists():
        raise UnlearnError(
            f"{request.folder}: the model that it made is gone, so nothing is erased; restore it.",
            code="erase.model-gone",
        )


# --- what there is -------------------------------------------------------------------------------


def _outputs(request: Request, config: Mapping[str, Any]) -> list[Path]:
    """Folders that the training run of the config has written to, and those of the way."""
    names = [config.get("output_dir"), config.get("dataset_prepared_path") or PREPARED]
    of_way = getattr(way_of(request.way["way"]), "outputs", lambda _: [])
    return [*(request.root / str(name) for name in names if name), *of_way(request)]


def _is_model(place: Path) -> bool:
    known = any((place / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    return known and any(place.glob("*.safetensors"))


def _model_before(
    request: Request, statement: Mapping[str, Any], roots: list[Path]
) -> Iterator[Item]:
    """Its weights, where they are still those of the record, and what training left beside them."""
    before = request.facts["before"]
    old, requests = Path(before["adapter"] or before["model"]), request.folder.parent.resolve()
    made_here = within(old.resolve(), requests)
    if old.is_dir():
        why = None
        if model_facts(old)["digest"] != statement["predicate"]["model"]["before"]["digest"]:
            why = "it is not the model that the request began with"
        elif not made_here and not any(within(old.resolve(), root.resolve()) for root in roots):
            why = "it is outside the folders that the config writes to; remove it by hand"
        if made_here:
            yield Item.at("model before", old, why)
        else:
            kind = "adapter before" if before["adapter"] else "model before"
            for path in sorted(old.iterdir()):
                if path.is_file() and _WEIGHTS.fullmatch(path.name):
                    yield Item.at(kind, path, why)
    yield from _beside(request.path("model"))


def _beside(model: Path) -> Iterator[Item]:
    """What the Trainer and Axolotl write into the folder of a model."""
    for path in sorted(model.iterdir()) if model.is_dir() else ():
        real = path.is_dir() and not path.is_symlink()
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir():
            if path.is_symlink() or _is_model(path) or any(path.glob("*.safetensors")):
                yield Item.at("checkpoint", path)
        elif path.name == "merged" and real and _is_model(path):
            yield Item.at("merged model", path)
        elif path.name == "debug.log":
            yield Item.at("log", path)
        elif path.name == "runs" and real:
            inside = [one for one in path.rglob("*") if not one.is_dir()]
            if inside and all(one.name.startswith("events.out.tfevents.") for one in inside):
                yield Item.at("log", path)


def _of_run(root: Path, found: list[Path]) -> Iterator[Item]:
    """Below a folder that the config writes to."""
    if any((root / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        yield from _beside(root)
    for entry in read_manifest(root)["entries"]:
        path = Path(os.path.normpath(root / entry["path"]))
        if os.path.lexists(path) and within(path.parent.resolve(), root.resolve()):
            yield Item.at("listed by its run", path)
    for path in sorted(root.iterdir()):
        if _PREPARED.fullmatch(path.name) and (path / "state.json").is_file():
            if any(within(one.resolve(), path.resolve()) for one in found):
                yield Item.at("prepared data", path)


def _of_requests(request: Request, found: list[Path], with_data: bool) -> Iterator[Item]:
    """Work of the request, its rows, and what other requests hold of them."""
    folder, requests = request.folder, request.folder.parent
    if (folder / "work").is_dir():
        yield Item.at("work of the run", folder / "work")
    for name in KEPT:
        if (folder / name).is_dir():
            why = None if with_data else "audits need it; `--with-data` removes it too"
            yield Item.at("rows of the request", folder / name, why)
    done = {entry["request"] for entry in Ledger(requests).accepted()}
    for path in found:
        owner = _owner(path, requests)
        if owner is None or path.resolve() != path.absolute():
            continue
        name = path.resolve().relative_to(owner.resolve()).as_posix()
        part = name.split("/")[0]
        if part in (name, "model") or (owner == folder and part in (*KEPT, "work")):
            continue
        why = None
        if owner.name not in done:
            why = f"request {owner.name!r} was not carried out: finish it, or remove its folder"
        elif part in KEPT and not _SPENT.fullmatch(name):
            why = f"audits of request {owner.name!r} need it; remove it by hand"
        elif part == "work":
            path = owner / part
        yield Item.at("file with their texts", path, why)


# --- what stays ----------------------------------------------------------------------------------


def _needed(request: Request, config: Mapping[str, Any]) -> list[tuple[Path, str, str]]:
    """(place, kind, why it stays): of two reasons the first."""
    ledger, requests = Ledger(request.folder.parent), request.folder.parent
    current = ledger.current() or {}
    model, read = "model", "data"
    needed = [
        (current.get("path"), model, "it is the current model"),
        ((current.get("base") or {}).get("name"), model, "the current model stands on it"),
        (request.after.split("+")[0], model, "the model of this request stands on it"),
        (request.facts["base"], model, "it is the base model"),
    ]
    done = {entry["request"] for entry in ledger.accepted()}
    for path in sorted(requests.glob("*/request.json")):
        name, before = path.parent.name, Request.load(path.parent).facts["before"]
        why = f"request {name!r}, which was not carried out yet, begins with it"
        if name not in done:
            needed += [(source, model, why) for source in (before["adapter"], before["model"])]
    for key in ("datasets", "test_datasets"):
        for name in (name for entry in entries(config, key) for name in _sources(entry)):
            needed.append((request.root / name, read, f"the config reads it (`{key}`)"))
    needed += [(Path.home(), "", "it is your home"), (Path.cwd(), "", "you work in it")]
    needed += [(requests, "", "it is the folder of the requests")]
    there = [(Path(place), kind, why) for place, kind, why in needed if place]
    return [(place.resolve(), kind, why) for place, kind, why in there if place.exists()]


def _sources(entry: Mapping[str, Any]) -> Iterator[str]:
    """Paths that an entry of ``datasets`` names."""
    yield str(entry.get("path"))
    files = entry.get("data_files") or []
    for one in files.values() if isinstance(files, Mapping) else [files]:
        yield from [one] if isinstance(one, str) else map(str, one)


def _why(path: Path, needed: Iterable[tuple[Path, str, str]]) -> str | None:
    """Why a place may not be removed."""
    real = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
    for place, kind, why in needed:
        inside = kind == "data" and within(real, place)
        # A checkpoint within the current model's folder is not that model.
        own = kind == "model" and real.parent == place and not real.name.startswith("checkpoint-")
        if within(place, real) or inside or own:
            return why
    return None
