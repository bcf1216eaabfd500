"""The record of a deletion request: an in-toto Statement about the model that came out of it.

``record.json`` says what was done and what was found, without a text or a name: documents appear
under ids made with the key of the ledger, and so do the files of their texts. Its subjects are the
files of the new model. The ledger has the digest of the record; the record has those of the model
and of every file of the request's folder but ``work/``: one byte changed, added or removed is found
by `verify`. What a record does not show is part of it (`limits`).

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write as replace_bytes
from axolotl_unlearn.requests import pages, suppress
from axolotl_unlearn.requests.ledger import Ledger, canonical, model_facts, now
from axolotl_unlearn.requests.request import Request, counted, digest, read_json
from axolotl_unlearn.requests.verdict import FIGURES, audited, figures
from axolotl_unlearn.requests.ways import PROOF
from axolotl_unlearn.store import versions

PREDICATE = "urn:axolotl-unlearn:deletion-request:v0.3"
RECORD, SIGNATURE, PAGE = "record.json", "record.json.sig", "REPORT.html"
#: An amended record until it takes the place of the one before.
DRAFT = f"{RECORD}.next"
#: What was removed and what is left, by name: for the owner alone.
ERASED = "erased.json"
#: Parts of a request's folder that ``files`` of its record leaves out: what has a place of its own
#: in the record, and the run's scratch.
APART = (RECORD, DRAFT, SIGNATURE, "model", "work")
#: Rows of a request, which `erase` and its owner may remove.
ROWS = ("data/", "eval-data/")
LIMITS = (
    "Unlearning is no proof of erasure: that these tests find nothing does not mean that no test "
    "would. Training again without the rows is the stronger way.",
    "What was not chosen was not forgotten: near-duplicates, quotations and other rows about the "
    "same people.",
    "Copies of the old model and of the data that left this machine are not reached. Who has the "
    "models before and after can compare them and learn what was removed (arXiv 2505.24379).",
    "The tests were made on the day of the record. Further training, merging or quantisation can "
    "bring something back: run `axolotl-unlearn request audit` after each.",
    "This record and its signature say who measured what. They are no legal opinion.",
)


# --- writing -------------------------------------------------------------------------------------


def write(folder: Path | str) -> Path:
    """Write the record and its pages, and enter the request into the ledger.

    The last step of ``request run``. Called again after it was killed it goes on; called again
    when it is done it changes nothing.

    Raises:
        UnlearnError: The verdict is not good and nobody accepted it, or the request is in the
            ledger with another record.
    """
    folder = Path(folder)
    request, ledger = Request.load(folder), Ledger(folder.parent)
    verdict = read_json(folder / "verdict.json")
    if verdict is None:
        raise UnlearnError(f"{folder} has no verdict; finish `axolotl-unlearn request run` first.")
    if not verdict.get("good") and not verdict.get("accepted"):
        raise UnlearnError(
            f"{folder}: the verdict is {verdict.get('status')!r}, so the model is not handed over; "
            "look into its report, or run again with `--accept REASON`."
        )
    if known := _entry(ledger, request.id):
        there = [folder / name for name in (RECORD, DRAFT) if (folder / name).is_file()]
        if known["record"] not in map(digest, there):
            ledger.refuse_twice(request.id)
        read(folder)
        return folder / RECORD
    model = model_facts(request.after)
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": name, "digest": {"sha256": digest(path)}}
            for name, path in model_files(Path(model["path"])).items()
        ],
        "predicateType": PREDICATE,
        "predicate": _predicate(request, verdict, ledger, model),
    }
    place = ledger.inside(model["path"])
    _enter(folder, "accepted", statement, model=model | {"path": place}, good=bool(verdict["good"]))
    return folder / RECORD


def amend(folder: Path | str, event: str, **parts: Any) -> None:
    """Change parts of the predicate of a finished record, and say so in the ledger.

    The record before stays provable: its digest is in the ledger.
    """
    statement = read(folder)
    statement["predicate"] |= parts
    _enter(Path(folder), event, statement)


def _enter(folder: Path, event: str, statement: dict[str, Any], **facts: Any) -> None:
    """Bind the folder's files, enter the record into the ledger, publish it.

    A file that is bound already keeps its digest: an amended record vouches for no change.
    """
    ledger, predicate = Ledger(folder.parent), statement["predicate"]
    made, known = _pages(folder, statement), predicate.get("files", {})
    predicate["files"] = {
        **known,
        **{
            name: {"hmac-sha256": ledger.keyed_file(path)}
            for name, path in _files(folder).items()
            if name not in known or name == ERASED
        },
        **{n: {"sha256": hashlib.sha256(content).hexdigest()} for n, content in made.items()},
    }
    replace_bytes(folder / DRAFT, canonical(statement) + b"\n")
    entry = digest(folder / DRAFT)
    ledger.append(event, predicate["request"]["id"], record=entry, **facts)
    _publish(folder, made)


def _publish(folder: Path, made: Mapping[str, bytes]) -> None:
    """The draft becomes the record, last: a run that was killed before does it again."""
    (folder / SIGNATURE).unlink(missing_ok=True)  # it was of the record before
    for name, content in made.items():
        replace_bytes(folder / name, content)
    (folder / DRAFT).replace(folder / RECORD)


def _pages(folder: Path, statement: Mapping[str, Any]) -> dict[str, bytes]:
    linked = (folder / "eval" / "report.html").is_file()
    return {
        PAGE: pages.page(statement, evaluation=linked).encode(),
        **pages.subjects(folder, statement),
    }


def _below(folder: Path) -> dict[str, Path]:
    """Every file and link below a folder by its name from there."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {n: path for n, path in names.items() if path.is_symlink() or not path.is_dir()}


