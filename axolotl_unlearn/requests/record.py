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
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write as replace_bytes
from axolotl_unlearn.requests import attestations, subjects, suppress
from axolotl_unlearn.requests.ledger import Ledger, canonical, model_facts, now
from axolotl_unlearn.requests.request import Request, counted
from axolotl_unlearn.requests.verdict import FIGURES, audited, figures
from axolotl_unlearn.requests.ways import PROOF
from axolotl_unlearn.store import file_digest, versions

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:axolotl-unlearn:deletion-request:v0.2"
#: Without ``files``: records of earlier versions bind rows and model alone.
EARLIER = "urn:axolotl-unlearn:deletion-request:v0.1"
RECORD, SIGNATURE, PAGE = "record.json", "record.json.sig", "REPORT.html"
CARD, EVAL_RESULTS = "model-card.md", "eval-results.yaml"
#: What was removed and what is left, by name: for the owner alone.
ERASED = "erased.json"
#: Parts of a request's folder that ``files`` of its record leaves out: what has a place of its own
#: in the record, and the run's scratch.
APART = (RECORD, f"{RECORD}.next", SIGNATURE, "data", "model", "work")
LIMITS = (
    "Unlearning is no proof of erasure: that these tests find nothing does not mean that no test "
    "would. Training again without the rows is the stronger way.",
    "What was not chosen was not forgotten: near-duplicates, quotations and other rows about the "
    "same people.",
    "Copies of the old model and of the data that left this machine are not reached. Who has the "
    "models before and after can compare them and learn what was removed (arXiv 2505.24379).",
    "The tests were made on the day of the record. Further training, merging or quantisation can "
    "bring something back: run `axolotl unlearn request audit` after each.",
    "This record and its signature say who measured what. They are no legal opinion.",
)


# --- writing -------------------------------------------------------------------------------------


def write(folder: Path | str) -> Path:
    """Write the record, its page and its cards, and enter the request into the ledger.

    The last stage of ``request run``. Called again after it was killed it goes on; called again
    when it is done it changes nothing.

    Raises:
        UnlearnError: The verdict is not good and nobody accepted it, or the request is in the
            ledger with another record.
    """
    folder = Path(folder)
    request, ledger = Request.load(folder), Ledger(folder.parent)
    name = request.id
    verdict = _read_json(folder / "verdict.json", "finish `axolotl unlearn request run` first")
    if not verdict.get("good") and not verdict.get("accepted"):
        raise UnlearnError(
            f"{folder}: the verdict is {verdict.get('status')!r}, so the model is not handed over; "
            "look into its report, or run again with `--accept REASON`."
        )
    if known := _entry(ledger, name):
        if _digest(folder / RECORD) == known["record"]:
            return folder / RECORD
        ledger.refuse_twice(name)
    model = model_facts(request.after)
    statement = {
        "_type": STATEMENT,
        "subject": _subjects(Path(model["path"])),
        "predicateType": PREDICATE,
        "predicate": _predicate(request, verdict, ledger, model),
    }
    pages = _bind(folder, ledger, statement)
    replace_bytes(folder / RECORD, canonical(statement) + b"\n")
    _write_pages(folder, pages)
    ledger.append(
        "accepted",
        name,
        model=model | {"path": ledger.inside(model["path"])},
        record=_digest(folder / RECORD),
        good=bool(verdict["good"]),
    )
    return folder / RECORD


def amend(folder: Path | str, event: str, **parts: Any) -> None:
    """Change parts of the predicate of a finished record, and say so in the ledger.

    The record before stays provable: its digest is in the ledger.
    """
    folder = Path(folder)
    ledger, statement = Ledger(folder.parent), read(folder)
    statement["predicate"] |= parts
    pages = _bind(folder, ledger, statement)
    draft = folder / f"{RECORD}.next"
    replace_bytes(draft, canonical(statement) + b"\n")
    ledger.append(event, statement["predicate"]["request"]["id"], record=_digest(draft))
    _publish(folder, draft, pages)


def _publish(folder: Path, draft: Path, pages: Mapping[str, bytes]) -> None:
    """The amended record takes its place, last: a run that was killed before does it again."""
    (folder / SIGNATURE).unlink(missing_ok=True)  # it was of the record before
    _write_pages(folder, pages)
    draft.replace(folder / RECORD)


