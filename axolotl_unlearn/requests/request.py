"""The folder of requests: each request, and the ledger of all.

A request is a folder of its own:

    request.json    what was chosen and from which config (ids and digests, no text of a row)
    finetune.yml    copy of the config that made the model
    data/           forget, retain and held-out rows as they stand in the user's files
    teacher.yml  forget.yml    what `request run` trains with
    work/           teacher, model under work, stamps and logs of the run
    eval/  attacks/ verdict.json    what was measured
    way.json  exact.json    of an exact way: how it was carried out, what it has shown
    model/          the result, once its verdict is good or was accepted

Folders are for their owner alone (0700), files too (0600): rows to forget are sensitive.

`Ledger` says which requests were carried out, in an order that nobody can change unseen.
``ledger.jsonl`` holds one entry a line. Each has the SHA-256 of the line before, and an HMAC under
the key of the folder; ``ledger.head`` says how many lines there are and the SHA-256 of the last,
under an HMAC too, since a chain alone does not know that its end is missing. So a line changed,
removed, swapped or added before the end is found by anybody, and whatever is written by somebody
without the key is found with it. An older copy of all files is found with a copy of the head that
was kept elsewhere; an export holds one (`Ledger.goes_on_from`).

``ledger.key`` also makes the ids under which documents appear in records: a plain hash of a name
can be guessed, so it would be personal data itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt

from axolotl_unlearn import files
from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError, plain
from axolotl_unlearn.store import digest

SCHEMA = 1
#: How long a start waits for what a killed run of the same folder has left.
LOCK_SECONDS = 20.0
LEDGER, HEAD, KEY = "ledger.jsonl", "ledger.head", "ledger.key"
#: What stands for the line before the first one.
NOTHING = "0" * 64
#: In the folder of a request until `request new` has come to its end.
MAKING = ".new"
#: Of entries since heads have an HMAC. Without one their end was cut.
FORMAT = 2
#: ``way.json`` says how a request is carried out, ``exact.json`` what an exact way has shown.
WAY, PROOF = "way.json", "exact.json"


@dataclass(frozen=True)
class Request:
    """A request on disk; ``facts`` is its request.json."""

    folder: Path
    facts: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path | str) -> Request:
        """Raises `UnlearnError` where there is no request."""
        folder = home(folder)
        path, again = folder / "request.json", "make the request again"
        try:
            facts = read_json(path)
        except (OSError, ValueError, RecursionError):
            facts = None
        if facts is None and path.exists():  # a pipe, too
            raise fault("requests.unreadable", f"{path} cannot be read; {again}.")
        if facts is None:
            require_made(folder)
            what = "holds no request" if folder.exists() else "does not exist"
            cure = "make a request with `axolotl-unlearn request new`"
            raise fault("requests.none", f"{folder} {what}; {cure}.")
        try:
            if "after" in facts:  # that of a record v0.1
                facts.setdefault("adapter", facts["after"]["adapter"] is not None)
            before, _, _ = facts["before"], facts["adapter"], facts["counts"]["forget"]
            texts = [facts["id"], before["model"], before["adapter"] or "", facts.get("base") or ""]
            sound = facts["schema"] == SCHEMA and all(plain(one) == one for one in texts)
            away = not (request := cls(folder, facts)).at_home
        except (KeyError, TypeError, AttributeError, ValueError):
            sound = False
        if not sound:
            raise fault("requests.version", f"{path} is not of this version; {again}.")
        for holder, key in ((facts, "base"), (before, "model"), (before, "adapter")):
            if away and holder.get(key):
                holder[key] = request.here(holder[key])
        return request

    @property
    def at_home(self) -> bool:
        """We are where `request new` ran, so that paths may be relative."""
        return self.root.resolve() == Path.cwd()

    @property
    def id(self) -> str:
        return str(self.facts["id"])

    @property
    def root(self) -> Path:
        """Where `request new` ran, from the folder itself or from a link to it, whichever leads to
        the config: paths of the config are relative to it."""
        if (place := self.facts.get("root")) is None:
            return Path()
        link, real = (
            Path(os.path.normpath(one / place)) for one in (self.folder, self.folder.resolve())
        )
        there = (link / self.facts["config"]["path"]).is_file() or not real.is_dir()
        return link if there else real

    def here(self, name: str) -> str:
        """A path of the config as it is found from here; a name on a hub stays."""
        place = self.root / name
        return name if self.at_home or not place.exists() else os.path.abspath(place)

    @property
    def before(self) -> str:
        """The model before, as `axolotl-unlearn eval` takes it."""
        model = self.facts["before"]
        adapter = model.get("adapter")
        return f"{model['model']}+{adapter}" if adapter else str(model["model"])

    @property
    def way(self) -> Mapping[str, Any]:
        """How it is carried out: ``way`` (see `axolotl_unlearn.requests.ways`) and ``base``, the
        model under an adapter that comes out, else None."""
        return read_json(self.path(WAY)) or {"way": "match", "base": self.base}

    @property
    def base(self) -> str | None:
        """The model under an adapter that `match` trains; None where it trains the whole one."""
        return self.facts["before"]["model"] if self.facts["adapter"] else None

    @property
    def matched(self) -> bool:
        """It is carried out by `match`, so that tests have to show what an exact way proves."""
        return self.way["way"] == "match"

    @property
    def after(self) -> str:
        """The result, likewise; there once it was handed over."""
        return self.made(self.path("model"))

    def made(self, place: Path) -> str:
        """The result at another place."""
        base = self.way["base"]
        return f"{self.here(base)}+{place}" if base else str(place)

    @property
    def newest(self) -> Path:
        """The folder of the result, before or after it is handed over."""
        made = self.path("work", "model")
        return made if made.is_dir() else self.path("model")

    @property
    def result(self) -> str:
        """The result there, likewise."""
        return self.made(self.newest)

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def rows(self, part: str) -> Path:
        """The file of forget, retain or heldout rows."""
        return self.path("data", f"{part}.jsonl")


@contextmanager
def at_root(folder: Path | str) -> Iterator[Request]:
    """A request, where `request new` ran: paths of its configs are relative to it."""
    request = Request.load(folder)
    if request.at_home or not request.root.is_dir():
        yield request
        return
    place = request.folder.absolute()
    with chdir(request.root):
        yield Request.load(place)


# --- the ledger ----------------------------------------------------------------------------------


def canonical(value: Any) -> bytes:
    """The one way to write a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: NaN or infinity, which JSON does not know.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


