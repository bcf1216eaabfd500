"""Which requests were carried out, in an order that nobody can change unseen.

``requests/ledger.jsonl`` holds one entry a line. Each has the SHA-256 of the line before, and an
HMAC under the key of the folder; ``ledger.head`` says how many lines there are and the SHA-256 of
the last, under an HMAC too, since a chain alone does not know that its end is missing. So a line
changed, removed, swapped or added before the end is found by anybody, and whatever is written by
somebody without the key is found with it. An older copy of all files is found with a copy of the
head that was kept elsewhere; an export holds one (`Ledger.goes_on_from`).

``ledger.key`` also makes the ids under which documents appear in records: a plain hash of a name
can be guessed, so it would be personal data itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write
from axolotl_unlearn.requests.statement import Entry, Head, canonical

LEDGER, HEAD, KEY = "ledger.jsonl", "ledger.head", "ledger.key"
#: What stands for the line before the first one.
NOTHING = "0" * 64
#: Of entries since heads have an HMAC. Without one their end was cut.
FORMAT = 2


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
        key, entries, before = self.key(), [], NOTHING
        *lines, rest = raw.split(b"\n")
        if rest:
            says = f"{self.path}: what follows line {len(lines)} is no whole line; remove it."
            raise _fault("half-line", says)
        for number, line in enumerate(lines, start=1):
            try:
                entry = Entry.read(line + b"\n")
            except ValueError:
                entry = {"entry": 0, "previous": ""}
            kind, says = "chain", "this line or the one before was changed, removed or added"
            sound = (entry["entry"], entry["previous"]) == (number, before)
            if sound and key is not None:
                sound = _is_ours(key, "entry", entry)
                kind, says = (
                    "mac",
                    f"it was not written with this {KEY}; put the right one back, or",
                )
            if not sound:
                raise _fault(kind, f"{self.path}, line {number}: {says}; restore it from a copy.")
            entries.append(entry)
            before = hashlib.sha256(line).hexdigest()
        *head, bound = self._head(empty=not entries)
        # An append that was killed before it wrote the head: only who has the key can have made it.
        killed = entries and key is not None and head == [len(entries) - 1, entries[-1]["previous"]]
        new = any("format" in entry for entry in entries[: -1 if killed else None])
        if not (killed or head == [len(entries), before]) or (new and not bound):
            raise _fault(
                "end" if self.path.exists() else "missing",
                f"{self.path} has {len(entries)} entries that do not end where {HEAD} says (entry "
                f"{head[0]}): the end was changed, removed or added; restore both from a copy.",
            )
        # An empty ledger is a new one only where no request has a record.
        if not entries and (records := sorted(self.folder.glob("*/record.json"))):
            says = f"{self.path} has no line but {records[0]} is there; restore it."
            raise _fault("missing", says)
        return entries

    def _head(self, empty: bool = False) -> tuple[int, str, bool]:
        """Number of entries, SHA-256 of the last, and whether an HMAC binds them."""
        path, key = self._head_path, self.key()
        if not path.exists():
            if not empty:
                raise _fault("missing", f"{path} is missing; restore it: it says where all ends.")
            return 0, NOTHING, True
        head = read_head(path)
        if key is not None and "mac" in head and not _is_ours(key, "head", head):
            raise _fault("mac", f"{path} was not written with {KEY}; restore it from a copy.")
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
        known = {entry["request"] for entry in entries}
        for path in sorted(self.folder.glob("*/record.json")):
            if path.parent.name not in known:
                said.append(f"{path} is of a request that no line is about: was the end removed?")
        return said

    def goes_on_from(self, copy: Mapping[str, Any]) -> str:
        """Compare with a head that was kept elsewhere (`read_head`); a sentence.

        Raises:
            UnlearnError: This is an older copy, or another ledger.
        """
        count = copy["entries"]
        if len(self.entries()) < count or self.head(count)["last"] != copy["last"]:
            raise _fault(
                "older-copy",
                f"{self.path} does not go on from entry {count} of the head that was kept: it is "
                "an older copy or another ledger; restore the right one.",
            )
        return f"goes on from entry {count} of the head that was kept"

    def head(self, count: int | None = None) -> dict[str, Any]:
        """``entries`` and ``last`` of the first entries, to be kept elsewhere: `goes_on_from`."""
        entries = self.entries()[:count]
        last = hashlib.sha256(canonical(entries[-1])).hexdigest() if entries else NOTHING
        return {"entries": len(entries), "last": last}

    def of(self, request: str) -> list[dict[str, Any]]:
        """The entries about a request, oldest first."""
        return [entry for entry in self.entries() if entry["request"] == request]

    def accepted(self) -> list[dict[str, Any]]:
        """The entries of requests that were carried out, oldest first."""
        return [entry for entry in self.entries() if entry["event"] == "accepted"]

    def folders(self) -> list[Path]:
        """Those of all requests that were carried out, oldest first.

        Raises:
            UnlearnError: The ledger is broken, or a folder is gone.
        """
        folders = [self.folder / entry["request"] for entry in self.accepted()]
        for folder in folders:
            if not folder.is_dir():
                raise UnlearnError(
                    f"{folder} is missing but the ledger knows of it; restore it.",
                    code="requests.folder-gone",
                )
        return folders

    def current(self) -> dict[str, Any] | None:
        """The model after the last accepted request: path (from here), digest, base."""
        if not (accepted := self.accepted()):
            return None
        model = accepted[-1]["model"]
        place = self.folder / model["path"]  # the name of a model on a hub stays
        return model | {"path": os.path.normpath(place) if place.exists() else model["path"]}

    def refuse_twice(self, request: str) -> None:
        """Raises `UnlearnError`: the request was carried out already."""
        for entry in self.accepted():
            if entry["request"] == request:
                raise UnlearnError(
                    f"request {request!r} was carried out on {entry['time']} ({self.path}, line "
                    f"{entry['entry']}); make a new one with `axolotl-unlearn request new`.",
                    code="requests.run-twice",
                )

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
            if entries and time < entries[-1]["time"]:
                last = f"the last entry of {self.path} ({entries[-1]['time']})"
                says = f"the clock says {time}, which is before {last}; set the clock."
                raise _fault("clock", says)
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
                raise _fault("disk", f"{self.path} {says}") from None
            self._write_head(key, len(entries) + 1, hashlib.sha256(line).hexdigest())
        return entry

    def inside(self, path: Path | str) -> str:
        """A path as the ledger writes it: relative to its folder, so that both can be moved."""
        return os.path.relpath(path, self.folder) if Path(path).exists() else str(path)

    def _write_head(self, key: bytes, entries: int, last: str) -> None:
        head = {"entries": entries, "last": last}
        bound = head | {"mac": _mac(key, "head", canonical(head))}
        write(self._head_path, canonical(bound) + b"\n")

    # --- key -------------------------------------------------------------------------------------

    def key(self) -> bytes | None:
        """The key, or None where it is not here (then HMACs cannot be checked).

        Raises:
            UnlearnError: It is no key, or others may read it; or no file is in the place of one.
        """
        for place in (self.path, self._head_path, self._key_path):
            if place.exists() and not place.is_file():  # a pipe would be read for ever
                raise _fault("no-file", f"{place} is no file; restore it from a copy.")
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
            raise _fault("no-key", f"{path} {says}")
        if path.stat().st_mode & 0o077:
            raise _fault("open-key", f"{path} can be read by others; run `chmod 600 {path}`.")
        return key

    def _own_key(self) -> bytes:
        """The key; a new one for a new ledger."""
        if (known := self.key()) is not None:
            return known
        path = self._key_path
        if self.path.exists() or self._head_path.exists():
            says = f"is missing; put back the key that {LEDGER} was written with."
            raise _fault("missing", f"{path} {says}")
        self.folder.mkdir(parents=True, exist_ok=True)
        key = secrets.token_bytes(32)
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another command was first
            return self._own_key()
        with os.fdopen(number, "w") as file:
            file.write(key.hex() + "\n")
            file.flush()
            os.fsync(number)
        ignored = self.folder / ".gitignore"
        if not ignored.exists():
            ignored.write_text(f"# Whoever has the key can guess who is in the records.\n{KEY}\n")
        return key

    def keyed(self, text: str) -> str:
        """The id of a document in everything that leaves the folder: an HMAC, 32 hex digits."""
        return _mac(self._own_key(), "document", text.encode())[:32]

    def keyed_file(self, path: Path) -> str:
        """HMAC-SHA256 of a file's content, hex."""
        with path.open("rb") as file:
            mac = hmac.new(self._own_key(), b"file\0", hashlib.sha256)
            return hashlib.file_digest(file, lambda: mac).hexdigest()


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
        raise _fault("head", f"{path} was changed; restore it from a copy.") from None


def _fault(kind: str, says: str) -> UnlearnError:
    return UnlearnError(says, code=f"ledger.{kind}")


def _is_ours(key: bytes, kind: str, signed: Mapping[str, Any]) -> bool:
    rest = {name: value for name, value in signed.items() if name != "mac"}
    return hmac.compare_digest(signed["mac"], _mac(key, kind, canonical(rest)))


def _mac(key: bytes, kind: str, content: bytes) -> str:
    return hmac.new(key, kind.encode() + b"\0" + content, hashlib.sha256).hexdigest()
