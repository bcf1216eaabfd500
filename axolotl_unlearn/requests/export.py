"""One file about a request for whoever asks: record, report, how to verify, dates, a reply.

A zip archive without compression, names in order, without times or owners: equal content gives
equal bytes. ``manifest.json`` has the SHA-256 of every other file, so one signature is of all of
them; a file changed, added or taken away is found. It holds no row, no key and no other request's
entry; that of one subject of many holds a record of its own and nothing of the others.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from dateutil.relativedelta import relativedelta

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write
from axolotl_unlearn.requests import record
from axolotl_unlearn.requests.ledger import Ledger, canonical, model_facts, read_head
from axolotl_unlearn.requests.pages import places
from axolotl_unlearn.requests.record import fault
from axolotl_unlearn.requests.request import counted, home, one_line, plain
from axolotl_unlearn.requests.verify import (
    NOT_COMPARED,
    Verified,
    check_key,
    compare_model,
    sign_file,
    signature,
    verify,
)

MANIFEST, ENTRIES, HANDLING = "manifest.json", "ledger-entries.jsonl", "handling.json"
REPLY, HOW = "REPLY.txt", "VERIFY.txt"
#: Of an export, beside the manifest and its signature; there is no other.
FILES = (record.RECORD, record.PAGE, ENTRIES, HANDLING, REPLY, HOW)
SIGNATURE = f"{MANIFEST}.sig"
#: Bytes of an export at most, before anything of it is read.
LARGEST = 1 << 26
#: What the entries of a request hold that is of no subject but this one.
OF_ALL = ("entry", "time", "event", "request", "record")


@dataclass(frozen=True)
class Handling:
    """What only the owner knows: nothing of it is in the record.

    Attributes:
        by, to, reference: For the reply, as they are given.
        received, due: Default: when the request was made, and a month later (GDPR, Article 12(3)).
    """

    by: str = ""
    to: str = ""
    reference: str = ""
    received: date | None = None
    due: date | None = None


def export(
    folder: Path,
    out: Path,
    given: Handling,
    subject: str | None = None,
    private_key: Path | None = None,
) -> dict[str, Any]:
    """Write the archive ``out``; returns what ``handling.json`` says.

    Args:
        subject: One of a request of many: its record and page, and nothing of the others.
        private_key: PEM file that signs the manifest.

    Raises:
        UnlearnError: The request is not as recorded, or there is no such subject.
    """
    folder = home(folder)
    for name in ("by", "to", "reference"):
        one_line(getattr(given, name), f"--{name}")
    if out.exists():
        raise UnlearnError(
            f"{out} exists; name another file with --out.", code="requests.out-exists"
        )
    verify(folder).require()
    whole, ledger = record.read(folder), Ledger(folder.parent)
    place = folder if subject is None else folder / "subjects" / subject
    if subject is not None and f"subjects/{subject}/{record.RECORD}" not in whole["predicate"].get(
        "files", {}
    ):
        raise UnlearnError(
            f"{folder} has no subject {subject!r}; see its subjects.json.", code="record.no-subject"
        )
    files = {name: (place / name).read_bytes() for name in (record.RECORD, record.PAGE)}
    statement = json.loads(files[record.RECORD])
    name = whole["predicate"]["request"]["id"]
    entries = [one for one in ledger.entries() if one["request"] == name]
    if subject is not None:
        entries = [{key: one[key] for key in OF_ALL if key in one} for one in entries]
    handling = _handling(statement, given, subject)
    handling |= {"record": entries_record(entries), "head": ledger.head()}
    files |= {
        ENTRIES: b"".join(canonical(entry) + b"\n" for entry in entries),
        HANDLING: json.dumps(handling, indent=1, ensure_ascii=False).encode() + b"\n",
        REPLY: reply(statement, handling).encode(),
        HOW: (Path(__file__).parent / "verify.txt").read_bytes(),
    }
    files[MANIFEST] = _manifest(files)
    if private_key is not None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / MANIFEST
            path.write_bytes(files[MANIFEST])
            files[SIGNATURE] = sign_file(path, private_key).read_bytes()
    made = _archive(files)
    if len(made) > LARGEST:
        raise fault("too-large", f"{folder}: its export has {len(made)} bytes; ask for a subject.")
    write(out, made, private=True)
    return handling


def entries_record(entries: list[Any]) -> str | None:
    """The digest of the record that the last of a request's entries knows."""
    known = [entry["record"] for entry in entries if "record" in entry]
    return known[-1] if known else None


def _handling(statement: Mapping[str, Any], given: Handling, subject: str | None) -> dict[str, Any]:
    request = statement["predicate"]["request"]
    received = given.received or date.fromisoformat(request["created"][:10])
    due = given.due or received + relativedelta(months=1)
    done = date.fromisoformat(request["recorded"][:10])
    dates = {"received": received, "due": due, "done": done}
    return {
        **asdict(given),
        **{key: value.isoformat() for key, value in dates.items()},
        "late": done > due,
        "request": request["id"],
        "subject": subject,
    }


def reply(statement: Mapping[str, Any], handling: Mapping[str, Any]) -> str:
    """A letter to whoever asked, of what may be claimed; names and reference are the user's own."""
    from jinja2 import Environment, PackageLoader

    templates = Environment(loader=PackageLoader(__package__, "."), trim_blocks=True)
    facts = statement["predicate"]
    return templates.get_template("reply.txt.j2").render(
        handling=handling,
        facts=facts,
        places=places(facts.get("erased") or {}),
        exact=facts.get("way", {}).get("because"),
        counted=counted,
    )


