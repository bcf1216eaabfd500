"""Is everything as it was recorded? Ledger, files, model and signature, each by itself.

Each part has a field and a sentence, whatever is at fault with another; the exit code says which
part is at fault first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.suppression import LIST, Suppression
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.record import (
    ERASED,
    RECORD,
    ROWS,
    bound_files,
    check_key,
    model_files,
    read,
    signature,
)
from axolotl_unlearn.requests.request import (
    Ledger,
    Request,
    counted,
    digest,
    fault,
    home,
    model_facts,
    plain,
)

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
    signature: str = NOT_COMPARED
    says: list[str] = field(default_factory=list)
    faults: list[UnlearnError] = field(default_factory=list)

    def compare(
        self, part: str, otherwise: str, compared: Callable[..., tuple[str, str]], *given: Any
    ) -> Verified:
        """Set a field to what a comparison finds, or where it raises to ``otherwise``."""
        try:
            value, said = compared(*given)
        except (OSError, UnlearnError) as error:  # OSError: a folder in its place, ...
            value, said = otherwise, str(error)
            known = isinstance(error, UnlearnError)
            self.faults.append(error if known else fault("record.unreadable", said))
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
    check_key(public_key)
    if found.compare("ledger", "broken", _chain, ledger, head).faults:
        return found
    statement: dict[str, Any] = {}  # believed once it was compared
    found.compare("files", "changed", _compare_files, folder, statement, ledger)
    if statement:
        found.compare("model", "other", _compare_model, folder, statement, ledger, model)
        found.compare("signature", "other", signature, folder / RECORD, public_key)
    return found


def _chain(ledger: Ledger, head: Mapping[str, Any] | None) -> tuple[str, str]:
    warned = ledger.warnings()
    said = [f"{counted(len(ledger.entries()), 'entry', 'entries')}, unbroken"]
    said += [ledger.goes_on_from(head)] if head else []
    return "end not bound" if warned else "whole", "; ".join([*said, *warned])


def _compare_files(folder: Path, statement: dict[str, Any], ledger: Ledger) -> tuple[str, str]:
    """The record, every other file of the request's folder, and the suppression list."""
    statement |= read(folder)
    value, said = compare_files(folder, statement, ledger)
    path = folder.parent / LIST
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
    # `erase` was stopped before it was in the record.
    entries = reversed(ledger.of(folder.name))
    began = "begun" in next(e for e in entries if "record" in e or "begun" in e)
    files, recorded = (
        {n: one for n, one in every.items() if n.startswith(only) and not (began and n == ERASED)}
        for every in (bound_files(folder), recorded)
    )

    def fine(name: str) -> bool:
        return name.startswith(ROWS) or erased(ledger, folder, name)

    gone, uncompared = _same_files(files, recorded, folder, fine, ledger)
    said = [f"{len(recorded) - gone - uncompared} others of the request as recorded"]
    said += [f"{gone} gone"] * bool(gone)
    said += [f"{uncompared} cannot be compared without ledger.key"] * bool(uncompared)
    said += ["a record of v0.1 binds rows and model alone"] * ("files" not in predicate)
    whole = not uncompared and "files" in predicate
    return "same" if whole else "some not compared", "; ".join(said)


def erased(ledger: Ledger, folder: Path, name: str) -> bool:
    """`request erase` has removed this file of a request, or began to."""
    entries = [entry for entry in ledger.of(folder.name) if entry["event"] == "erasing"]
    gone = {one["path"] for entry in entries for one in entry["places"] if "path" in one}
    return any(f"{name}/".startswith(f"{one}/") for one in gone)


def _compare_model(
    folder: Path, statement: Mapping[str, Any], ledger: Ledger, model: str | None
) -> tuple[str, str]:
    source = model or Request.load(folder).after
    if model is None and not Path(source.split("+")[-1]).exists():
        if (last := ledger.accepted()[-1]["request"]) != folder.name:
            return NOT_COMPARED, f"gone since request {last!r} came after it"
    model_files(Path(source.split("+")[-1]))
    facts, before = model_facts(source), statement["predicate"]["model"]["after"]["base"]
    base = facts["base"]
    if (before is None) != (base is None):
        full, adapter = ("a full model", "an adapter")[:: -1 if base else 1]
        says = f"{source} is {full} but the record is of {adapter}; name the one that it made."
        raise fault("record.other-kind", says)
    check_base(source, base, before)

    def gone(file: str) -> bool:
        return model is None and erased(ledger, folder, f"model/{file}")

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
    recorded = {one["name"]: one["digest"] for one in statement["subject"]}
    _same_files(model_files(place), recorded, place, gone)
    return f"all {len(recorded)} files as recorded"


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
        raise fault(
            "record.other-base",
            f"{source} stands on {base['name']}, which is not the base model of the record "
            f"({recorded['name']}); write base+adapter with the right one.",
        )
