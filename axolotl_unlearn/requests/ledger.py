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
import json
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

LEDGER, HEAD, KEY = "ledger.jsonl", "ledger.head", "ledger.key"
#: What stands for the line before the first one.
NOTHING = "0" * 64
#: Of entries since heads have an HMAC. Without one their end was cut.
FORMAT = 2


def canonical(value: Any) -> bytes:
    """The one way to write a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: NaN or infinity, which JSON does not know.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


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

    # --- reading ---------------------------------------------------------------------------------

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first, after the whole chain was checked.

        Raises:
            UnlearnError: The first fault: a line that was changed, removed, swapped or added, or a
                key that is not the ledger's.
        """
        path = self.folder / LEDGER
        if not path.exists():
            if (self.folder / HEAD).exists() and self._head()[0]:
                raise _fault("missing", f"{path} is missing but {HEAD} knows of it; restore it.")
            return self._begun([])
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return self._begun(self._checked(file.read()))

    def _begun(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """An empty ledger is a new one only where no request has a record."""
        records = [] if entries else sorted(self.folder.glob("*/record.json"))
        if records:
            says = f"{self.folder / LEDGER} has no line but {records[0]} is there; restore it."
            raise _fault("missing", says)
        return entries

    def _checked(self, raw: bytes) -> list[dict[str, Any]]:
        path, key = self.folder / LEDGER, self.key()
        lines = raw.split(b"\n")
        if lines.pop():
            raise _fault(
                "half-line",
                f"{path}: what follows line {len(lines)} is no whole line (a crash while it was "
                "written?); remove it.",
            )
        entries: list[dict[str, Any]] = []
        before = NOTHING
        for number, line in enumerate(lines, start=1):
            entry = _parsed(line) or {}
            if (entry.get("entry"), entry.get("previous")) != (number, before):
                raise _fault(
                    "chain",
                    f"{path}, line {number}: the chain is broken: this line or the one before was "
                    "changed, removed or added; restore the file from a copy.",
                )
            if key is not None and entry.get("key") != _key_id(key):
                raise _fault(
                    "other-key",
                    f"{self.folder / KEY} is not the key that {LEDGER} was written with; put the "
                    "right key file back.",
                )
            if key is not None and not _is_ours(key, "entry", entry):
                raise _fault(
                    "mac",
                    f"{path}, line {number} was not written with {KEY}; restore the file from a "
                    "copy.",
                )
            entries.append(entry)
            before = hashlib.sha256(line).hexdigest()
        *head, bound = self._head()
        # An append that was killed before it wrote the head: only who has the key can have made it.
        killed = entries and key is not None and head == [len(entries) - 1, entries[-1]["previous"]]
        new = any("format" in entry for entry in entries[: -1 if killed else None])
        if (killed or head == [len(entries), before]) and (bound or not new):
            return entries
        raise _fault(
            "end",
            f"{path} has {len(entries)} entries that do not end where {HEAD} says (entry "
            f"{head[0]}): the end was changed, removed or added; restore both files from a copy.",
        )

    def _head(self) -> tuple[int, str, bool]:
        """Number of entries, SHA-256 of the last, and whether an HMAC binds them."""
        path, ledger = self.folder / HEAD, self.folder / LEDGER
        if not path.exists():
            if ledger.exists() and ledger.stat().st_size:
                raise _fault(
                    "missing", f"{path} is missing; restore it: it says where {LEDGER} ends."
                )
            return 0, NOTHING, True
        head, key = read_head(path), self.key()
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
        for one, after in zip(entries, entries[1:], strict=False):
            if after["time"] < one["time"]:
                said.append(
                    f"line {after['entry']} is of {after['time']}, before line {one['entry']}"
                )
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
        entries, count = self.entries(), copy["entries"]
        there = entries[count - 1 : count] if count else []
        last = hashlib.sha256(canonical(there[0])).hexdigest() if there else NOTHING
        if len(entries) < count or last != copy["last"]:
            raise _fault(
                "older-copy",
                f"{self.folder / LEDGER} has {len(entries)} entries and does not go on from entry "
                f"{count} of the head that was kept: it is an older copy or another ledger; "
                "restore the right one.",
            )
        return f"goes on from entry {count} of the head that was kept"

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
                    f"request {request!r} was carried out on {entry['time']} "
                    f"({self.folder / LEDGER}, line {entry['entry']}); make a new request with "
                    "`axolotl-unlearn request new`.",
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
        key, path = self._own_key(), self.folder / LEDGER
        if not path.exists():
            self.entries()  # a ledger that is gone is not begun again
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            raw = file.read()
            entries = self._begun(self._checked(raw))
            time = now()
            if entries and time < entries[-1]["time"]:
                raise _fault(
                    "clock",
                    f"the clock says {time}, which is before the last entry of {path} "
                    f"({entries[-1]['time']}); set the clock.",
                )
            if not (self.folder / HEAD).exists():
                self._write_head(key, 0, NOTHING)
            entry = {
                "entry": len(entries) + 1,
                "format": FORMAT,
                "time": time,
                "event": event,
                "request": request,
                "key": _key_id(key),
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
                raise _fault(
                    "disk",
                    f"{path} cannot be written ({error.strerror}); make room and run the command "
                    "again.",
                ) from None
            self._write_head(key, len(entries) + 1, hashlib.sha256(line).hexdigest())
        return entry

    def inside(self, path: Path | str) -> str:
        """A path as the ledger writes it: relative to its folder, so that both can be moved."""
        return os.path.relpath(path, self.folder) if Path(path).exists() else str(path)

    def _write_head(self, key: bytes, entries: int, last: str) -> None:
        head = {"entries": entries, "last": last}
        write(
            self.folder / HEAD,
            canonical(head | {"mac": _mac(key, "head", canonical(head))}) + b"\n",
        )

    def head(self) -> dict[str, Any]:
        """``entries`` and ``last``, to be kept elsewhere: see `goes_on_from`."""
        entries = self.entries()
        last = hashlib.sha256(canonical(entries[-1])).hexdigest() if entries else NOTHING
        return {"entries": len(entries), "last": last}

    # --- key -------------------------------------------------------------------------------------

    def key(self) -> bytes | None:
        """The key, or None where it is not here (then HMACs cannot be checked).

        Raises:
            UnlearnError: It is no key, or others may read it.
        """
        path = self.folder / KEY
        try:
            raw = path.read_bytes()
            key = bytes.fromhex(raw.decode("ascii"))
        except FileNotFoundError:
            return None
        except ValueError:
            key = b""
        if len(key) != 32 or raw != f"{key.hex()}\n".encode():  # every byte counts
            raise _fault(
                "no-key",
                f"{path} is not a key (64 hexadecimal digits and a line end); put the key back.",
            )
        if path.stat().st_mode & 0o077:
            raise _fault("open-key", f"{path} can be read by others; run `chmod 600 {path}`.")
        return key

    def _own_key(self) -> bytes:
        """The key; a new one for a new ledger."""
        if (known := self.key()) is not None:
            return known
        path = self.folder / KEY
        if (self.folder / LEDGER).exists() or (self.folder / HEAD).exists():
            raise _fault(
                "missing", f"{path} is missing; put back the key that {LEDGER} was written with."
            )
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


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A JSON object written in the one way, else None."""
    try:
        value = json.loads(line)
        return value if isinstance(value, dict) and canonical(value) == line else None
    except (ValueError, RecursionError):
        return None


def read_head(path: Path) -> dict[str, Any]:
    """A head, or a copy of one: ``entries``, ``last`` and since 0.3 ``mac``.

    Raises:
        UnlearnError: It is none.
    """
    with path.open("rb") as file:
        raw = file.read(1000)
    head = _parsed(raw[:-1]) if raw.endswith(b"\n") else None
    names = {"entries", "last"}
    if (
        head is None
        or set(head) not in (names, names | {"mac"})
        or not isinstance(head["entries"], int)
        or head["entries"] < 0
    ):
        raise _fault("head", f"{path} was changed; restore it from a copy.")
    return head


def _fault(kind: str, says: str) -> UnlearnError:
    return UnlearnError(says, code=f"ledger.{kind}")


def _is_ours(key: bytes, kind: str, signed: Mapping[str, Any]) -> bool:
    rest = {name: value for name, value in signed.items() if name != "mac"}
    return hmac.compare_digest(str(signed.get("mac")), _mac(key, kind, canonical(rest)))


def _mac(key: bytes, kind: str, content: bytes) -> str:
    return hmac.new(key, kind.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def _key_id(key: bytes) -> str:
    return _mac(key, "key", b"")[:16]
