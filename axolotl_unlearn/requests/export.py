"""One file about a request for whoever asks: record, report, how to verify, dates, a reply.

A zip archive without compression, names in order, without times or owners: equal content gives
equal bytes. ``manifest.json`` has the SHA-256 of every other file, so one signature is of all of
them; a file changed, added or taken away is found. It holds no row, no key and no other request's
entry; that of one subject of many holds a record of its own and nothing of the others.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from dateutil.relativedelta import relativedelta
from pydantic import model_validator

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write
from axolotl_unlearn.requests import record
from axolotl_unlearn.requests.record import check_key, places, sign_file, signature
from axolotl_unlearn.requests.request import (
    Excerpt,
    Form,
    Head,
    Ledger,
    Line,
    Sha,
    canonical,
    counted,
    fault,
    home,
    model_facts,
    one_line,
    read_head,
)  # fmt: skip
from axolotl_unlearn.requests.verify import NOT_COMPARED, Verified, compare_model, verify

MANIFEST, ENTRIES, HANDLING = "manifest.json", "ledger-entries.jsonl", "handling.json"
REPLY, HOW = "REPLY.txt", "VERIFY.txt"
#: Of an export, beside the manifest and its signature; there is no other.
FILES = (record.RECORD, record.PAGE, ENTRIES, HANDLING, REPLY, HOW)
SIGNATURE = f"{MANIFEST}.sig"
#: Bytes of an export at most, before anything of it is read.
LARGEST = 1 << 26
#: What the entries of a request hold that is of no subject but this one.
OF_ALL = ("entry", "time", "event", "request", "record")


class Handling(Form):
    """What only the owner knows of a request, and where its ledger ended; no part of the record."""

    by: Line
    to: Line
    reference: Line
    received: date
    due: date
    done: date
    late: bool
    request: Line
    subject: Line | None
    record: Sha
    head: Head

    @model_validator(mode="after")
    def _is_late(self) -> Handling:
        if self.late is not (self.done > self.due):
            raise ValueError
        return self


def export(
    folder: Path,
    out: Path,
    *,
    by: str = "",
    to: str = "",
    reference: str = "",
    received: date | None = None,
    due: date | None = None,
    subject: str | None = None,
    private_key: Path | None = None,
) -> dict[str, Any]:
    """Write the archive ``out``; returns what ``handling.json`` says.

    Args:
        by, to, reference: For the reply, as they are given.
        received, due: Default: when the request was made, and a month later (GDPR, Article 12(3)).
        subject: One of a request of many: its record and page, and nothing of the others.
        private_key: PEM file that signs the manifest.

    Raises:
        UnlearnError: The request is not as recorded, or there is no such subject.
    """
    folder, given = home(folder), {"by": by, "to": to, "reference": reference}
    for name, text in given.items():
        one_line(text, f"--{name}")
    if out.exists():
        says = f"{out} exists; name another file with --out."
        raise UnlearnError(says, code="requests.out-exists")
    verify(folder).require()
    place, ledger = folder, Ledger(folder.parent)
    if subject is not None:
        known = record.read(folder)["predicate"].get("files", {})
        place = folder / "subjects" / subject
        if f"subjects/{subject}/{record.RECORD}" not in known:
            says = f"{folder} has no subject {subject!r}; see subjects.json."
            raise fault("record.no-subject", says)
    files = {name: (place / name).read_bytes() for name in (record.RECORD, record.PAGE)}
    statement = record.parsed(place / record.RECORD, files[record.RECORD])
    entries, request = ledger.of(folder.name), statement["predicate"]["request"]
    if subject is not None:
        entries = [{key: one[key] for key in OF_ALL if key in one} for one in entries]
    received = received or date.fromisoformat(request["created"][:10])
    due = due or received + relativedelta(months=1)
    done = date.fromisoformat(request["recorded"][:10])
    if received > min(due, done):
        says = f"received {received}, but due {due} and done {done}; correct --received or --due."
        raise UnlearnError(says, code="requests.dates")
    handling = Handling(
        **given,
        received=received,
        due=due,
        done=done,
        late=done > due,
        request=request["id"],
        subject=subject,
        record=_known(entries),
        head=ledger.head(),
    ).model_dump(mode="json", exclude_unset=True)
    files |= {
        ENTRIES: b"".join(canonical(entry) + b"\n" for entry in entries),
        HANDLING: canonical(handling) + b"\n",
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
        says = f"{folder}: its export has {len(made)} bytes; ask for a subject."
        raise fault("record.too-large", says)
    write(out, made, private=True)
    return handling


def _known(entries: list[dict[str, Any]]) -> str | None:
    """The digest of the record that the last of a request's entries knows."""
    return next((one["record"] for one in reversed(entries) if "record" in one), None)


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
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return canonical(digests) + b"\n"


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
    known = {*FILES, MANIFEST, SIGNATURE}
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        # Each entry of the directory begins so, and a text never holds it.
        if len(raw) > LARGEST or raw.count(b"PK\x01\x02") > len(known):
            raise ValueError
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                raise ValueError
            files = {one.filename: archive.read(one) for one in members if one.filename in known}
        if len(files) != len(members) or _archive(files) != raw:
            raise ValueError
    except Exception:  # zipfile raises what its parts raise: EOFError, RuntimeError, zlib.error
        says = f"{path} is no exported request, or it was changed; ask for it again."
        raise fault("record.no-export", says) from None
    return files


def _compared(path: Path, files: Mapping[str, bytes]) -> tuple[str, str]:
    """All files but the manifest's signature with the manifest, and with each other."""
    there = {name: content for name, content in files.items() if name in FILES}
    if set(there) != set(FILES) or _manifest(there) != files.get(MANIFEST):
        gone = sorted({*FILES, MANIFEST} - set(files))
        more = f"{gone[0]} is missing" if gone else "a file is not the one of its manifest"
        raise fault("record.changed", f"{path}: {more}; ask for it again.")
    _read(path, files)
    return "same", f"all {len(there)} files as in the manifest"


def _read(path: Path, files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Record and handling, where both are what an export holds and fit each other."""
    statement = record.parsed(path, files[record.RECORD])
    request = statement["predicate"]["request"]
    try:
        handling = Handling.read(files[HANDLING])
        entries = [Excerpt.read(line) for line in io.BytesIO(files[ENTRIES])]
        known, whole = _known(entries), hashlib.sha256(files[record.RECORD]).hexdigest()
        same = {"request": request["id"], "subject": request.get("subject"), "record": known}
        same |= {"done": request["recorded"][:10]}
        sound = same.items() <= handling.items() and handling["head"]["entries"] >= len(entries)
        if not sound or (handling["subject"] is None and known != whole):
            raise ValueError
    except ValueError:
        says = f"{path}: its parts contradict each other; ask for it again."
        raise fault("record.contradicts", says) from None
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
        found.compare("signature", "other", signature, Path(scratch) / MANIFEST, public_key)
    found.compare("files", "changed", _compared, path, files)
    if found.faults:
        return found
    statement, handling = _read(path, files)
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
    return found.compare("model", "other", lambda: ("same", compare_model(place, statement)))


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