def _bind(folder: Path, ledger: Ledger, statement: dict[str, Any]) -> dict[str, bytes]:
    """Put the digests of the folder's files into a statement; returns the pages made of it.

    A file that is bound already keeps its digest: an amended record vouches for no change.
    """
    pages = _pages(folder, statement)
    known = statement["predicate"].get("files", {})
    new = {n: p for n, p in _files(folder).items() if n not in known or n == ERASED}
    statement["predicate"]["files"] = {
        **known,
        **{name: {"hmac-sha256": ledger.keyed_file(path)} for name, path in new.items()},
        **{n: {"sha256": hashlib.sha256(content).hexdigest()} for n, content in pages.items()},
    }
    statement["predicateType"] = PREDICATE
    return pages


def _files(folder: Path) -> dict[str, Path]:
    """Every file of a request's folder that its record binds under ``files``, by name."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: path
        for name, path in sorted(found.items())
        if name.split("/")[0] not in APART and (path.is_symlink() or not path.is_dir())
    }


def _pages(folder: Path, statement: Mapping[str, Any]) -> dict[str, bytes]:
    from axolotl_unlearn.requests.pages import card, eval_results, page

    linked = (folder / "eval" / "report.html").is_file()
    return {
        PAGE: page(statement, evaluation=linked).encode(),
        CARD: card(statement).encode(),
        EVAL_RESULTS: eval_results(statement).encode(),
        **attestations.pages(statement),
        **subjects.pages(folder, statement),
    }


def _write_pages(folder: Path, pages: Mapping[str, bytes]) -> None:
    for name, content in pages.items():
        replace_bytes(folder / name, content)


def _subjects(model: Path) -> list[dict[str, Any]]:
    return [
        {"name": name, "digest": {"sha256": file_digest(path)}}
        for name, path in model_files(model).items()
    ]


def model_files(model: Path) -> dict[str, Path]:
    """The files of a model folder that belong to it, by name, with those of its subfolders.

    Its README, signatures and what is hidden at its top are its owner's.
    """
    found = {path.relative_to(model).as_posix(): path for path in model.rglob("*")}
    return {
        name: path
        for name, path in sorted(found.items())
        if not path.is_dir()
        and not name.startswith(".")
        and name != "README.md"
        and not ("/" not in name and path.suffix == ".sig")
    }


def _predicate(
    request: Request,
    verdict: Mapping[str, Any],
    ledger: Ledger,
    model: Mapping[str, Any],
) -> dict[str, Any]:
    folder, facts = request.folder, request.facts
    lines, _ = audited(folder)
    names = sorted({line["document"] for line in lines} | _row_ids(folder), key=len, reverse=True)

    def without_names(text: str) -> str:
        for name in names:
            text = text.replace(name, ledger.keyed(name))
        return text

    def public(model: Mapping[str, Any]) -> dict[str, Any]:
        base = model["base"]
        if base and Path(base["name"]).is_dir():  # no path of this machine
            base = base | {"name": Path(base["name"]).name}
        return {"digest": model["digest"], "base": base}

    way = request.way | (_optional(folder / PROOF) or {})
    return {
        "request": {
            "id": facts["id"],
            "created": facts["created"],
            "recorded": now(),
            "counts": facts.get("counts", {}),
            # How the rows were chosen names people.
            "chosen": _keyed_value(ledger, facts.get("chosen", {})),
        },
        "config": {"digest": {"sha256": facts["config"]["digest"]}},
        "data": {
            path.stem: {"hmac-sha256": ledger.keyed_file(path)}
            for path in sorted((folder / "data").glob("*.jsonl"))
        },
        "model": {"before": public(model_facts(request.before)), "after": public(model)},
        "versions": {"python": platform.python_version(), **versions()},
        # No path of this machine.
        "way": {name: value for name, value in way.items() if name not in ("base", "shards")},
        "verdict": {
            "outcome": verdict.get("outcome"),
            "good": bool(verdict["good"]),
            "status": verdict["status"],
            **{
                part: [without_names(text) for text in verdict.get(part, [])]
                for part in ("reasons", "missing", "says")
            },
            "accepted": verdict.get("accepted"),
        },
        "documents": [
            {"document": ledger.keyed(line["document"])}
            | {name: line[name] for name in FIGURES if name in line}
            | {"before": figures(line.get("before"))}
            for line in lines
        ],
        "earlier": _optional(folder / "eval" / "earlier.json"),
        "attacks": _attacks(folder),
        "limits": [
            *(LIMITS if request.way["way"] == "match" else LIMITS[1:]),
            *map(without_names, verdict.get("limits") or facts.get("limits", [])),
        ],
        "seconds": _seconds(folder),
        "erased": None,
    }


def _keyed_value(ledger: Ledger, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Counts stay; whatever is text is given as its HMAC."""
    return {
        name: value
        if isinstance(value, (int, float, type(None)))
        else {"hmac-sha256": ledger.keyed(canonical(value).decode())}
        for name, value in chosen.items()
    }


