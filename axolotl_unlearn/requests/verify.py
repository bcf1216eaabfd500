"""Is everything as it was recorded? And one file about a request for whoever asks.

`verify` looks at the ledger, and where it is whole at files, model and signature, each by itself:
each has a field and a sentence, whatever is at fault with another; the exit code says which is at
fault first.

`export` writes record, report, how to verify, dates and a reply into a zip archive without
compression, names in order, without times or owners: equal content gives equal bytes.
``manifest.json`` has the SHA-256 of every other file, so one signature is of all of them; a file
changed, added or taken away is found. It holds no row, no key and no other request's entry; that of
one subject of many holds a record of its own and nothing of the others.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from shlex import quote
from typing import Any

from dateutil.relativedelta import relativedelta
from pydantic import model_validator

from axolotl_unlearn.data.suppression import LIST, Suppression
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.files import write
from axolotl_unlearn.models import parse_models
from axolotl_unlearn.requests import record
from axolotl_unlearn.requests.record import signature
from axolotl_unlearn.requests.request import (
    Excerpt,
    Form,
    Head,
    Ledger,
    Line,
    Request,
    Sha,
    canonical,
    digest,
    fault,
    home,
    model_facts,
    one_line,
    plain,
    read_head,
)

NOT_COMPARED = "not compared"
MANIFEST, ENTRIES, HANDLING = "manifest.json", "ledger-entries.jsonl", "handling.json"
REPLY, HOW = "REPLY.txt", "VERIFY.txt"
#: Of an export, beside the manifest and its signature; there is no other.
FILES = (record.RECORD, record.PAGE, ENTRIES, HANDLING, REPLY, HOW)
SIGNATURE = f"{MANIFEST}.sig"
#: Bytes of an export at most, before anything of it is read.
LARGEST = 1 << 26
#: What the entries of a request hold that is of no subject but this one.
OF_ALL = ("entry", "time", "event", "request", "record")


@dataclass
class Verified:
    """What `verify` compared.

    Attributes:
        ledger: whole, "end not bound", broken, or not compared.
        files: same, changed, or "some not compared" (without the key of the ledger).
        model: same, other, or not compared.
        signature: owner (that of the public key), none, other, or not compared (no key given).
        says: A sentence for each, and of what cannot be told.
        faults: What was not as it was.
    """

    ledger: str = NOT_COMPARED
    files: str = NOT_COMPARED
    model: str = NOT_COMPARED
    signature: str = NOT_COMPARED
    says: list[str] = field(default_factory=list)
    faults: list[UnlearnError] = field(default_factory=list)

    def compare(
        self, part: str, otherwise: str, compared: Callable[..., tuple[str, str]], *given: Any
    ) -> Verified:
        """Set a field to what a comparison finds, or where it raises to ``otherwise``."""
        try:
            value, said = compared(*given)
        except (OSError, UnlearnError) as error:
            if isinstance(error, OSError):  # a folder in its place, no right to read it, ...
                says = f"{error.filename} cannot be read ({error.strerror}); restore or allow it."
                error = fault("record.unreadable", says)
            value, said = otherwise, str(error)
            self.faults.append(error)
        setattr(self, part, value)
        return self.say(f"{part}: {said}")

    def say(self, *said: str) -> Verified:
        """Add sentences; whatever is in them, each is one line."""
        self.says += map(plain, said)
        return self

    @property
    def exit(self) -> int:
        """2: files or ledger; 4: the signature; 5: the model is not as recorded. 3: nothing speaks
        against it, but nobody's signature was found or compared, or an end is not bound. Else 0."""
        if self.ledger == "broken" or self.files == "changed":
            return 2
        if self.signature == "other":
            return 4
        if self.model == "other":
            return 5
        return 0 if (self.signature, self.ledger) == ("owner", "whole") else 3

    def require(self) -> Verified:
        """Raises the first fault, an `UnlearnError`."""
        if self.faults:
            raise self.faults[0]
        return self