def _files(folder: Path) -> dict[str, Path]:
    """Every file of a request's folder that its record binds under ``files``, by name."""
    return {n: path for n, path in _below(folder).items() if n.split("/")[0] not in APART}


def model_files(model: Path) -> dict[str, Path]:
    """The files of a model folder that belong to it, by name, with those of its subfolders.

    Its README, signatures and what is hidden at its top are its owner's.
    """
    return {
        name: path
        for name, path in _below(model).items()
        if not (path.is_dir() or name.startswith(".") or name == "README.md")
        and ("/" in name or path.suffix != ".sig")
    }


def _predicate(
    request: Request, verdict: Mapping[str, Any], ledger: Ledger, model: Mapping[str, Any]
) -> dict[str, Any]:
    folder, facts = request.folder, request.facts
    lines, _ = audited(folder)
    names = {line["document"] for line in lines}
    for path in (folder / "data").glob("*.jsonl"):
        for row in read_json_lines(path):
            names |= {str(row[key]) for key in ("id", "document") if row.get(key)}

    def without_names(texts: list[str]) -> list[str]:
        for name in sorted(names, key=len, reverse=True):
            texts = [t.replace(name, ledger.keyed(name)) if name in t else t for t in texts]
        return texts

    def public(model: Mapping[str, Any]) -> dict[str, Any]:
        base = model["base"]
        if base and Path(base["name"]).is_dir():  # no path of this machine
            base = base | {"name": Path(base["name"]).name}
        return {"digest": model["digest"], "base": base}

    stamps = sorted((folder / "work" / "stamps").glob("*.json"))
    seconds = {path.stem: read_json(path).get("seconds") for path in stamps}
    way = request.way | (read_json(folder / PROOF) or {})
    return {
        "request": {
            "id": facts["id"],
            "created": facts["created"],
            "recorded": now(),
            "counts": facts.get("counts", {}),
            # How the rows were chosen names people: counts stay, whatever is text is keyed.
            "chosen": {
                name: value
                if isinstance(value, (int, float, type(None)))
                else {"hmac-sha256": ledger.keyed(canonical(value).decode())}
                for name, value in facts.get("chosen", {}).items()
            },
        },
        "config": {"digest": {"sha256": facts["config"]["digest"]}},
        "model": {"before": public(model_facts(request.before)), "after": public(model)},
        "versions": {"python": platform.python_version(), **versions()},
        # No path of this machine.
        "way": {name: value for name, value in way.items() if name not in ("base", "shards")},
        "verdict": {
            "outcome": verdict.get("outcome"),
            "good": bool(verdict["good"]),
            "status": verdict["status"],
            **{p: without_names(verdict.get(p, [])) for p in ("reasons", "missing", "says")},
            "accepted": verdict.get("accepted"),
        },
        "documents": [
            {"document": ledger.keyed(line["document"])}
            | {name: line[name] for name in FIGURES if name in line}
            | {"before": figures(line.get("before"))}
            for line in lines
        ],
        "earlier": read_json(folder / "eval" / "earlier.json"),
        "attacks": _attacks(folder),
        "limits": [
            *(LIMITS if request.matched else LIMITS[1:]),
            *without_names(verdict.get("limits") or facts.get("limits", [])),
        ],
        "seconds": {name: value for name, value in seconds.items() if value is not None},
        "erased": None,
    }