Sha = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
#: Printed by `verify`: without line breaks and other control characters.
Line = Annotated[str, AfterValidator(lambda text: one_line(text, "a field"))]


class Form(BaseModel):
    """A JSON object of one line; other keys than those named are a fault."""

    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)

    @classmethod
    def read(cls, raw: bytes) -> dict[str, Any]:
        """Raises ValueError: It is another object, or written in another way."""
        value = cls.model_validate_json(raw).model_dump(mode="json", exclude_unset=True)
        if canonical(value) + b"\n" != raw:
            raise ValueError
        return value


class Facts(Form):
    """One that may hold more."""

    model_config = ConfigDict(extra="allow")


class Head(Form):
    """Where a ledger ends; without ``mac`` before 0.3, and in an export."""

    entries: int = Field(ge=0)
    last: Sha
    mac: Sha = ""


class Excerpt(Facts):
    """What an entry of a ledger says of a request as a whole."""

    entry: PositiveInt
    time: Line
    event: Line
    request: Line
    record: Sha = ""


class Entry(Excerpt):
    """An entry of a ledger."""

    mac: Sha
    previous: Sha


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def model_facts(path: Path | str) -> dict[str, Any]:
    """What a ledger says of a model: ``path``, ``digest``, ``base``.

    Args:
        path: A model folder, an adapter folder (its base is read from adapter_config.json), or
            base+adapter.

    Returns:
        ``digest``: SHA-256 over weights, configs and tokenizer of the folder itself; ``base``: None
        or ``{name, digest}`` of the model under an adapter. A digest is None on a hub.

    Raises:
        UnlearnError: It is no model.
    """
    from axolotl_unlearn.models import ModelSpec, parse_models, weights_digest

    def known(folder: str) -> str | None:
        return weights_digest(ModelSpec("", folder)) if Path(folder).is_dir() else None

    spec = parse_models([str(path)])[0]
    base = {"name": spec.model, "digest": known(spec.model)} if spec.adapter else None
    own = spec.adapter or spec.model
    return {"path": own, "digest": known(own), "base": base}