def verify(
    folder: Path | str,
    model: str | None = None,
    public_key: Path | str | None = None,
    head: Mapping[str, Any] | None = None,
) -> Verified:
    """Check ledger, record, model, data and signature of a request.

    Args:
        model: Where the model is now, if not where it was made; folder or base+adapter.
        public_key: PEM file of whoever signed the record.
        head: That of the ledger, as it was kept elsewhere (`export.kept_head`).

    Raises:
        UnlearnError: There is no such public key, or nothing that reads signatures.
    """
    folder, found = home(folder), Verified()
    ledger = Ledger(folder.parent)
    record.check_key(public_key)
    if found.compare("ledger", "broken", _chain, ledger, head).faults:
        return found
    statement: dict[str, Any] = {}  # believed once it was compared
    found.compare("files", "changed", _compare_files, folder, statement, ledger)
    if statement:
        found.compare("model", "other", _compare_model, folder, statement, ledger, model)
        found.compare("signature", "other", signature, folder / record.RECORD, public_key)
    return found


def _chain(ledger: Ledger, head: Mapping[str, Any] | None) -> tuple[str, str]:
    warned = ledger.warnings()
    said = [f"{counted(len(ledger.entries()), 'entry', 'entries')}, unbroken"]
    said += [ledger.goes_on_from(head)] if head else []
    return "end not bound" if warned else "whole", "; ".join([*said, *warned])


def _compare_files(folder: Path, statement: dict[str, Any], ledger: Ledger) -> tuple[str, str]:
    """The record, every other file of the request's folder, and the suppression list."""
    statement |= record.read(folder)
    value, said = compare_files(folder, statement, ledger)
    path = folder.parent / LIST
    if not path.exists() and any(entry["event"] == "erased" for entry in ledger.entries()):
        says = f"{path}, which `request erase` wrote, is gone, so deleted rows may be learned again"
        if ledger.cannot_list():
            raise fault("record.changed", f"{says}; restore it.")
        said += f"; {says}: `request suppress` writes it anew"
    if path.exists() and ledger.key() is None:
        said += "; suppression list: cannot be compared without ledger.key"
    elif path.exists():
        said += f"; suppression list: {len(Suppression.read(path).digests)} digests as written"
    return value, said


def compare_files(
    folder: Path, statement: Mapping[str, Any], ledger: Ledger, only: tuple[str, ...] = ("",)
) -> tuple[str, str]:
    """Compare the files of a request with its record; the field of `Verified` and a sentence.

    Args:
        only: Beginnings of the names that are compared.

    Raises:
        UnlearnError: The first that is not as recorded.
    """
    predicate = statement["predicate"]
    # v0.1 and v0.2 have the rows in a place of their own; v0.1 binds no other file.
    recorded = {f"data/{part}.jsonl": one for part, one in predicate.get("data", {}).items()}
    recorded |= predicate.get("files", {})
    if "files" not in predicate:
        only = ("data/",) if only == ("",) else ()
    began = "begun" in last_erasure(ledger.of(folder.name))
    files, recorded = (
        {
            n: one
            for n, one in every.items()
            if n.startswith(only)
            and not (record.DRAFTS.fullmatch(n) or (began and n == record.ERASED))
        }
        for every in (record.bound_files(folder), recorded)
    )

    def fine(name: str) -> bool:
        return name.startswith(record.ROWS) or erased(ledger, folder, name)

    gone, uncompared = _same_files(files, recorded, folder, fine, ledger)
    said = [f"{len(recorded) - gone - uncompared} others of the request as recorded"]
    said += [f"{gone} gone (rows, or what `request erase` removed)"] * bool(gone)
    said += [f"{uncompared} cannot be compared without ledger.key"] * bool(uncompared)
    said += ["a record of v0.1 binds rows and model alone"] * ("files" not in predicate)
    whole = not uncompared and "files" in predicate
    return "same" if whole else "some not compared", "; ".join(said)