def _row_ids(folder: Path) -> set[str]:
    found = set()
    for path in (folder / "data").glob("*.jsonl"):
        rows = read_json_lines(path)
        found |= {str(row[key]) for row in rows for key in ("id", "document") if row.get(key)}
    return found


def _seconds(folder: Path) -> dict[str, float]:
    """What each stage of the run took, to compare with training again."""
    stamps = (folder / "work" / "stamps").glob("*.json")
    found = {path.stem: json.loads(path.read_text("utf-8")).get("seconds") for path in stamps}
    return {name: value for name, value in sorted(found.items()) if value is not None}


def _attacks(folder: Path) -> list[dict[str, Any]]:
    """What each attack found, in its own words; see `axolotl unlearn attack`."""
    from axolotl_unlearn.attacks.results import sentence
    from axolotl_unlearn.requests.attestations import judged

    found = []
    for path in sorted((folder / "eval").glob("*.json")) + sorted(
        (folder / "attacks").glob("*.json")
    ):
        result = json.loads(path.read_text("utf-8"))
        known = isinstance(result, dict) and {"attack", "title"} <= set(result)
        if known and {"rows", "views"} & set(result):
            variants = [row["variant"] for row in result.get("rows", ())]
            variants += [view["title"] for view in result.get("views", {}).values()]
            said = {"attack": result["attack"], "variants": variants, "says": sentence(result)}
            found.append(said | {"digest": {"sha256": file_digest(path)}} | judged(result))
    return found


# --- checking ------------------------------------------------------------------------------------


def read(folder: Path | str) -> dict[str, Any]:
    """The statement of a finished request, after it was compared with the ledger.

    Raises:
        UnlearnError: A broken ledger, a request that it does not know, a changed record.
    """
    folder = Path(folder)
    path = folder / RECORD
    request = Request.load(folder)
    ledger = Ledger(folder.parent)
    entry = _entry(ledger, request.id)
    if entry is None:
        raise UnlearnError(
            f"{ledger.folder / 'ledger.jsonl'} does not know request {request.id!r}; finish "
            f"`axolotl unlearn request run {folder}`."
        )
    draft = folder / f"{RECORD}.next"
    if draft.is_file() and _digest(draft) == entry["record"]:  # `amend` was killed
        _publish(folder, draft, _pages(folder, json.loads(draft.read_bytes())))
    if not path.is_file():
        raise UnlearnError(f"{path} is missing; restore it from a copy.")
    if _digest(path) != entry["record"]:
        raise UnlearnError(
            f"{path} is not the record that the ledger knows (line {entry['entry']}): it was "
            "changed; restore it from a copy."
        )
    statement = json.loads(path.read_bytes())
    if statement["_type"] != STATEMENT or statement["predicateType"] not in (PREDICATE, EARLIER):
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
    predicate, gone = statement["predicate"], erased_names(ledger, statement)
    with_key = ledger.key() is not None
    said = [
        f"ledger: {counted(len(ledger.entries()), 'entry', 'entries')}, unbroken"
        + ("" if with_key else " (without ledger.key nobody can tell whether it was written anew)"),
        f"record: as the ledger knows it, {len(predicate['documents'])} documents",
        _check_files(folder, statement, ledger, gone),  # before what it says is believed
        _check_model(folder, statement, model, gone),
    ]
    for part, facts in predicate["data"].items():
        path = folder / "data" / f"{part}.jsonl"
        if not path.is_file():
            said.append(f"data: {part} rows are gone, nothing to compare")
        elif with_key:
            if ledger.keyed_file(path) != facts["hmac-sha256"]:
                raise UnlearnError(f"{path} is not what was {part}: it was changed since.")
            said.append(f"data: {part} rows as they were")
        else:
            said.append(f"data: {part} rows cannot be compared without ledger.key")
    for path in (folder / "data").rglob("*"):
        if path.relative_to(folder / "data").as_posix() not in {
            f"{part}.jsonl" for part in predicate["data"]
        }:
            raise UnlearnError(f"{path} is not in the record: it was added.")
    said += suppress.checked(folder.parent)
    said.append(check_signature(folder, public_key))
    return said


