"""One file about a request for whoever asks: record, report, how to verify, dates, a reply.

A zip archive without compression, names in order, without times or owners: equal content gives
equal bytes, and a changed byte is found. It holds no row, no key and no other request's entry.
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
from axolotl_unlearn.requests.ledger import Ledger, canonical, model_facts
from axolotl_unlearn.requests.request import counted

MANIFEST, ENTRIES, HANDLING = "manifest.json", "ledger-entries.jsonl", "handling.json"
PARTS = (record.RECORD, record.SIGNATURE, record.PAGE)


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


def export(folder: Path, out: Path, given: Handling, subject: str | None = None) -> dict[str, Any]:
    """Write the archive ``out``; returns what ``handling.json`` says.

    Args:
        subject: One of a request of many: its record and page in the place of the whole page.

    Raises:
        UnlearnError: The request is not as recorded, or there is no such subject.
    """
    if out.exists():
        raise UnlearnError(f"{out} exists; name another file with --out.")
    record.verify(folder)
    statement = whole = record.read(folder)
    names = [name for name in PARTS if (folder / name).is_file()]
    if subject is not None:
        own = [f"subjects/{subject}/{name}" for name in (record.RECORD, record.PAGE)]
        if not set(own) <= set(whole["predicate"]["files"]):
            raise UnlearnError(f"{folder} has no subject {subject!r}; see its subjects.json.")
        names = [name for name in names if name != record.PAGE] + own
        statement = json.loads((folder / own[0]).read_bytes())
    files = {name: (folder / name).read_bytes() for name in names}
    name = whole["predicate"]["request"]["id"]
    entries = [one for one in Ledger(folder.parent).entries() if one["request"] == name]
    handling = _handling(statement, given, subject)
    files |= {
        ENTRIES: b"".join(canonical(entry) + b"\n" for entry in entries),
        HANDLING: json.dumps(handling, indent=1, ensure_ascii=False).encode() + b"\n",
        "REPLY.txt": reply(statement, handling).encode(),
        "VERIFY.txt": (Path(__file__).parent / "verify.txt").read_bytes(),
    }
    write(out, _archive(files), private=True)
    return handling


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
        exact=facts.get("way", {}).get("because"),
        counted=counted,
    )


def _archive(files: Mapping[str, bytes]) -> bytes:
    manifest = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    every = {**files, MANIFEST: canonical(manifest) + b"\n"}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in sorted(every):
            one = zipfile.ZipInfo(name)  # of 1980
            one.create_system, one.external_attr = 3, 0o600 << 16
            archive.writestr(one, every[name])
    return made.getvalue()


def verify(path: Path, model: str | None = None, public_key: Path | None = None) -> list[str]:
    """Check an exported file; see `record.verify`.

    Raises:
        UnlearnError: The first thing that is not as it was.
    """
    raw = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        files.pop(MANIFEST)
        statement = json.loads(files[record.RECORD])
        predicate = statement["predicate"]
        entries = [json.loads(line) for line in files[ENTRIES].splitlines()]
        known = [entry["record"] for entry in entries if "record" in entry]
        handling = json.loads(files[HANDLING])
    except Exception:  # zipfile raises what its parts raise: EOFError, RuntimeError, zlib.error
        raise UnlearnError(f"{path} is no exported request, or it was changed.") from None
    if _archive(files) != raw:
        raise UnlearnError(f"{path} was changed; ask for it again.")
    if not known or hashlib.sha256(files[record.RECORD]).hexdigest() != known[-1]:
        raise UnlearnError(f"{path}: its record is not the one of its ledger entries.")
    bound = {n: d["sha256"] for n, d in predicate["files"].items() if "sha256" in d and n in files}
    for name, known in bound.items():
        if hashlib.sha256(files[name]).hexdigest() != known:
            raise UnlearnError(f"{path}: {name} is not the page of the record.")
    said = [
        f"archive: all {len(files)} files as written",
        f"record: of request {predicate['request']['id']}, as the ledger knows it; "
        f"{len(bound)} pages as recorded",
        f"received {handling['received']}, due {handling['due']}, done {handling['done']}"
        + (", late" if handling["late"] else ""),
        "model: not compared; give `--model`"
        if model is None
        else record.compare_model(Path(model_facts(model)["path"]), statement),
    ]
    with tempfile.TemporaryDirectory() as place:
        for name in {record.RECORD, record.SIGNATURE} & set(files):
            (Path(place) / name).write_bytes(files[name])
        return [*said, record.check_signature(Path(place), public_key)]