def last_erasure(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of `request erase`: it has "begun", if it was stopped before the removal was recorded."""
    return next((e for e in reversed(entries) if e["event"] == "erased" or "begun" in e), {})


def erased(ledger: Ledger, folder: Path, name: str) -> bool:
    """`request erase` has removed this file of a request, or began to."""
    entries = [entry for entry in ledger.of(folder.name) if entry["event"] == "erasing"]
    gone = {one["path"] for entry in entries for one in entry["places"] if "path" in one}
    return any(f"{name}/".startswith(f"{one}/") for one in gone)


def _compare_model(
    folder: Path, statement: Mapping[str, Any], ledger: Ledger, model: str | None
) -> tuple[str, str]:
    request = Request.load(folder)
    if model is None and not request.path("model").exists():
        if (last := [*ledger.accepted()][-1]) != folder.name:
            return NOT_COMPARED, f"gone since request {last!r} came after it"

    def gone(file: str) -> bool:
        return model is None and erased(ledger, folder, f"model/{file}")

    return compare_model(model or request.after, statement, gone)


def compare_model(
    source: str, statement: Mapping[str, Any], gone: Callable[[str], bool] = lambda name: False
) -> tuple[str, str]:
    """Compare the files of a model with the subjects of a record, and its base.

    Args:
        source: A folder, or base+adapter.
        gone: Whether a file may be missing.

    Raises:
        UnlearnError: The first that is not as recorded.
    """
    (spec,) = parse_models([source])
    record.model_files(Path(spec.adapter or spec.model))  # before a pipe is read
    facts, before = model_facts(source), statement["predicate"]["model"]["after"]["base"]
    base, place = facts["base"], Path(facts["path"])
    if (before is None) != (base is None):
        full, adapter = ("a full model", "an adapter")[:: -1 if base else 1]
        says = f"{source} is {full} but the record is of {adapter}; name the one that it made."
        raise fault("record.other-kind", says)
    check_base(source, base, before)
    recorded = {one["name"]: one["digest"] for one in statement["subject"]}
    removed, _ = _same_files(record.model_files(place), recorded, place, gone)
    left = len(recorded) - removed
    return "same", f"all {left} files as recorded" + (", base too" if base else "")


def _same_files(
    files: dict[str, Path], recorded: Mapping[str, Mapping[str, str]], place: Path,
    gone: Callable[[str], bool], ledger: Ledger | None = None,
) -> tuple[int, int]:  # fmt: skip
    """How many are gone, and how many cannot be compared without the key of the ledger. Raises
    `UnlearnError`: the first that is not as recorded; of a model without ``ledger``."""
    kind, cure = ("changed", "restore it") if ledger else ("other-model", "it is another model")
    lacking = uncompared = 0
    for name, known in recorded.items():
        path, says, plain = files.pop(name, None), "", "sha256" in known
        if path is None:
            says, lacking = "" if gone(name) else "is missing", lacking + 1
        elif path.is_symlink() and ledger:
            says = "is a link now"
        elif not plain and ledger and ledger.key() is None:
            uncompared += 1
        elif (digest(path) if plain else ledger.keyed_file(path)) not in known.values():
            says = "is not the file of the record"
        if says:
            raise fault(f"record.{kind}", f"{place / name} {says}; {cure}.")
    if files:
        says = f"{place / min(files)} is not in the record: it was added"
        raise fault(f"record.{kind}", f"{says}; {cure}.")
    return lacking, uncompared


def check_base(
    source: str, base: Mapping[str, Any] | None, recorded: Mapping[str, Any] | None
) -> None:
    """Raises `UnlearnError`: both are adapters, of different bases."""
    if not base or not recorded:
        return
    which = "digest" if base["digest"] and recorded["digest"] else "name"
    if base[which] != recorded[which]:
        says = f"{source} stands on {base['name']}, which is not the base model of the record"
        cure = f"({recorded['name']}); write base+adapter with the right one"
        raise fault("record.other-base", f"{says} {cure}.")


# --- one file for whoever asks -------------------------------------------------------------------


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
    if "begun" in last_erasure(entries):  # of what is gone the record says that it is there
        says = f"{folder}: `request erase` was stopped; run it again, then answer."
        raise fault("requests.half-erased", says)
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
    _compared(out, files)  # what another command has changed meanwhile is not signed
    if private_key is not None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / MANIFEST
            path.write_bytes(files[MANIFEST])
            files[SIGNATURE] = record.sign_file(path, private_key).read_bytes()
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
        places=record.places(facts.get("erased") or {}),
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
    record.check_key(public_key)
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
        f"ledger: {counted(head['entries'], 'entry', 'entries')} when it was exported "
        f"(`request verify FOLDER --head {quote(str(path))}`)",
        f"dates, as the sender wrote them: received {handling['received']}, due {handling['due']}, "
        f"done {handling['done']}" + (", late" if handling["late"] else ""),
    )
    if model is None:
        return found.say(f"model: {NOT_COMPARED}; give `--model`")
    return found.compare("model", "other", compare_model, model, statement)


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
