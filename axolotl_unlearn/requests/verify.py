"""Is everything as it was recorded? Ledger, files, model and signature, each by itself.

Nothing is fixed by another's fault: each part has a field and a sentence, and the exit code says
which part is at fault first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import suppress
from axolotl_unlearn.requests.ledger import Ledger, model_facts
from axolotl_unlearn.requests.record import (
    ERASED,
    RECORD,
    ROWS,
    bound_files,
    fault,
    model_files,
    read,
)
from axolotl_unlearn.requests.request import Request, counted, digest, home, plain

NOT_COMPARED = "not compared"


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
    signature: str = "none"
    says: list[str] = field(default_factory=list)
    faults: list[UnlearnError] = field(default_factory=list)

    def compare(
        self, part: str, compared: Callable[[], tuple[str, str]], otherwise: str
    ) -> Verified:
        """Set a field to what a comparison finds, or where it raises to ``otherwise``."""
        try:
            value, said = compared()
        except OSError as error:  # a folder in its place, ...
            value, said = otherwise, str(error)
            self.faults.append(fault("unreadable", said))
        except UnlearnError as error:
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
    folder = home(folder)
    ledger, found = Ledger(folder.parent), Verified()
    check_key(public_key)

    def chain() -> tuple[str, str]:
        count, warned = len(ledger.entries()), ledger.warnings()
        goes_on = [ledger.goes_on_from(head)] if head else []
        said = [f"{counted(count, 'entry', 'entries')}, unbroken", *goes_on, *warned]
        return "end not bound" if warned else "whole", "; ".join(said)

    found.compare("ledger", chain, "broken")
    if found.ledger == "broken":
        return found
    try:
        statement = read(folder)
    except UnlearnError as error:
        said = error
        return found.compare("files", lambda: _raise(said), "changed")
    count = len(statement["predicate"]["documents"])
    found.say(f"record: as the ledger knows it, {counted(count, 'document')}")
    # Before what it says is believed.
    found.compare("files", lambda: _with_list(folder, statement, ledger), "changed")
    found.compare("model", lambda: _compare_model(folder, statement, ledger, model), "other")
    return found.compare("signature", lambda: signature(folder / RECORD, public_key), "other")


def _with_list(folder: Path, statement: Mapping[str, Any], ledger: Ledger) -> tuple[str, str]:
    value, said = _compare_files(folder, statement, ledger)
    return value, "; ".join([said, *suppress.checked(folder.parent)])


def _raise(error: UnlearnError) -> tuple[str, str]:
    raise error


def _gone(ledger: Ledger, request: str, name: str) -> bool:
    """`request erase` has removed this file of a request, or began to."""
    entries = (e for e in ledger.entries() if (e["event"], e["request"]) == ("erasing", request))
    gone = {one["path"] for entry in entries for one in entry["places"] if "path" in one}
    return any(name == one or name.startswith(f"{one}/") for one in gone)


def _compare_files(folder: Path, statement: Mapping[str, Any], ledger: Ledger) -> tuple[str, str]:
    """Every other file of the request's folder."""
    predicate = statement["predicate"]
    # v0.1 and v0.2 have the rows in a place of their own; v0.1 binds no other file.
    recorded = {f"data/{part}.jsonl": one for part, one in predicate.get("data", {}).items()}
    recorded |= predicate.get("files", {})
    files, missing, uncompared = bound_files(folder), 0, 0
    if "files" not in predicate:
        files = {name: path for name, path in files.items() if name.startswith("data/")}
    name = predicate["request"]["id"]
    last = [e["event"] for e in ledger.entries() if e["request"] == name][-1]
    if last == "erasing":  # it was stopped before it was written into the record
        files.pop(ERASED, None)
        recorded.pop(ERASED, None)
    for one, known in recorded.items():
        path = files.pop(one, None)
        if path is None:
            if not one.startswith(ROWS) and not _gone(ledger, name, one):
                raise fault("missing", f"{folder / one} is missing; restore it from a copy.")
            missing += 1
        elif path.is_symlink():
            raise fault("changed", f"{path} is a link now; put the file of the record back.")
        elif "sha256" not in known and ledger.key() is None:
            uncompared += 1
        elif (digest(path) if "sha256" in known else ledger.keyed_file(path)) not in known.values():
            raise fault("changed", f"{path} is not the file of the record; restore it from a copy.")
    if files:
        raise fault("added", f"{folder / min(files)} is not in the record: it was added.")
    said = f"{len(recorded) - missing - uncompared} others of the request as recorded"
    said += f", {missing} gone" if missing else ""
    if "files" not in predicate:
        return "some not compared", f"{said}; a record of v0.1 binds rows and model alone"
    if uncompared:
        return "some not compared", f"{said}, {uncompared} cannot be compared without ledger.key"
    return "same", said