def _attacks(folder: Path) -> list[dict[str, Any]]:
    """What each attack found, in its own words; see `axolotl-unlearn attack`."""
    from axolotl_unlearn.attacks.results import sentence

    attacks = []
    for path in (p for part in ("eval", "attacks") for p in sorted((folder / part).glob("*.json"))):
        result = read_json(path)
        known = isinstance(result, dict) and {"attack", "title"} <= set(result)
        if known and {"rows", "views"} & set(result):
            variants = [row["variant"] for row in result.get("rows", ())]
            variants += [view["title"] for view in result.get("views", {}).values()]
            said = {"attack": result["attack"], "variants": variants, "says": sentence(result)}
            attacks.append(said | {"digest": {"sha256": digest(path)}})
    return attacks


# --- checking ------------------------------------------------------------------------------------


def read(folder: Path | str) -> dict[str, Any]:
    """The statement of a finished request, after it was compared with the ledger.

    Raises:
        UnlearnError: A broken ledger, a request that it does not know, a changed record.
    """
    folder = Path(folder)
    path, draft = folder / RECORD, folder / DRAFT
    request, ledger = Request.load(folder), Ledger(folder.parent)
    entry = _entry(ledger, request.id)
    if entry is None:
        raise UnlearnError(
            f"{ledger.folder / 'ledger.jsonl'} does not know request {request.id!r}; finish "
            f"`axolotl-unlearn request run {folder}`."
        )
    if draft.is_file() and digest(draft) == entry["record"]:  # `amend` was killed
        _publish(folder, _pages(folder, json.loads(draft.read_bytes())))
    if not path.is_file():
        raise UnlearnError(f"{path} is missing; restore it from a copy.")
    if digest(path) != entry["record"]:
        raise UnlearnError(
            f"{path} is not the record that the ledger knows (line {entry['entry']}): it was "
            "changed; restore it from a copy."
        )
    statement = json.loads(path.read_bytes())
    if statement["predicateType"] != PREDICATE:
        raise UnlearnError(f"{path} was written by another version ({statement['predicateType']}).")
    return statement


def verify(
    folder: Path | str, model: str | None = None, public_key: Path | str | None = None
) -> list[str]:
    """Check ledger, record, model, data and signature of a request.

    Args:
        model: Where the model is now, if not where it was made; folder or base+adapter.
        public_key: PEM file of whoever signed the record.

    Returns:
        One sentence for each thing that was checked, or that could not be.

    Raises:
        UnlearnError: The first thing that is not as it was.
    """
    folder = Path(folder)
    ledger = Ledger(folder.parent)
    statement = read(folder)
    keyed, count = ledger.key() is not None, len(statement["predicate"]["documents"])
    return [
        f"ledger: {counted(len(ledger.entries()), 'entry', 'entries')}, unbroken"
        + ("" if keyed else " (without ledger.key nobody can tell whether it was written anew)"),
        f"record: as the ledger knows it, {count} documents",
        _check_files(folder, statement, ledger),  # before what it says is believed
        _check_model(folder, statement, ledger, model),
        *suppress.checked(folder.parent),
        check_signature(folder, public_key),
    ]


def _gone(ledger: Ledger, statement: Mapping[str, Any], name: str) -> bool:
    """`request erase` has removed this file of a request, or began to."""
    mine = ("erasing", statement["predicate"]["request"]["id"])
    entries = (e for e in ledger.entries() if (e["event"], e["request"]) == mine)
    gone = {one["path"] for entry in entries for one in entry["places"] if "path" in one}
    return any(name == one or name.startswith(f"{one}/") for one in gone)


def _check_files(folder: Path, statement: Mapping[str, Any], ledger: Ledger) -> str:
    """Compare every other file of the request's folder."""
    recorded = statement["predicate"]["files"]
    files, missing, uncompared = _files(folder), 0, 0
    name = statement["predicate"]["request"]["id"]
    last = [entry["event"] for entry in ledger.entries() if entry["request"] == name][-1]
    if last == "erasing":  # it was stopped before it was written into the record
        files.pop(ERASED, None)
        recorded = {name: digest for name, digest in recorded.items() if name != ERASED}
    for name, known in recorded.items():
        path = files.pop(name, None)
        if path is None:
            if not name.startswith(ROWS) and not _gone(ledger, statement, name):
                raise UnlearnError(f"{folder / name} is missing; restore it from a copy.")
            missing += 1
        elif path.is_symlink():
            raise UnlearnError(f"{path} is a link now; put the file of the record back.")
        elif "sha256" not in known and ledger.key() is None:
            uncompared += 1
        elif (digest(path) if "sha256" in known else ledger.keyed_file(path)) not in known.values():
            raise UnlearnError(f"{path} is not the file of the record; restore it from a copy.")
    if files:
        raise UnlearnError(f"{folder / min(files)} is not in the record: it was added.")
    said = f"files: {len(recorded) - missing - uncompared} others of the request as recorded"
    said += f", {missing} gone" if missing else ""
    return said + (f", {uncompared} cannot be compared without ledger.key" if uncompared else "")