def erased_names(ledger: Ledger, statement: Mapping[str, Any]) -> set[str]:
    """Files and folders of a request that `request erase` has removed, or began to remove."""
    predicate = statement["predicate"]
    places = list((predicate["erased"] or {}).get("removed", []))
    for entry in ledger.entries():
        if entry["event"] == "erasing" and entry["request"] == predicate["request"]["id"]:
            places += entry["places"]
    return {one["path"] for one in places if "path" in one}


def _gone(name: str, gone: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}/") for one in gone)


def _check_files(folder: Path, statement: Mapping[str, Any], ledger: Ledger, gone: set[str]) -> str:
    """Compare every other file of the request's folder."""
    recorded = statement["predicate"].get("files")
    if recorded is None:
        return "files: the record of an earlier version binds rows and model alone"
    files, missing, uncompared = _files(folder), 0, 0
    for name, digest in recorded.items():
        path = files.pop(name, None)
        if path is None:
            if not _gone(name, gone) and not name.startswith("eval-data/"):
                raise UnlearnError(f"{folder / name} is missing; restore it from a copy.")
            missing += 1
        elif name == ERASED and _erasing(ledger, statement):
            continue
        elif path.is_symlink():
            raise UnlearnError(f"{path} is a link now; put the file of the record back.")
        elif "sha256" in digest:
            if file_digest(path) != digest["sha256"]:
                raise UnlearnError(f"{path} is not the file of the record; restore it from a copy.")
        elif ledger.key() is None:
            uncompared += 1
        elif ledger.keyed_file(path) != digest["hmac-sha256"]:
            raise UnlearnError(f"{path} is not the file of the record; restore it from a copy.")
    if _erasing(ledger, statement):
        files.pop(ERASED, None)
    if files:
        raise UnlearnError(f"{folder / min(files)} is not in the record: it was added.")
    said = f"files: {len(recorded) - missing - uncompared} others of the request as recorded"
    said += f", {missing} gone" if missing else ""
    return said + (f", {uncompared} cannot be compared without ledger.key" if uncompared else "")


def _erasing(ledger: Ledger, statement: Mapping[str, Any]) -> bool:
    """An erasing was stopped before it was written into the record."""
    name = statement["predicate"]["request"]["id"]
    events = [entry["event"] for entry in ledger.entries() if entry["request"] == name]
    return events[-1] == "erasing"


def _check_model(
    folder: Path, statement: Mapping[str, Any], model: str | None, gone: set[str]
) -> str:
    recorded = statement["predicate"]["model"]["after"]
    request = Request.load(folder)
    source = model or request.after
    if model is None and not Path(source.split("+")[-1]).exists():
        last = Ledger(folder.parent).accepted()[-1]["request"]
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
    files = model_files(Path(facts["path"]))
    subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    for name, digest in subjects.items():
        if name not in files and model is None and _gone(f"model/{name}", gone):
            continue
        if name not in files:
            raise UnlearnError(f"{facts['path']} has no {name}, which is in the record.")
        if file_digest(files[name]) != digest:
            raise UnlearnError(
                f"{files[name]} is not the file of the record: it was changed, or it is another "
                "model (after further training: `axolotl unlearn request audit`)."
            )
    if added := sorted(set(files) - set(subjects)):
        raise UnlearnError(f"{files[added[0]]} is not in the record: it was added to the model.")
    return f"model: all {len(subjects)} files as recorded" + (", base too" if base else "")


def check_base(
    source: str, base: Mapping[str, Any] | None, recorded: Mapping[str, Any] | None
) -> None:
    """
    Raises:
        UnlearnError: Both are adapters, of different bases.
    """
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
    found = [e for e in ledger.entries() if e["request"] == request and "record" in e]
    return found[-1] if found else None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


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
    path = folder / SIGNATURE
    if public_key is None:
        return (
            "signature: there is one; give `--public-key` to check it"
            if path.is_file()
            else "signature: none"
        )
    if not path.is_file():
        raise UnlearnError(
            f"{folder / RECORD} is not signed; sign it with `axolotl unlearn request sign`."
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
    import importlib

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


def _optional(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _read_json(path: Path, cure: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UnlearnError(f"{path} does not exist; {cure}.") from None
    except ValueError as error:
        raise UnlearnError(f"{path} is not valid JSON ({error}); restore it.") from None
