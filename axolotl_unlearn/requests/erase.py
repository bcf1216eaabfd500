"""After a request: the model before, its checkpoints, caches and logs, and what is left elsewhere.

Nothing is removed outside the folders that the user's config writes to and the folder of the
requests; nothing that the accepted model needs; nothing before `erase` is told to, and nothing at
all where a file of the request is not the one of its record. What is found elsewhere is named, for
the user to remove.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests.ledger import Ledger, model_facts, now
from axolotl_unlearn.requests.record import ERASED, amend, read
from axolotl_unlearn.requests.removal import Item, Plan, hub_cache, within
from axolotl_unlearn.requests.request import Request, digest, read_json, write_json
from axolotl_unlearn.requests.rows import read_config
from axolotl_unlearn.requests.search import Found, Texts, row_texts
from axolotl_unlearn.requests.suppress import suppress
from axolotl_unlearn.requests.verify import verify

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_LOGS = ("runs", "wandb", "mlruns", "trackio")
#: Folders of a request that hold its rows, for later audits.
KEPT = ("data", "eval-data")
#: Where Axolotl prepares rows if a config names no folder.
PREPARED = "last_run_prepared"


def plan(folder: Path | str, *, places: Iterable[Path] = (), with_data: bool = False) -> Plan:
    """Look, and change nothing.

    Args:
        places: Where else to search for what is left than in the folders of the request and its
            config, the working folder and the caches of Hugging Face.
        with_data: Also the rows that later audits need.

    Raises:
        UnlearnError: The request is not in the ledger, or the model that it made is not as
            recorded: then the old one is not given up.
    """
    folder = Path(folder)
    statement, request = read(folder), Request.load(folder)
    _check_unchanged(request, statement)
    roots = [root for root in _outputs(request) if root.is_dir()]
    kept = [path for path in sorted((folder / "data").glob("*.jsonl")) if path.stem != "forget"]
    texts = Texts.of(
        row_texts(request.rows("forget")), [text for path in kept for text in row_texts(path)]
    )
    own = [one / name for one in sorted(folder.parent.iterdir()) for name in KEPT if one.is_dir()]
    places = [*roots, folder, *places, Path.cwd(), request.root, *hub_cache()]
    planned = Plan(folder, texts, places, [request.after], skip=own)
    planned.look()
    reason = _keeper(request, roots)
    items = list(_items(request, statement, roots, with_data))
    items += _found_items(planned.found, items, [*roots, folder])
    planned.items = [replace(item, why=item.why or reason(item.path)) for item in items]
    return planned


def _outputs(request: Request) -> list[Path]:
    """Folders that the training run of the config has written to."""
    config = read_config(request.path("finetune.yml"))
    names = [config.get("output_dir"), config.get("dataset_prepared_path") or PREPARED]
    return [request.root / str(name) for name in names if name]


def erase(planned: Plan) -> dict[str, Any]:
    """Remove what a plan lists, search again, write both into the record and the ledger.

    Returns:
        ``removed``, ``kept``, ``left`` and counts, as in ``erased.json``: paths relative to the
        request. The record has ids in the place of names outside its folder.
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
            f"{config} is not the config of the record, which says what may be erased; restore it."
        )
    verify(request.folder).require()
    current = Ledger(request.folder.parent).current()
    if not request.path("model").exists() and not Path(current["path"]).exists():
        raise UnlearnError(
            f"{request.folder}: the model that it made is gone, so nothing is erased; restore it."
        )


# --- what there is -------------------------------------------------------------------------------