class Ledger:
    """The ledger of a folder of requests.

    Args:
        folder: ``requests/``; need not exist before the first entry.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path, self._head_path, self._key_path = (
            self.folder / name for name in (LEDGER, HEAD, KEY)
        )

    # --- reading ---------------------------------------------------------------------------------

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first, after the whole chain was checked.

        Raises:
            UnlearnError: The first fault: a line that was changed, removed, swapped or added, or a
                key that is not the ledger's.
        """
        self.key()
        if not self.path.exists():
            return self._checked(b"")
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return self._checked(file.read())

    def _checked(self, raw: bytes) -> list[dict[str, Any]]:
        key = self.key()
        entries, before = _chain(raw, key, self.path)
        *head, bound = self._head(empty=not entries)
        # An append that was killed before it wrote the head: only who has the key can have made it.
        killed = entries and key is not None and head == [len(entries) - 1, entries[-1]["previous"]]
        new = any("format" in entry for entry in entries[: -1 if killed else None])
        if not (killed or head == [len(entries), before]) or (new and not bound):
            says = f"{self.path} has {len(entries)} entries that do not end where {HEAD} says"
            cure = f"(entry {head[0]}): its end was changed; restore both from a copy"
            code = "ledger.end" if self.path.exists() else "ledger.missing"
            raise fault(code, f"{says} {cure}.")
        # An empty ledger is a new one only where no request has a record.
        if not entries and (records := sorted(self.folder.glob("*/record.json"))):
            says = f"{self.path} has no line but {records[0]} is there; restore it."
            raise fault("ledger.missing", says)
        return [*map(dict, entries)]  # those of the next who asks are as they were

    def _head(self, empty: bool = False) -> tuple[int, str, bool]:
        """Number of entries, SHA-256 of the last, and whether an HMAC binds them."""
        path, key = self._head_path, self.key()
        if not path.exists():
            if not empty:
                says = f"{path} is missing; restore it: it says where all ends."
                raise fault("ledger.missing", says)
            return 0, NOTHING, True
        head = read_head(path)
        if key is not None and "mac" in head and not _is_ours(key, "head", head):
            says = f"{path} was not written with {KEY}; restore it from a copy."
            raise fault("ledger.mac", says)
        return head["entries"], head["last"], "mac" in head

    def warnings(self) -> list[str]:
        """What is no fault of a chain, and yet a reason to look: sentences."""
        entries, said = self.entries(), []
        if entries and not self._head()[2]:
            said.append(
                f"{HEAD} is of a version that did not bind it: whether the end is missing cannot "
                "be told; the next entry binds it"
            )
        if entries and self.key() is None:
            said.append(f"without {KEY} nobody can tell whether it was written anew or cut short")
        for one, after in pairwise(entries):
            if after["time"] < one["time"]:
                line = f"line {after['entry']} is of {after['time']}"
                said.append(f"{line}, before line {one['entry']}")
        return [*said, *self.unknown().values()]

    def unknown(self) -> dict[str, str]:
        """Requests with a record though no line says that they were carried out, as of a ledger
        that was restored from an older copy; a sentence of each. A copy of one that is known under
        another name is none."""
        known, says = self.accepted(), "no line says that it was carried out: was the end removed?"
        records = {entry.get("record") for entry in self.entries()}
        return {
            one.parent.name: f"{one}: {says}"
            for one in sorted(self.folder.glob("*/record.json"))
            if one.parent.name not in known and not (one.is_file() and digest(one) in records)
        }

    def goes_on_from(self, copy: Mapping[str, Any]) -> str:
        """Compare with a head that was kept elsewhere (`read_head`); a sentence.

        Raises:
            UnlearnError: This is an older copy, or another ledger.
        """
        count = copy["entries"]
        if len(self.entries()) < count or self.head(count)["last"] != copy["last"]:
            says = f"{self.path} does not go on from entry {count} of the head that was kept: it is"
            cure = "an older copy or another ledger; restore the right one"
            raise fault("ledger.older-copy", f"{says} {cure}.")
        return f"goes on from entry {count} of the head that was kept"

    def head(self, count: int | None = None) -> dict[str, Any]:
        """``entries`` and ``last`` of the first entries, to be kept elsewhere: `goes_on_from`."""
        entries = self.entries()[:count]
        last = hashlib.sha256(canonical(entries[-1])).hexdigest() if entries else NOTHING
        return {"entries": len(entries), "last": last}

    def of(self, request: str) -> list[dict[str, Any]]:
        """The entries about a request, oldest first."""
        return [entry for entry in self.entries() if entry["request"] == request]

    def accepted(self) -> dict[str, dict[str, Any]]:
        """The entries of requests that were carried out, by their names, oldest first."""
        return {one["request"]: one for one in self.entries() if one["event"] == "accepted"}

    def cannot_list(self) -> str | None:
        """A request whose rows are gone, where `erase` has written a list of what is deleted."""
        if not any(entry["event"] == "erased" for entry in self.entries()):
            return None
        gone = (one for one in self.accepted() if not (self.folder / one / "data").is_dir())
        return next(gone, None)

    def folders(self) -> list[Path]:
        """Those of all requests that were carried out, oldest first.

        Raises:
            UnlearnError: The ledger is broken, or a folder is gone.
        """
        folders = [self.folder / name for name in self.accepted()]
        if gone := [folder for folder in folders if not folder.is_dir()]:
            says = f"{gone[0]} is missing but the ledger knows of it; restore it."
            raise fault("requests.folder-gone", says)
        return folders

    def current(self) -> dict[str, Any] | None:
        """The model after the last accepted request: path (from here), digest, base."""
        if not (accepted := self.accepted()):
            return None
        model = [*accepted.values()][-1]["model"]
        place = self.folder / model["path"]  # the name of a model on a hub stays
        return model | {"path": os.path.normpath(place) if place.exists() else model["path"]}

    def refuse_twice(self, request: str) -> None:
        """Raises `UnlearnError`: the request was carried out already."""
        if entry := self.accepted().get(request):
            place = f"{entry['time']} ({self.path}, line {entry['entry']})"
            cure = "make a new one with `axolotl-unlearn request new`"
            says = f"request {request!r} was carried out on {place}; {cure}."
            raise fault("requests.run-twice", says)

    # --- writing ---------------------------------------------------------------------------------

    def append(self, event: str, request: str, **facts: Any) -> dict[str, Any]:
        """Write one entry; whole and on the disk when this returns.

        Args:
            event: "accepted", "erased", ...
            facts: JSON values. No text or name of a person: see `keyed`.

        Raises:
            UnlearnError: The ledger is broken, the key is missing or wrong, or the disk is full;
                then nothing was changed.
        """
        key = self._own_key()
        if not self.path.exists():
            self.entries()  # a ledger that is gone is not begun again
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            raw = file.read()
            entries, time = self._checked(raw), now()
            if entries and time < (last := entries[-1]["time"]):
                where = f"before the last entry of {self.path} ({last})"
                says = f"the clock says {time}, which is {where}; set the clock."
                raise fault("ledger.clock", says)
            if not self._head_path.exists():
                self._write_head(key, 0, NOTHING)
            entry = {
                "entry": len(entries) + 1,
                "format": FORMAT,
                "time": time,
                "event": event,
                "request": request,
                "previous": hashlib.sha256(raw.split(b"\n")[-2]).hexdigest() if raw else NOTHING,
                **facts,
            }
            entry["mac"] = _mac(key, "entry", canonical(entry))
            line = canonical(entry)
            try:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                os.ftruncate(file.fileno(), len(raw))
                says = f"cannot be written ({error.strerror}); make room, run the command again."
                raise fault("ledger.disk", f"{self.path} {says}") from None
            self._write_head(key, len(entries) + 1, hashlib.sha256(line).hexdigest())
        return entry

    def _write_head(self, key: bytes, entries: int, last: str) -> None:
        head = {"entries": entries, "last": last}
        bound = head | {"mac": _mac(key, "head", canonical(head))}
        files.write(self._head_path, canonical(bound) + b"\n")

    # --- key -------------------------------------------------------------------------------------

    def key(self) -> bytes | None:
        """The key, or None where it is not here (then HMACs cannot be checked).

        Raises:
            UnlearnError: It is no key, or others may read it; or no file is in the place of one.
        """
        for place in (self.path, self._head_path, self._key_path):
            if place.exists() and not place.is_file():  # a pipe would be read for ever
                raise fault("ledger.no-file", f"{place} is no file; restore it from a copy.")
        path = self._key_path
        try:
            raw = path.read_bytes()
            key = bytes.fromhex(raw.decode("ascii"))
        except FileNotFoundError:
            return None
        except ValueError:
            key = b""
        if len(key) != 32 or raw != f"{key.hex()}\n".encode():  # every byte counts
            says = "is not a key (64 hexadecimal digits and a line end); put the key back."
            raise fault("ledger.no-key", f"{path} {says}")
        if path.stat().st_mode & 0o077:
            raise fault("ledger.open-key", f"{path} can be read by others; run `chmod 600 {path}`.")
        return key

    def _own_key(self) -> bytes:
        """The key; a new one for a new ledger."""
        if (known := self.key()) is not None:
            return known
        path = self._key_path
        if self.path.exists() or self._head_path.exists():
            says = f"is missing; put back the key that {LEDGER} was written with."
            raise fault("ledger.missing", f"{path} {says}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.locked(self.folder):
            if not path.exists():  # else another command was first
                ignored = self.folder / ".gitignore"
                if not ignored.exists():
                    says = "# Whoever has the key can guess who is in the records."
                    files.write(ignored, f"{says}\n{KEY}\n")
                files.write(path, secrets.token_bytes(32).hex() + "\n", private=True)
        return self._own_key()

    def keyed(self, text: str) -> str:
        """The id of a document in everything that leaves the folder: an HMAC, 32 hex digits."""
        content = text.encode("utf-8", "surrogatepass")  # a row that stays may have half of a pair
        return _mac(self._key_of_ids, "document", content)[:32]

    _key_of_ids = cached_property(_own_key)  # read once: there is an id for every row

    def keyed_file(self, path: Path) -> str:
        """HMAC-SHA256 of a file's content, hex."""
        with path.open("rb") as file:
            mac = hmac.new(self._own_key(), b"file\0", hashlib.sha256)
            return hashlib.file_digest(file, lambda: mac).hexdigest()


@lru_cache(4)
def _chain(raw: bytes, key: bytes | None, path: Path) -> tuple[list[dict[str, Any]], str]:
    """Entries, and the SHA-256 of the last; equal bytes under one key are checked once. Raises
    `UnlearnError`: the first fault."""
    entries, before, restore = [], NOTHING, "restore it from a copy"
    *lines, rest = raw.split(b"\n")
    if rest:
        says = f"{path}: what follows line {len(lines)} is no whole line; remove it."
        raise fault("ledger.half-line", says)
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            entry = Entry.read(line + b"\n")
        except ValueError:
            entry = {"entry": 0, "previous": ""}
        if (entry["entry"], entry["previous"]) != (number, before):
            says = f"{where}: this line or the one before was changed, removed or added"
            raise fault("ledger.chain", f"{says}; {restore}.")
        if key is not None and not _is_ours(key, "entry", entry):
            says = f"{where}: it was not written with this {KEY}; put the right one back"
            raise fault("ledger.mac", f"{says}, or {restore}.")
        entries.append(entry)
        before = hashlib.sha256(line).hexdigest()
    return entries, before


def read_head(path: Path) -> dict[str, Any]:
    """A head, or a copy of one: ``entries``, ``last`` and since 0.3 ``mac``.

    Raises:
        UnlearnError: It is none.
    """
    with path.open("rb") as file:
        raw = file.read(1000)
    try:
        return Head.read(raw)
    except ValueError:
        raise fault("ledger.head", f"{path} was changed; restore it from a copy.") from None


def _is_ours(key: bytes, kind: str, signed: Mapping[str, Any]) -> bool:
    rest = {name: value for name, value in signed.items() if name != "mac"}
    return hmac.compare_digest(signed["mac"], _mac(key, kind, canonical(rest)))


def _mac(key: bytes, kind: str, content: bytes) -> str:
    return hmac.new(key, kind.encode() + b"\0" + content, hashlib.sha256).hexdigest()


# --- files ---------------------------------------------------------------------------------------


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """The right to a folder: a lock that lasts as long as anybody has the descriptor open.

    Raises:
        UnlearnError: Somebody else keeps it.
    """
    with (folder / ".lock").open("a") as file:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    says = f"{folder} is being run by another process"
                    cure = "wait until it has ended, or take another folder"
                    raise fault("requests.held", f"{says}; {cure}.") from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield file.fileno()


def is_held(folder: Path) -> bool:
    """Whether somebody keeps the right to a folder."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # another one where nobody has ever kept it
        return isinstance(error, BlockingIOError)
    return False


def cores() -> int:
    """How many may compute at a time: `OMP_NUM_THREADS`, or all."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (int(given) if given.isdecimal() else os.cpu_count()) or 1


def weights(folder: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of each file of weights of a model, adapter or routed folder, as a record writes
    them."""
    files = [*folder.glob("*.safetensors"), *folder.glob("shard-*/*.safetensors")]
    return {str(p.relative_to(folder)): {"sha256": digest(p)} for p in sorted(files)}


def shas(model: Path) -> set[str]:
    """SHA-256 of each file of weights: a copy may have another config."""
    return {one["sha256"] for one in weights(model).values()}


def lines_of(folder: Path, *parts: str) -> list[dict[str, Any]]:
    """The rows of those parts of a request that are there."""
    files = (folder / "data" / f"{part}.jsonl" for part in parts)
    return [row for file in files if file.is_file() for row in read_json_lines(file)]


def read_json(path: Path) -> Any:
    """What a command of ours wrote there, or None."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def require_made(folder: Path) -> None:
    """Raises `UnlearnError` where `request new` has not come to its end."""
    if (folder / MAKING).exists() and not (folder / "request.json").exists():
        says = f"{folder} is being made by `request new`, or is left of one that was stopped"
        raise fault("requests.half-made", f"{says}; then remove it, and make the request again.")


def home(folder: Path | str) -> Path:
    """The folder of a request with its own name: that of the working folder is not ``.``, and of a
    link to one whose ledger is not beside the link it is where the link leads."""
    folder = Path(folder)
    while folder.is_symlink() and folder.exists() and not (folder.parent / LEDGER).exists():
        folder = folder.parent / os.readlink(folder)
    return folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))


def fault(code: str, says: str) -> UnlearnError:
    """One sentence, on one line whatever is in it."""
    return UnlearnError(plain(says), code=code)


def one_line(text: str, option: str) -> str:
    """A text that is printed and signed.

    Raises:
        UnlearnError: It has a line break or another control character.
    """
    if plain(text) != text:
        says = f"{option}: {plain(text)!r} has a line break or a control character"
        raise fault("requests.control-character", f"{says}; give one line of plain text.")
    return text


#: Readable by the owner alone, in a folder of the owner's.
write_private = partial(files.write, private=True)
write_json = partial(files.write_json, private=True, ensure_ascii=False)
write_lines = partial(files.write_lines, private=True)


def write_yaml(path: Path, head: str, content: Mapping[str, Any]) -> None:
    write_private(path, f"# {head}\n" + yaml.safe_dump(dict(content), sort_keys=False))
