"""After a request: the model before, its checkpoints, caches and logs, and what is left elsewhere.

Removed is what the run of the config is known to have written (its model by digest, checkpoints and
Axolotl's log beside it, prepared data by their hash, what a ``run_manifest.json`` lists), the work
of the request, and copies of retained rows in the folders of all requests that hold deleted texts.
Never: what ``datasets`` or ``test_datasets`` name, what the accepted model needs, anything before
`erase` is told to, and nothing at all where a file of the request is not the one of its record.
Everything else that holds deleted texts is named, for the user to remove.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal as sized

from axolotl_unlearn.data.prepared import is_prepared
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.files import listed, remove
from axolotl_unlearn.models import (
    ADAPTER_CONFIG,
    ModelSpec,
    load_tokenizer,
    parse_models,
    weights_digest,
)
from axolotl_unlearn.requests.record import ERASED, RECORD, amend, read
from axolotl_unlearn.requests.request import (
    MAKING,
    Ledger,
    Request,
    digest,
    fault,
    home,
    is_held,
    now,
    read_json,
    shas,
    write_json,
)
from axolotl_unlearn.requests.rows import DELETED, STAYS, entries, read_config, suppress
from axolotl_unlearn.requests.search import Decode, Found, Texts, row_texts, search
from axolotl_unlearn.requests.verify import last_erasure, verify
from axolotl_unlearn.requests.ways import way_of
from axolotl_unlearn.requests.ways.shards import FACTS as SHARDS
from axolotl_unlearn.shards import is_routed

#: Files and folders that the Trainer, PEFT, FSDP and DeepSpeed write with a model.
_WEIGHTS = re.compile(
    r".*\.safetensors|(pytorch_model|adapter_model).*\.bin|training_args\.bin|"
    r"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth"
)
_PARTS = re.compile(r"(pytorch_model(_fsdp)?|optimizer)_\d+|global_step\d+")
#: By which other files may hold weights.
_HOLDS = {".safetensors", ".bin", ".pt", ".pth", ".distcp", ".gguf", ".onnx", ".ckpt"}
#: Folders of copies that Axolotl makes below a model: `merge-lora` and `quantize`; and `export`.
COPIES, EXPORTED = {"merged": "merged model", "quantized": "quantised model"}, "gguf"
#: Folders of rows that Axolotl prepared, by their hash; and where it makes them, and the plugin its
#: own (`is_prepared`) around them, if a config names no folder.
_PREPARED, PREPARED = re.compile(r"[0-9a-f]{32}"), "last_run_prepared"
#: Kinds of what the request began with.
_BEFORE = {"model before", "adapter before"}
_ANOTHER = "it is not the model that the request began with"
_UNKNOWN = "it may hold weights of the model before; remove it by hand"
#: Folders of a request that hold its rows, for later audits; and of those, copies of other people's
#: rows that nothing needs once the request was carried out.
KEPT = ("data", "eval-data")
_SPENT = re.compile(r"data/(retain|teacher-\d+)\.jsonl|eval-data/retain\.jsonl")


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
        gone = {item.path.resolve() for item in self.items if not item.path.is_symlink()}
        found = ((path.resolve(), path, count) for path, count in sorted(places.items()))
        return {p: n for real, p, n in found if gone.isdisjoint((real, *real.parents))}

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
            ("named", named, "holds names or numbers, {} in all"),
            ("unread", dict.fromkeys(result.unreadable, 0), "look yourself"),
        ):
            for path, count in places.items():
                yield f"{word:6}  {sized(size_of(path)):>9}  {says.format(count)}: {shown(path)}"
        said = (
            f"searched {counted(result.files, 'file')} ({sized(result.searched_bytes)}) for "
            f"{counted(whole, 'window')} of eight words and "
            f"{counted(len(texts.windows) - whole, 'short text')}"
        )
        if not texts.windows:
            said = "nothing could be searched for: the rows are gone, or kept rows say all of it"
        if texts.too_short:
            short = counted(texts.too_short, "text")
            said += f"; not searched for: {short} of a word or a short number"
        if unsearched := result.not_searched():
            said += f"; cannot be searched: {unsearched}"
        yield said


def shown(path: Path) -> str:
    """Relative to the working folder where it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def size_of(path: Path) -> int:
    """Bytes of a file or link, or of all that is in a folder; 0 where nobody may look."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(one.lstat().st_size for one in path.rglob("*") if not one.is_dir())
    except OSError:
        return 0


def hub_cache() -> list[Path]:
    """Caches of Hugging Face where they are by its own settings: prepared data sets, and what was
    downloaded."""
    from datasets import config
    from huggingface_hub import constants

    named = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return [place for place in dict.fromkeys(map(Path, named)) if place.is_dir()]


def _decoder(models: Iterable[str]) -> Decode | None:
    """Token ids to text, by the first of the models that has a tokenizer; else None."""
    for model in models:
        try:
            tokenizer = load_tokenizer(parse_models([model])[0])
        except UnlearnError:
            continue
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    return None


# --- erasing -------------------------------------------------------------------------------------


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
    folder = home(folder)
    statement, request = read(folder), Request.load(folder)
    _check_unchanged(request, statement)
    config = read_config(request.path("finetune.yml"))
    deleted, kept = (
        [text for part in parts for text in row_texts(request.rows(part))]
        for parts in (DELETED, STAYS)
    )
    # A config that writes to the working folder owns nothing of what lies there.
    mine = (Path.cwd(), folder.parent.resolve())
    shared = {Path.home(), *mine, *(up for one in mine for up in one.parents)}
    names = [config.get("output_dir"), config.get("dataset_prepared_path") or PREPARED]
    outputs = [request.root / str(name) for name in names if name]
    outputs += getattr(way_of(request.way["way"]), "outputs", lambda _: [])(request)
    roots = [one for one in outputs if one.is_dir() and one.resolve() not in shared]
    places = [*roots, folder.parent, *places, Path.cwd(), request.root, *hub_cache()]
    planned = Plan(folder, Texts.of(deleted, kept), places, [request.after])
    planned.look()
    found = sorted({*planned.found.left, *planned.found.named})
    before, files = [*_models_before(request)], {*request.facts["before"].get("files", ())}
    earlier = _earlier(folder)
    for part in ("removed", "kept"):
        earlier[part] = {(folder / one["path"]).resolve() for one in earlier.get(part, ())}
    items = [
        *_begun(request),
        *(item for one in before for item in _model_before(one, folder.parent, roots)),
        *_beside(request.path("model")),
        *(item for root in roots for item in _of_run(root, found, before, files, earlier)),
        *_of_requests(request, found, with_data),
    ]
    needed = _reasons(request, config)

    def why(item: Item) -> str | None:
        if item.path.is_symlink() and item.path.exists():
            return f"it is a link to {item.path.resolve()}; remove both by hand"
        return item.why if item.why == _ANOTHER else needed(item.path) or item.why

    first = {item.path.parent.resolve() / item.path.name: item for item in reversed(items)}
    planned.items = [replace(item, why=why(item)) for item in reversed(first.values())]
    return planned


def erase(planned: Plan) -> dict[str, Any]:
    """Remove what a plan lists, search again, write both into the record and the ledger.

    Returns:
        ``removed``, ``kept``, ``left`` and counts, as in ``erased.json``: paths relative to the
        request; ``places``: how many files still hold deleted texts, those kept for audits too;
        ``model_before``: it is among what was removed. The record has ids in the place of names
        outside its folder.
    """
    folder = planned.folder
    ledger, known, texts = Ledger(folder.parent), folder / ERASED, planned.texts
    goes = _facts(planned.removable, folder)
    old, again = _earlier(folder), [one["path"] for one in goes]
    # What a killed run has not come to is no removed place; of those that ended all is, whatever
    # was written there since.
    ended = old["removed"] if "time" in old else old.get("ended", ())
    gone = [
        one
        for one in old["removed"]
        if one["path"] not in again and (one in ended or not os.path.lexists(folder / one["path"]))
    ]

    def public(ones: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """In a record: the name of a file outside may be that of a person, and of other requests
        it says nothing."""
        made = []
        for one in ones:
            if "why" in one:
                why = re.sub("(?<=it is a link) to .*(?=;)", "", one["why"])
                one = one | {"why": re.sub(r"request (['\"]).*\1", "another request", why)}
            if one["path"].startswith(".."):
                one = {"hmac-sha256": ledger.keyed(one["path"])} | one
                del one["path"]
            made.append(one)
        return made

    def counts(places: Mapping[Path, int], what: str) -> list[dict[str, Any]]:
        each = sorted(places.items())
        return [{"path": _name(path, folder), what: count} for path, count in each]

    def seen(found: Found) -> dict[str, Any]:
        """Of a search; and of an earlier one what is there where this one did not look."""
        looked = [place.resolve() for place in planned.places] if texts.windows else []
        made = {"left": counts(found.left, "windows"), "named": counts(found.named, "texts")}
        for part, ones in made.items():
            places = [(one, (folder / one["path"]).resolve()) for one in old.get(part, ())]
            there = [(one, path) for one, path in places if os.path.lexists(path)]
            ones += [o for o, path in there if not any(map(path.is_relative_to, looked))]
        told = {"too_short": texts.too_short, "unsearched": found.not_searched()}
        told["unsearched_files"] = len(found.unsearched) + len(found.unreadable)
        return made | told | ({} if looked else {key: old[key] for key in told if key in old})

    suppress(folder.parent)
    # Before anything goes: a run that is killed leaves a trace of what it was about to remove, and
    # `verify` of another request knows why its files are gone.
    owners = {_owner(item.path, folder.parent) for item in planned.removable} - {folder, None}
    for owner in sorted(filter(None, owners)):
        own = [item for item in planned.removable if _owner(item.path, folder.parent) == owner]
        ledger.append("erasing", owner.name, places=_facts(own, owner))
    begun = {"removed": gone + goes, "files": _files(planned.removable, folder), "ended": gone}
    begun |= seen(planned.found)  # where this run removes the rows, the next one cannot look
    key = ledger.keyed(json.dumps(begun))
    ledger.append("erasing", folder.name, places=public(goes), begun=key)
    write_json(known, begun)
    result = planned.look(removing=True)
    told = seen(result)
    kept = _facts((item for item in planned.items if item.why is not None), folder)
    went = {one["kind"] for one in gone + goes} & _BEFORE
    stayed = {one["kind"] for one in kept if one["why"] != _ANOTHER} & _BEFORE
    erased = {
        "time": now(),
        "model_before": bool(went) and not stayed,
        "bytes": sum(one["bytes"] for one in gone + goes),
        "places": len(told["left"]) + len(told["named"]),
        "windows": texts.whole,
        "names": len(texts.windows) - texts.whole,
        "searched_files": result.files,
        "removed": gone + goes,
        "kept": kept,
        **told,
    }
    write_json(known, erased)
    lists = {part: public(ones) for part, ones in erased.items() if isinstance(ones, list)}
    amend(folder, "erased", erased=erased | lists)
    return erased


def _earlier(folder: Path) -> dict[str, Any]:
    """What an earlier `erase` has written; nothing where that is damaged."""
    try:
        return read_json(folder / ERASED) or {"removed": []}
    except ValueError:
        return {"removed": []}


def _facts(items: Iterable[Item], folder: Path) -> list[dict[str, Any]]:
    made = (asdict(one) | {"path": _name(one.path, folder)} for one in items)
    return [{k: value for k, value in one.items() if value is not None} for one in made]


def _name(path: Path, folder: Path) -> str:
    """From here, which may be behind a link; what is not UTF-8 in it as an escape."""
    name = os.path.relpath(path.parent.resolve() / path.name, folder.resolve())
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _files(items: Iterable[Item], folder: Path) -> dict[str, list[int]]:
    """What a file was when its removal began: size, time of change, inode, by name from here."""
    made = {}
    for item in items:
        whole = item.path.is_dir() and not item.path.is_symlink()
        for path in item.path.rglob("*") if whole else [item.path]:
            if path.is_symlink() or not path.is_dir():
                facts = path.lstat()
                made[_name(path, folder)] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    return made


def _begun(request: Request) -> Iterator[Item]:
    """What a killed `erase` has not come to: by its entry in the ledger, unless written since."""
    ledger, known = Ledger(request.folder.parent), _earlier(request.folder)
    if last_erasure(ledger.of(request.id)).get("begun") != ledger.keyed(json.dumps(known)):
        return
    for one in known["removed"]:
        path = request.path(one["path"])
        left = [Item.at("", path)] if os.path.lexists(path) else []
        if left and _files(left, request.folder).items() <= known["files"].items():
            yield Item(one["kind"], path.parent.resolve() / path.name, one["bytes"])


def _owner(path: Path, requests: Path) -> Path | None:
    """The folder of the request that a file belongs to; beside requests other things may lie."""
    real, top = path.resolve(), requests.resolve()
    if top not in real.parents:
        return None
    owner = requests / real.relative_to(top).parts[0]
    return owner if any((owner / name).exists() for name in ("request.json", MAKING)) else None


def _check_unchanged(request: Request, statement: Mapping[str, Any]) -> None:
    """Raises `UnlearnError`: a file of the request or of the model that it made is not the one of
    the record, or that model is gone."""
    config = request.path("finetune.yml")
    recorded = statement["predicate"]["config"]["digest"]["sha256"]
    if not config.is_file() or digest(config) != recorded:
        says = f"{config} is not the config of the record, which says what may be erased"
        raise fault("erase.other-config", f"{says}; restore it.")
    verify(request.folder).require()
    current = Ledger(request.folder.parent).current()
    if not request.path("model").exists() and not Path(current["path"]).exists():
        says = f"{request.folder}: the model that it made is gone, so nothing is erased"
        raise fault("erase.model-gone", f"{says}; restore it.")


# --- what there is ------------------------------------------------------------------------------


def _models_before(request: Request) -> Iterator[Item]:
    """Folders of models that have learned the rows: that of the request; then those that earlier
    ones began with or made: of a shards folder they go, of others their own `erase` decides."""
    ledger = Ledger(request.folder.parent)
    names = [*ledger.accepted()]
    for name in names[: names.index(request.id) + 1][::-1]:
        if not (ledger.folder / name / RECORD).is_file():
            continue
        one, known = Request.load(ledger.folder / name), read(ledger.folder / name)["predicate"]
        before, made = one.facts["before"], one.path("model")
        old = before["adapter"] or before["model"]
        if name == request.id:
            kind = "adapter before" if before["adapter"] else "model before"
            models = [(kind, old, "before", None)]
        else:
            folders = [it.path(way["shards"]).resolve() for it in (one, request)
                       if "shards" in (way := it.way)]  # fmt: skip
            same = len(folders) == 2 and folders[0] == folders[1]
            why = None if same else f"request {name!r} made it; remove it by hand"
            began = f"request {name!r} began with it: erase that one"
            models = [
                ("earlier model", made, "after", why),
                ("earlier model", old, "before", began),
            ]
        for kind, path, part, why in models:
            digest, place = known["model"][part]["digest"], Path(path)
            if place.is_dir():
                yield Item(kind, place, 0, why if digest in _digests(place) else _ANOTHER)


def _digests(model: Path) -> set[str]:
    """Of a model's folder, and of it without GGUF files, which may have been added."""
    but = ("", ".gguf") if any(model.glob("*.gguf")) else ("",)
    return {weights_digest(ModelSpec("", str(model)), but=one) for one in but}