def _items(
    request: Request, statement: dict[str, Any], roots: list[Path], with_data: bool
) -> Iterator[Item]:
    folder, before = request.folder, request.facts["before"]
    old = Path(before["adapter"] or before["model"])
    if old.is_dir():
        weights = sorted(p for p in old.iterdir() if p.is_file() and p.suffix in _WEIGHTS)
        whole = weights and any((old / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
        recorded = statement["predicate"]["model"]["before"]["digest"]
        known = model_facts(old)["digest"] == recorded if whole else True
        why = None if known else "it is not the model that the request began with"
        if within(old.resolve(), folder.parent.resolve()):
            yield Item.at("model before", old, why)  # made by an earlier request, whole
        else:
            kind = "adapter before" if before["adapter"] else "model before"
            for path in weights:
                yield Item.at(kind, path, why)
    for root in {one.resolve(): one for one in [*roots, old, folder / "model"]}.values():
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            if path.name.startswith("checkpoint-") and path.is_dir():
                yield Item.at("checkpoint", path)
            elif root in roots and path.name == "merged" and path.is_dir():
                yield Item.at("merged model", path)
            elif root in roots and (path.name in _LOGS or path.suffix == ".log"):
                yield Item.at("log", path)
    if (folder / "work").is_dir():
        yield Item.at("work of the run", folder / "work")
    for name in KEPT:
        if (folder / name).is_dir():
            why = None if with_data else "audits need it; `--with-data` removes it too"
            yield Item.at("rows of the request", folder / name, why)


def _found_items(result: Found, items: list[Item], roots: list[Path]) -> Iterator[Item]:
    """Caches, prepared data and logs below our folders that hold deleted texts."""
    listed = [item.path.resolve() for item in items]
    seen: set[Path] = set()
    for path in sorted(result.left):
        real = path.resolve()
        root = next((r for r in roots if within(real, r.resolve())), None)
        if root is None or path.is_dir() or any(within(real, one) for one in listed):
            continue
        # A table of a prepared data set is of no use without the others: the folder goes.
        whole = real.parent if path.suffix == ".arrow" and real.parent != root.resolve() else real
        if whole in seen:
            continue
        seen.add(whole)
        kind = "prepared data" if path.suffix in (".arrow", ".parquet") else "file with their texts"
        yield Item.at(kind, path.parent if whole == real.parent else path)


# --- what stays ----------------------------------------------------------------------------------


def _keeper(request: Request, roots: list[Path]) -> Callable[[Path], str | None]:
    """Says of a place why it may not be removed."""
    folder, requests = request.folder.resolve(), request.folder.parent.resolve()
    here, ledger = Path.cwd().resolve(), Ledger(request.folder.parent)
    forbidden = {Path.home().resolve(), here, *here.parents, requests, *requests.parents}
    every = [root.resolve() for root in roots]
    current = ledger.current() or {}
    needed = [
        (current.get("path"), "it is the current model"),
        ((current.get("base") or {}).get("name"), "the current model stands on it"),
        (request.after.split("+")[0], "the model of this request stands on it"),
        (request.facts["base"], "it is the base model"),
    ]
    done = {entry["request"] for entry in ledger.accepted()}
    for path in sorted(request.folder.parent.glob("*/request.json")):
        name, before = path.parent.name, Request.load(path.parent).facts["before"]
        why = f"request {name!r}, which was not carried out yet, begins with it"
        if name not in done:
            needed += [(source, why) for source in (before["adapter"], before["model"])]
    there = [(Path(source), why) for source, why in needed if source]
    # Of two reasons the first.
    used = {path.resolve(): why for path, why in reversed(there) if path.exists()}

    def reason(path: Path) -> str | None:
        real = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
        for model, why in used.items():
            # A checkpoint within the current model's folder is not that model.
            inside = real.parent == model and not real.name.startswith("checkpoint-")
            if within(model, real) or inside:
                return why
        if real.parent == folder and not real.is_dir():
            return "the request needs it"
        own = [folder, *(root for root in every if root not in forbidden)]
        earlier = real.name == "model" and real.parent.parent == requests
        if earlier or any(within(real, root) and real != root for root in own):
            return None
        if any(within(real, root) for root in forbidden.intersection(every)):
            return "the config writes to a folder that holds other things; remove it by hand"
        return "it is outside the folders that the config writes to; remove it by hand"

    return reason