def _check_model(
    folder: Path, statement: Mapping[str, Any], ledger: Ledger, model: str | None
) -> str:
    recorded = statement["predicate"]["model"]["after"]
    request = Request.load(folder)
    source = model or request.after
    if model is None and not Path(source.split("+")[-1]).exists():
        last = ledger.accepted()[-1]["request"]
        if last != request.id:
            return f"model: gone since request {last!r} came after it, nothing to compare"
    facts = model_facts(source)
    before, base = recorded["base"], facts["base"]
    if (before is None) != (base is None):
        kinds = ("a full model", "an adapter")
        raise UnlearnError(
            f"{source} is {kinds[base is not None]} but the record is of "
            f"{kinds[before is not None]}; name the model that the request made."
        )
    check_base(source, base, before)

    def gone(name: str) -> bool:
        return model is None and _gone(ledger, statement, f"model/{name}")

    return compare_model(Path(facts["path"]), statement, gone) + (", base too" if base else "")


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
                raise UnlearnError(f"{place} has no {one['name']}, which is in the record.")
        elif digest(path) != one["digest"]["sha256"]:
            raise UnlearnError(
                f"{path} is not the file of the record: it was changed, or it is another model "
                "(after further training: `axolotl-unlearn request audit`)."
            )
    if files:
        raise UnlearnError(
            f"{min(files.values())} is not in the record: it was added to the model."
        )
    return f"model: all {len(subjects)} files as recorded"


def check_base(
    source: str, base: Mapping[str, Any] | None, recorded: Mapping[str, Any] | None
) -> None:
    """Raises `UnlearnError`: both are adapters, of different bases."""
    if not base or not recorded:
        return
    which = "digest" if base["digest"] and recorded["digest"] else "name"
    if base[which] != recorded[which]:
        raise UnlearnError(
            f"{source} stands on {base['name']}, which is not the base model of the record "
            f"({recorded['name']}); write base+adapter with the right one."
        )


def _entry(ledger: Ledger, request: str) -> dict[str, Any] | None:
    """The last entry about the record of a request."""
    entries = [e for e in ledger.entries() if e["request"] == request and "record" in e]
    return entries[-1] if entries else None


# --- signature -----------------------------------------------------------------------------------


def sign(folder: Path | str, private_key: Path | str) -> Path:
    """Sign the record, and through its subjects the model, with a key of one's own.

    Args:
        private_key: PEM file of an elliptic curve key (NIST P-256, P-384 or P-521).
    """
    folder = Path(folder)
    read(folder)
    signing = _model_signing("signing")
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=Path(private_key))
        config.sign(folder / RECORD, folder / SIGNATURE)
    except (OSError, ValueError, TypeError) as error:
        raise UnlearnError(
            f"{private_key} cannot sign ({_first_line(error)}); give the PEM file of an elliptic "
            "curve key: `openssl ecparam -name prime256v1 -genkey -noout -out key.pem`."
        ) from None
    return folder / SIGNATURE


def check_signature(folder: Path, public_key: Path | str | None) -> str:
    """A sentence.

    Raises:
        UnlearnError: It is not the signature of the record under this key.
    """
    path = folder / SIGNATURE
    if public_key is None:
        there = "there is one; give `--public-key` to check it"
        return f"signature: {there if path.is_file() else 'none'}"
    if not path.is_file():
        raise UnlearnError(
            f"{folder / RECORD} is not signed; sign it with `axolotl-unlearn request sign`."
        )
    if not Path(public_key).is_file():
        raise UnlearnError(f"{public_key} does not exist; name the PEM file of the public key.")
    verifying = _model_signing("verifying")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=Path(public_key))
        config.verify(folder / RECORD, path)
    except Exception as error:  # the library raises what its parts raise
        raise UnlearnError(
            f"{path} is not the signature of {RECORD} under {public_key} ({_first_line(error)})."
        ) from None
    return f"signature: by the owner of {public_key}"


def _model_signing(part: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{part}")
    except ImportError:
        raise UnlearnError(
            "signatures need the package model-signing; install it: "
            "`pip install 'axolotl-unlearn[sign]'`."
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