def _compare_model(
    folder: Path, statement: Mapping[str, Any], ledger: Ledger, model: str | None
) -> tuple[str, str]:
    predicate = statement["predicate"]
    name, recorded = predicate["request"]["id"], predicate["model"]["after"]
    source = model or Request.load(folder).after
    if model is None and not Path(source.split("+")[-1]).exists():
        last = ledger.accepted()[-1]["request"]
        if last != name:
            return NOT_COMPARED, f"gone since request {last!r} came after it"
    facts = model_facts(source)
    before, base = recorded["base"], facts["base"]
    if (before is None) != (base is None):
        kinds = ("a full model", "an adapter")
        raise fault(
            "other-kind",
            f"{source} is {kinds[base is not None]} but the record is of "
            f"{kinds[before is not None]}; name the model that the request made.",
        )
    check_base(source, base, before)

    def gone(file: str) -> bool:
        return model is None and _gone(ledger, name, f"model/{file}")

    said = compare_model(Path(facts["path"]), statement, gone)
    return "same", said + (", base too" if base else "")


def compare_model(
    place: Path, statement: Mapping[str, Any], gone: Callable[[str], bool] = lambda name: False
) -> str:
    """Compare the files of a model with the subjects of a record.

    Args:
        gone: Whether a file may be missing.

    Raises:
        UnlearnError: The first that is not as recorded.
    """
    files, subjects = model_files(place), statement["subject"]
    for one in subjects:
        path = files.pop(one["name"], None)
        if path is None:
            if not gone(one["name"]):
                raise fault("other-model", f"{place} has no {one['name']} of the record.")
        elif digest(path) != one["digest"]["sha256"]:
            raise fault(
                "other-model",
                f"{path} is not the file of the record: it was changed, or it is another model "
                "(after further training: `axolotl-unlearn request audit`).",
            )
    if files:
        raise fault(
            "other-model",
            f"{min(files.values())} is not in the record: it was added to the model.",
        )
    return f"all {len(subjects)} files as recorded"


def check_base(
    source: str, base: Mapping[str, Any] | None, recorded: Mapping[str, Any] | None
) -> None:
    """Raises `UnlearnError`: both are adapters, of different bases."""
    if not base or not recorded:
        return
    which = "digest" if base["digest"] and recorded["digest"] else "name"
    if base[which] != recorded[which]:
        raise fault(
            "other-base",
            f"{source} stands on {base['name']}, which is not the base model of the record "
            f"({recorded['name']}); write base+adapter with the right one.",
        )


# --- signature -----------------------------------------------------------------------------------


def sign(folder: Path | str, private_key: Path | str) -> Path:
    """Sign the record, and through its subjects the model, with a key of one's own.

    Args:
        private_key: PEM file of an elliptic curve key (NIST P-256, P-384 or P-521).
    """
    folder = home(folder)
    read(folder)
    return sign_file(folder / RECORD, private_key)


def sign_file(path: Path, private_key: Path | str) -> Path:
    """The signature beside a file, as ``NAME.sig``; see `sign`."""
    signing, made = _model_signing("signing"), path.with_name(f"{path.name}.sig")
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=Path(private_key))
        config.sign(path, made)
    except (OSError, ValueError, TypeError) as error:
        raise UnlearnError(
            f"{private_key} cannot sign ({_first_line(error)}); give the PEM file of an elliptic "
            "curve key: `openssl ecparam -name prime256v1 -genkey -noout -out key.pem`.",
            code="record.no-signing-key",
        ) from None
    return made


def signature(signed: Path, public_key: Path | str | None) -> tuple[str, str]:
    """Of a file with ``NAME.sig`` beside it: the field of `Verified` and a sentence.

    Raises:
        UnlearnError: It is not the signature of the file under this key.
    """
    path = signed.with_name(f"{signed.name}.sig")
    if not path.is_file():
        return "none", "none: whoever has the key of the ledger could have written all of this"
    if public_key is None:
        return NOT_COMPARED, "there is one; give `--public-key` to check it"
    verifying = _model_signing("verifying")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=Path(public_key))
        config.verify(signed, path)
    except Exception as error:  # the library raises what its parts raise
        raise fault(
            "other-signature",
            f"{path} is not that of {signed.name} under {public_key} ({_first_line(error)}).",
        ) from None
    return "owner", f"by the owner of {public_key}"


def check_key(public_key: Path | str | None) -> None:
    """Raises `UnlearnError`: no signature can be compared with it."""
    if public_key is None:
        return
    _model_signing("verifying")
    if not Path(public_key).is_file():
        raise fault(
            "no-public-key", f"{public_key} does not exist; name the PEM file of the public key."
        )


def _model_signing(part: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{part}")
    except ImportError:
        raise UnlearnError(
            "signatures need the package model-signing; install it: "
            "`pip install 'axolotl-unlearn[sign]'`.",
            code="record.no-model-signing",
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