def _manifest(files: Mapping[str, bytes]) -> bytes:
    return (
        canonical({n: hashlib.sha256(content).hexdigest() for n, content in files.items()}) + b"\n"
    )


def _archive(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in sorted(files):
            one = zipfile.ZipInfo(name)  # of 1980
            one.create_system, one.external_attr = 3, 0o600 << 16
            archive.writestr(one, files[name])
    return made.getvalue()


def _opened(path: Path) -> dict[str, bytes]:
    """The files of an archive that `export` wrote, all as they were written.

    Nothing is unpacked: members have known names and are stored as they are, so that together they
    are no larger than the file, which is bounded.

    Raises:
        UnlearnError: It is something else.
    """
    if path.stat().st_size > LARGEST:
        raise fault("no-export", f"{path} is too large for an export; ask for it again.")
    raw, known = path.read_bytes(), {*FILES, MANIFEST, SIGNATURE}
    most = len(known)
    try:
        # Each entry of the directory begins so, and a text never holds it.
        if raw.count(b"PK\x01\x02") > most:
            raise ValueError
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                raise ValueError
            files = {one.filename: archive.read(one) for one in members if one.filename in known}
        if len(files) != len(members) or _archive(files) != raw:
            raise ValueError
    except Exception:  # zipfile raises what its parts raise: EOFError, RuntimeError, zlib.error
        raise fault(
            "no-export", f"{path} is no exported request, or it was changed; ask for it again."
        ) from None
    return files


def _compared(path: Path, files: Mapping[str, bytes]) -> tuple[str, str]:
    """All files but the manifest's signature with the manifest, and the record with its entries."""
    there = {name: content for name, content in files.items() if name in FILES}
    if set(there) != set(FILES) or _manifest(there) != files.get(MANIFEST):
        gone = sorted({*FILES, MANIFEST} - set(files))
        more = f"{gone[0]} is missing" if gone else "a file is not the one of its manifest"
        raise fault("changed", f"{path}: {more}; ask for it again.")
    return "same", f"all {len(there)} files as in the manifest"


def _read(path: Path, files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Record and handling, where both are what an export holds and fit each other."""
    statement = record.parsed(path, files[record.RECORD])
    try:
        entries = [json.loads(line) for line in files[ENTRIES].splitlines()]
        handling = json.loads(files[HANDLING])
        known = entries_record(entries)
        days = [
            date.fromisoformat(handling[key]).isoformat() for key in ("received", "due", "done")
        ]
        texts = [handling[key] for key in ("by", "to", "reference", "request", "subject")]
        sound = all(one is None or plain(one) == one for one in texts)
        sound &= days == [handling[key] for key in ("received", "due", "done")]
        sound &= handling["record"] == known is not None
        head = handling["head"]
        sound &= isinstance(head["entries"], int) and isinstance(head["last"], str)
        sound &= set(head) == {"entries", "last"} and head["entries"] >= len(entries)
        sound &= handling["late"] is (handling["done"] > handling["due"])
        sound &= handling["request"] == statement["predicate"]["request"]["id"]
        sound &= handling["subject"] == statement["predicate"]["request"].get("subject")
        sound &= handling["done"] == statement["predicate"]["request"]["recorded"][:10]
        if handling["subject"] is None:
            sound &= hashlib.sha256(files[record.RECORD]).hexdigest() == known
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise fault("contradicts", f"{path}: its parts contradict each other; ask for it again.")
    return statement, handling


def verify_export(
    path: Path, model: str | None = None, public_key: Path | str | None = None
) -> Verified:
    """Check an exported file; see `requests.verify`.

    Raises:
        UnlearnError: It is no export, or there is no such public key.
    """
    check_key(public_key)
    files, found = _opened(path), Verified()
    with tempfile.TemporaryDirectory() as scratch:
        for name in {MANIFEST, SIGNATURE} & set(files):
            (Path(scratch) / name).write_bytes(files[name])
        found.compare("signature", lambda: signature(Path(scratch) / MANIFEST, public_key), "other")
    found.compare("files", lambda: _compared(path, files), "changed")
    if found.faults:
        return found
    try:
        statement, handling = _read(path, files)
    except UnlearnError as error:
        found.files = "changed"
        found.faults.append(error)
        return found.say(str(error))
    found.ledger = "whole" if found.signature == "owner" else NOT_COMPARED
    name, head = handling["request"], handling["head"]
    found.say(
        f"record: of request {name}, as its ledger entries know it",
        f"ledger: {head['entries']} entries when it was exported (`request verify --head {path}`)",
        f"dates, as the sender wrote them: received {handling['received']}, due {handling['due']}, "
        f"done {handling['done']}" + (", late" if handling["late"] else ""),
    )
    if model is None:
        return found.say(f"model: {NOT_COMPARED}; give `--model`")
    place = Path(model_facts(model)["path"])
    return found.compare("model", lambda: ("same", compare_model(place, statement)), "other")


def kept_head(path: Path) -> dict[str, Any]:
    """The head of a ledger that was kept elsewhere: a copy of ``ledger.head``, or an export.

    Raises:
        UnlearnError: It is neither.
    """
    if not zipfile.is_zipfile(path):
        return read_head(path)
    files = _opened(path)
    _compared(path, files)
    return _read(path, files)[1]["head"]