def _model_before(one: Item, requests: Path, roots: list[Path]) -> Iterator[Item]:
    """Its weights, where they are still those of the record; of an earlier request all of it."""
    old, why = one.path, one.why
    made_here = _owner(old, requests) is not None
    if not (why or made_here) and not any(
        old.resolve().is_relative_to(root.resolve()) for root in roots
    ):
        why = "it is outside the folders that the config writes to; remove it by hand"
    if made_here:
        yield Item.at("model before" if one.kind in _BEFORE else one.kind, old, why)
        return
    for path in sorted(old.iterdir()):
        shard = is_routed(old) and path.name.startswith("shard-")
        known = _PARTS if path.is_dir() else _WEIGHTS
        if shard or known.fullmatch(path.name):
            yield Item.at(one.kind, path, why)
        elif path.suffix in _HOLDS or (path.name == EXPORTED and any(path.glob("*.gguf"))):
            yield Item.at(one.kind, path, _UNKNOWN)


def _is_model(place: Path) -> bool:
    return any((place / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def _beside(model: Path) -> Iterator[Item]:
    """What the Trainer and Axolotl write into the folder of a model."""
    for path in sorted(model.iterdir()) if model.is_dir() else ():
        inside, link = path.rglob("*"), path.is_symlink()
        holds = link or any(p.suffix in _HOLDS or p.name == "trainer_state.json" for p in inside)
        if path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name) and holds:
            yield Item.at("checkpoint", path)
        elif path.name in COPIES and _is_model(path) and holds:
            yield Item.at(COPIES[path.name], path)
        elif path.name == "debug.log" or (path.name == "runs" and not link and _is_log(path)):
            yield Item.at("log", path)


def _is_log(folder: Path) -> bool:
    """TensorBoard's, and nothing else."""
    inside = [one.name for one in folder.rglob("*") if not one.is_dir()]
    return bool(inside) and all(name.startswith("events.out.tfevents.") for name in inside)


def _of_run(
    root: Path,
    found: list[Path],
    before: list[Item],
    files: set[str],
    earlier: Mapping[str, Any],
) -> Iterator[Item]:
    """Below a folder that the config writes to; what a later training has written there stays.

    Args:
        files: Digests of the model before.
        earlier: Of an earlier `erase`: ``removed`` and ``kept``, and whether it ended.
    """
    place, ended = root.resolve(), "time" in earlier
    gone, kept = ({*earlier.get(part, ())} for part in ("removed", "kept"))
    mine = [one for one in before if place in (real := one.path.resolve(), *real.parents)]
    own = shas(root)
    copy = bool(own) and own <= files
    there = copy or any(one.why != _ANOTHER for one in mine)
    # Before anything was erased, weights may have been removed by hand.
    bare = not ended and not any(path.suffix in _HOLDS for path in root.iterdir())

    def judged(item: Item) -> Item:
        real = item.path.resolve()
        since = not (there or bare or real in kept) or (
            ended and item.kind != "log" and real in gone
        )
        return replace(item, why=_ANOTHER) if since else item

    if _is_model(root):
        yield from map(judged, _beside(root))
        if all(one.path.resolve() != place for one in mine):
            kind = "copy of the model before" if copy else "another model"
            why = "it is of the same run; remove it by hand" if there else _ANOTHER
            yield from _model_before(Item(kind, root, 0, None if copy else why), root, [root])
    if (root / SHARDS).is_file() and (root / "work").is_dir():
        why = "the shards are being trained" if is_held(root) else None
        yield Item.at("work of the shards", root / "work", why)
    for path in listed(root):
        if path.parent.resolve().is_relative_to(place):
            item = Item.at("listed by its run", path)
            yield item if path in found or not _is_model(root) else judged(item)
    for path in sorted(root.iterdir()):
        axolotls = _PREPARED.fullmatch(path.name) and (path / "state.json").is_file()
        if axolotls or is_prepared(path):
            if any(one.resolve().is_relative_to(path.resolve()) for one in found):
                yield Item.at("prepared data", path)


def _of_requests(request: Request, found: list[Path], with_data: bool) -> Iterator[Item]:
    """Work of the request, its rows, and what other requests hold of them."""
    folder, requests = request.folder, request.folder.parent
    kept = None if with_data else "audits need it; `--with-data` removes it too"
    for kind, name, why in (("work of the run", "work", None),
                            *(("rows of the request", one, kept) for one in KEPT)):  # fmt: skip
        if (folder / name).is_dir():
            yield Item.at(kind, folder / name, why)
    done = Ledger(requests).accepted()
    for path in found:
        owner, why = _owner(path, requests), None
        if owner is None or path.is_symlink():
            continue
        real = path.resolve()
        name = real.relative_to(owner.resolve()).as_posix()
        if path.absolute() not in (real, owner.absolute() / name):  # behind a link
            continue
        part = name.split("/")[0]
        if part in (name, "model") or (owner == folder and part in (*KEPT, "work")):
            continue
        if owner.name not in done:
            why = f"request {owner.name!r} was not carried out: finish it, or remove its folder"
        elif part in KEPT and not _SPENT.fullmatch(name):
            why = f"audits of request {owner.name!r} need it; remove it by hand"
        elif part == "work":
            path = owner / part
        yield Item.at("file with their texts", path, why)


# --- what stays ---------------------------------------------------------------------------------


def _reasons(request: Request, config: Mapping[str, Any]) -> Callable[[Path], str | None]:
    """Why a place stays; of two reasons the first."""
    ledger, requests = Ledger(request.folder.parent), request.folder.parent
    current, done = ledger.current() or {}, ledger.accepted()
    bases = (current.get("base") or {}).get("name"), request.way["base"]
    below, own = (name and request.here(name) for name in bases)
    models = [
        (current.get("path"), "it is the current model"),
        (below, "the current model stands on it"),
        (own or request.path("model"), "the model of this request stands on it"),
        (request.facts["base"], "it is the base model"),
    ]
    for path in sorted(requests.glob("*/request.json")):
        if path.parent.name not in done and (one := Request.load(path.parent)).id not in done:
            why = f"request {one.id!r}, which was not carried out yet, begins with it"
            before = one.facts["before"]
            models += [(source, why) for source in (before["adapter"], before["model"])]
    data = [
        (request.root / name, f"the config reads it (`{key}`)")
        for key in ("datasets", "test_datasets")
        for entry in entries(config, key)
        for name in _sources(entry)
    ]
    yours = [(Path.home(), "it is your home"), (Path.cwd(), "you work in it")]
    yours += [(requests, "it is the folder of the requests")]
    known = [
        (kind, Path(place).resolve(), why)
        for kind, ones in (("model", models), ("data", data), ("yours", yours))
        for place, why in ones
        if place and Path(place).exists()
    ]

    def stays(path: Path) -> str | None:
        real = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
        # A checkpoint within a model's folder is not that model.
        beside = None if real.name.startswith("checkpoint-") else real.parent
        for kind, place, why in known:
            part = {"model": beside == place, "data": real.is_relative_to(place)}.get(kind)
            if part or place.is_relative_to(real):
                return why
        return None

    return stays


def _sources(entry: Mapping[str, Any]) -> Iterator[str]:
    """Paths that an entry of ``datasets`` names."""
    files = entry.get("data_files") or []
    for one in [entry.get("path"), *(files.values() if isinstance(files, Mapping) else [files])]:
        yield from [one] if isinstance(one, str) else map(str, one or ())
