"""Which requests were carried out, in an order that nobody can change unseen.

``requests/ledger.jsonl`` holds one entry a line. Each has the SHA-256 of the line before, and an
HMAC under the key of the folder; ``ledger.head`` says how many lines there are and the SHA-256 of
the last, since a chain alone does not know that its end is missing. So a changed, removed, swapped
or added line is found by anybody; a ledger written anew by somebody else is found with the key.

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

LEDGER, HEAD, KEY = "ledger.jsonl", "ledger.head", "ledger.key"
#: What stands for the line before the first one.
NOTHING = "0" * 64


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
                raise UnlearnError(f"{path} is missing but {HEAD} knows of it; restore it.")
            return []
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return self._checked(file.read())

    def _checked(self, raw: bytes) -> list[dict[str, Any]]:
        path, key = self.folder / LEDGER, self.key()
        lines = raw.split(b"\n")
        if lines.pop():
            raise UnlearnError(
                f"{path}: what follows line {len(lines)} is no whole line (a crash while it was "
                "written?); remove it."
            )
        entries: list[dict[str, Any]] = []
        before = NOTHING
        for number, line in enumerate(lines, start=1):
            entry = _parsed(line) or {}
            if (entry.get("entry"), entry.get("previous")) != (number, before):
                raise UnlearnError(
                    f"{path}, line {number}: the chain is broken: this line or the one before was "
                    "changed, removed or added; restore the file from a copy."
                )
            if key is not None and entry.get("key") != _key_id(key):
                raise UnlearnError(
                    f"{self.folder / KEY} is not the key that {LEDGER} was written with; put the "
                    "right key file back."
                )
            if key is not None and not hmac.compare_digest(
                str(entry.get("mac")),
                _mac(key, "entry", canonical({n: v for n, v in entry.items() if n != "mac"})),
            ):
                raise UnlearnError(
                    f"{path}, line {number} was not written with {KEY}; restore the file from a "
                    "copy."
                )
            entries.append(entry)
            before = hashlib.sha256(line).hexdigest()
        head = self._head()
        # An append that was killed before it wrote the head: only who has the key can have made it.
        killed = entries and key is not None and head == (len(entries) - 1, entry["previous"])
        if killed or head == (len(entries), before):
            return entries
        raise UnlearnError(
            f"{path} has {len(entries)} entries that do not end where {HEAD} says (entry "
            f"{head[0]}): the end was changed, removed or added; restore both files from a copy."
        )

    def _head(self) -> tuple[int, str]:
        path, ledger = self.folder / HEAD, self.folder / LEDGER
        if not path.exists():
            if ledger.exists() and ledger.stat().st_size:
                raise UnlearnError(f"{path} is missing; restore it: it says where {LEDGER} ends.")
            return 0, NOTHING
        raw = path.read_bytes()
        head = _parsed(raw[:-1]) if raw.endswith(b"\n") else None
        if head is None or set(head) != {"entries", "last"}:
            raise UnlearnError(f"{path} was changed; restore it from a copy.")
        return head["entries"], head["last"]

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
                raise UnlearnError(f"{folder} is missing but the ledger knows of it; restore it.")
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
                    "`axolotl-unlearn request new`."
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
            entries = self._checked(raw)
            if not (self.folder / HEAD).exists():
                self._write_head(0, NOTHING)
            entry = {
                "entry": len(entries) + 1,
                "time": now(),
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
                raise UnlearnError(
                    f"{path} cannot be written ({error.strerror}); make room and run the command "
                    "again."
                ) from None
            self._write_head(len(entries) + 1, hashlib.sha256(line).hexdigest())
        return entry

    def inside(self, path: Path | str) -> str:
        """A path as the ledger writes it: relative to its folder, so that both can be moved."""
        return os.path.relpath(path, self.folder) if Path(path).exists() else str(path)

    def _write_head(self, entries: int, last: str) -> None:
        write(self.folder / HEAD, canonical({"entries": entries, "last": last}) + b"\n")

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
            raise UnlearnError(
                f"{path} is not a key (64 hexadecimal digits and a line end); put the key back."
            )
        if path.stat().st_mode & 0o077:
            raise UnlearnError(f"{path} can be read by others; run `chmod 600 {path}`.")
        return key

    def _own_key(self) -> bytes:
        """The key; a new one for a new ledger."""
        if (known := self.key()) is not None:
            return known
        path = self.folder / KEY
        if (self.folder / LEDGER).exists() or (self.folder / HEAD).exists():
            raise UnlearnError(
                f"{path} is missing; put back the key that {LEDGER} was written with."
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


def _mac(key: bytes, kind: str, content: bytes) -> str:
    return hmac.new(key, kind.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def _key_id(key: bytes) -> str:
    return _mac(key, "key", b"")[:16]
