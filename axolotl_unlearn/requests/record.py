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
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from axolotl_unlearn.config.reading import read_config
from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.data.typed import row_form
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.files import locked, replacing
from axolotl_unlearn.files import write as replace_bytes
from axolotl_unlearn.metrics.audit import READINGS
from axolotl_unlearn.models import first_line
from axolotl_unlearn.requests.request import (
    PROOF,
    Facts,
    Form,
    Ledger,
    Line,
    Request,
    Sha,
    canonical,
    digest,
    fault,
    home,
    lines_of,
    model_facts,
    now,
    one_line,
    read_json,
    weights,
)  # fmt: skip
from axolotl_unlearn.requests.search import LEAST_DIGITS
from axolotl_unlearn.requests.verdict import audited, figures
from axolotl_unlearn.store import versions

RECORD, SIGNATURE, PAGE = "record.json", "record.json.sig", "REPORT.html"
#: The event of a try, and the keys of its config that the ledger repeats.
TRIED = "tried"
OPTIONS = ("learning_rate", "max_steps", "num_epochs", "micro_batch_size", "adapter")
#: An amended record until it takes the place of the one before.
DRAFT = f"{RECORD}.next"
#: What was removed and what is left, by name: for the owner alone.
ERASED = "erased.json"
#: What a killed command leaves of a file that is written when the record is there.
DRAFTS = re.compile(
    r"(record\.json\.(next|sig)|erased\.json|(subjects/[^/]+/)?(record\.json|REPORT\.html))\.\d+\.tmp"
)
#: Parts of a request's folder that ``files`` of its record leaves out: what has a place of its own
#: in the record, and the run's scratch.
APART = (RECORD, DRAFT, SIGNATURE, "model", "work")
#: Rows of a request, which `erase` and its owner may remove.
ROWS = ("data/", "eval-data/")
#: Of a request: which rows are whose.
SUBJECTS = "subjects.json"
#: v0.1 binds rows and model alone, v0.2 the other files too; v0.3 has rows among them; v0.4 says
#: from which base, rows and versions an exact way was trained, and every try.
_TYPE = "urn:axolotl-unlearn:deletion-request:v0."
PREDICATE = f"{_TYPE}4"
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT[0-9:.+Z-]{5,30}$")]
LIMITS = (
    "Unlearning is no proof of erasure: that these tests find nothing does not mean that no test "
    "would. Training again without the rows is the stronger way.",
    "What was not chosen was not forgotten: near-duplicates, quotations and other rows about the "
    "same people.",
    "Copies of the old model and of the data that left this machine are not reached. Who has the "
    "models before and after can compare them and learn what was removed (arXiv 2505.24379).",
    "The tests were made on the day of the record. Further training, merging or quantisation can "
    "bring something back: run `axolotl-unlearn request audit` after each.",
    "What the base model learned before this fine-tuning is no part of the request.",
    "Whoever answers the request made the tests, chose their settings and set the clock: no third "
    "party took part.",
    "`verify` compares files with this record. It does not show that the training was done as "
    "written, that the right rows were named, or that nothing was left out.",
    "This record and its signature say who measured what. They are no legal opinion.",
)


def _facts(**parts: Any) -> Any:
    return create_model("Facts", __base__=Facts, **parts)


_FILE = create_model(
    "File", __base__=Form, name=str, digest=create_model("Digest", __base__=Form, sha256=Sha)
)
_MODEL = _facts(digest=str | None, base=_facts(name=str, digest=str | None) | None)
_PREDICATE = _facts(
    request=_facts(id=Line, created=Time, recorded=Time, counts=dict[str, int], subject=(Line, "")),
    verdict=_facts(good=bool, status=str, reasons=list[str]),
    documents=list[_facts(document=Line, reading=Line)],
    model=_facts(before=_MODEL, after=_MODEL),
    limits=list[str],
    files=(dict[str, dict[str, str]], {}),
)


class Statement(Form):
    """A record, of this version or an earlier one.

    https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
    """

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: list[_FILE]
    predicateType: str = Field(pattern=f"^{_TYPE}[1-4]$")  # noqa: N815
    predicate: _PREDICATE


# --- writing -------------------------------------------------------------------------------------


def write(folder: Path | str) -> Path:
    """Write the record and its pages, and enter the request into the ledger.

    The last step of ``request run``. Called again after it was killed it goes on; called again
    when it is done it changes nothing.

    Raises:
        UnlearnError: The verdict is not good and nobody accepted it, or the request is in the
            ledger with another record.
    """
    folder = home(folder)
    request, ledger = Request.load(folder), Ledger(folder.parent)
    verdict = read_json(folder / "verdict.json")
    if verdict is None:
        says = f"{folder} has no verdict; finish `axolotl-unlearn request run` first."
        raise fault("record.no-verdict", says)
    if not (verdict["good"] or verdict.get("accepted")):
        says = f"{folder}: the verdict is {verdict['status']!r}, so the model is not handed over"
        cure = "look into its report, or run again with `--accept REASON`"
        raise fault("record.not-good", f"{says}; {cure}.")
    if _entry(ledger, request.id):
        read(folder)
        return folder / RECORD
    model = model_facts(request.after)
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": name, "digest": {"sha256": digest(path)}}
            for name, path in model_files(Path(model["path"])).items()
            if not path.is_dir()
        ],
        "predicate": _predicate(request, verdict, ledger, model),
    }
    if (place := Path(model["path"])).exists():  # both can be moved
        model["path"] = os.path.relpath(place, ledger.folder)
    with locked(folder):
        _enter(folder, "accepted", statement, model=model, good=bool(verdict["good"]))
    return folder / RECORD


def tried(request: Request, verdict: Mapping[str, Any]) -> None:
    """Enter a try into the ledger, whatever came of it; the same one is entered once.

    How many there were is what the best of them is worth. Tries of other requests for the same
    rows count too (`_tries`).
    """
    ledger, config = Ledger(request.folder.parent), request.path("finetune.yml")
    for name in (f"{request.way['way']}.yml", "forget.yml" if request.matched else ""):
        config = request.path(name) if name and request.path(name).is_file() else config
    given = read_config(config)
    facts = {
        "rows": _same_rows(request, ledger)[0],
        "outcome": verdict.get("outcome"),
        "status": verdict["status"],
        "way": request.way["way"],
        "seed": given.get("seed"),
        "options": {name: given[name] for name in OPTIONS if given.get(name) is not None},
        "config": digest(config),
        "weights": hashlib.sha256(canonical(weights(request.newest))).hexdigest(),
    }
    for entry in _tries(request, ledger):
        if entry["request"] == request.id and facts.items() <= entry.items():
            return
    ledger.append(TRIED, request.id, **facts)


def _tries(request: Request, ledger: Ledger) -> list[dict[str, Any]]:
    rows = _same_rows(request, ledger)
    return [e for e in ledger.entries() if e["event"] == TRIED and e.get("rows") in rows]


def _same_rows(request: Request, ledger: Ledger) -> tuple[str, str]:
    """What stands for the rows to forget in whatever order; and in entries of before their file."""
    path = request.rows("forget")
    ids = sorted(str(row["id"]) for row in read_json_lines(path))
    return ledger.keyed("\n".join(ids)), ledger.keyed_file(path)


def told(folder: Path | str, recipient: str, day: date) -> None:
    """Who else was told of the erasure, and when (GDPR, Article 19).

    Args:
        recipient: As the record is to name it; it is no subject of the request.
    """
    if day > date.today():
        raise UnlearnError(f"--day {day} is yet to come.", code="requests.dates")
    if not recipient.strip():
        raise UnlearnError("--recipient is empty; say who was told.", code="requests.no-recipient")
    one = {"recipient": one_line(recipient, "--recipient"), "day": day.isoformat()}

    def change(predicate: Mapping[str, Any]) -> dict[str, Any]:
        known = [other for other in predicate.get("told", []) if other != one]  # again after a kill
        return {"told": [*known, one]}

    amend(folder, "told", change)


def amend(
    folder: Path | str, event: str, change: Callable[[dict], Any] = lambda _: {}, **parts: Any
) -> None:
    """Change parts of the predicate of a finished record, and say so in the ledger.

    The record before stays provable: its digest is in the ledger.
    """
    with locked(folder := home(folder)):  # of two at once each would lose what the other has added
        statement = _read(folder, publish=True)
        statement["predicate"] |= parts | change(statement["predicate"])
        _enter(folder, event, statement)


def _enter(folder: Path, event: str, statement: dict[str, Any], **facts: Any) -> None:
    """Bind the folder's files, enter the record into the ledger, publish it.

    A file that is bound already keeps its digest, and one that was added later is not bound: an
    amended record vouches for no change.
    """
    ledger, predicate = Ledger(folder.parent), statement["predicate"]
    first, rows_apart = "files" not in predicate, "data" in predicate  # of v0.1, v0.2 as well
    statement["predicateType"] = PREDICATE
    made, known = _pages(folder, statement), predicate.get("files", {})
    new = {
        n: path
        for n, path in bound_files(folder).items()
        if n == ERASED or (n not in known and (first or (rows_apart and n.startswith(ROWS))))
    }
    predicate["files"] = {
        **known,
        **{name: {"hmac-sha256": ledger.keyed_file(path)} for name, path in new.items()},
        **{n: {"sha256": hashlib.sha256(content).hexdigest()} for n, content in made.items()},
    }
    raw = canonical(statement) + b"\n"
    parsed(folder / DRAFT, raw)  # nothing is entered that cannot be read
    replace_bytes(folder / DRAFT, raw, private=True)
    entry = digest(folder / DRAFT)
    ledger.append(event, predicate["request"]["id"], record=entry, **facts)
    _publish(folder, made)


def _publish(folder: Path, made: Mapping[str, bytes]) -> None:
    """The draft becomes the record, last: a run that was killed before does it again."""
    (folder / SIGNATURE).unlink(missing_ok=True)  # it was of the record before
    for name, content in made.items():
        replace_bytes(folder / name, content, private=True)
    (folder / DRAFT).replace(folder / RECORD)


def _pages(folder: Path, statement: Mapping[str, Any]) -> dict[str, bytes]:
    linked = (folder / "eval" / "report.html").is_file()
    return {
        PAGE: page(statement, evaluation=linked).encode(),
        **subjects(folder, statement),
    }


def _below(folder: Path) -> dict[str, Path]:
    """Every file and link below a folder by its name from there. Raises `UnlearnError`: a name is
    not UTF-8, so that no record can hold it; or a pipe or device is there, which would be read for
    ever."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    for name, path in names.items():
        if name.encode("utf-8", "ignore") != os.fsencode(name):
            raise fault("record.file-name", f"the name of {path} is not UTF-8; rename the file.")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise fault("record.no-file", f"{path} is a pipe or a device; remove it.")
    return {n: path for n, path in names.items() if path.is_symlink() or not path.is_dir()}


def bound_files(folder: Path) -> dict[str, Path]:
    """Every file of a request's folder that its record binds under ``files``, by name."""
    return {n: path for n, path in _below(folder).items() if n.split("/")[0] not in APART}


def model_files(model: Path) -> dict[str, Path]:
    """The files of a model folder that belong to it, by name, with those of its subfolders.

    Its README, signatures and what is hidden at its top are its owner's.
    """
    return {
        name: path
        for name, path in _below(model).items()
        if not (name.startswith(".") or name == "README.md")
        and ("/" in name or path.suffix != ".sig")
    }


def _predicate(
    request: Request, verdict: Mapping[str, Any], ledger: Ledger, model: Mapping[str, Any]
) -> dict[str, Any]:
    folder, facts = request.folder, request.facts
    lines, _ = audited(folder)
    deleted = lines_of(folder, "forget", "tested")
    # By content, too: of numbers Arrow makes others (1 is 1.0 where another row has 0.5).
    known = {ledger.keyed(name) for row in deleted for name in (row["id"], row_form(row["row"]))}
    parts = [p for p in (folder / "data").glob("*.jsonl") if not p.name.startswith("teacher-")]
    rows = [row for path in parts for row in read_json_lines(path)]
    names = {str(row[key]) for row in rows for key in ("id", "document") if row.get(key)}
    names |= {line["document"] for line in lines}
    # A small number is a count in a sentence, whosever id it is.
    names = {n for n in names if not (n.isdigit() and len(n) < LEAST_DIGITS)}
    longest = sorted(names, key=len, reverse=True)

    def without_names(texts: list[str]) -> list[str]:
        known = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")
        return [known.sub(lambda at: ledger.keyed(at[0]), t) if names else t for t in texts]

    def public(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """With a base model by its name alone where it is a folder: no path of this machine."""
        if not (given and (base := given.get("base"))):
            return given and dict(given)
        name = Path(base["name"])
        return given | {"base": base | {"name": name.name if name.is_dir() else str(name)}}

    before, after = (
        {name: one[name] for name in ("digest", "base")}
        for one in (model_facts(request.before), model)
    )
    way = request.way | (read_json(folder / PROOF) or {})
    way = {name: value for name, value in way.items() if name not in ("base", "shards")}
    tries = _tries(request, ledger)
    parts = ("request", "time", "outcome", "way", "seed", "options")
    return {
        "request": {
            "id": facts["id"],
            "created": facts["created"],
            "recorded": now(),
            "counts": facts.get("counts", {}),
            "tested": [ledger.keyed(row["id"]) for row in lines_of(folder, "tested")],
            "forms": sorted(known),
            "chosen": {k: n for k, n in facts.get("chosen", {}).items() if isinstance(n, int)},
        },
        "config": {"digest": {"sha256": facts["config"]["digest"]}},
        "model": {"before": public(before), "after": public(after)},
        "versions": {"python": platform.python_version(), **versions()},
        "way": way | ({"bound": public(way["bound"])} if way.get("bound") else {}),
        "verdict": {
            "outcome": verdict.get("outcome"),
            "good": bool(verdict["good"]),
            "status": verdict["status"],
            **{p: without_names(verdict.get(p, [])) for p in ("reasons", "missing", "says")},
            "accepted": verdict.get("accepted"),
        },
        "documents": [
            figures(line)
            | {"document": ledger.keyed(line["document"])}
            | {"before": figures(line.get("before"))}
            for line in lines
        ],
        "bound": public(facts.get("bound")),
        "tries": [{name: one.get(name) for name in parts} for one in tries],
        "earlier": _earlier(read_json(folder / "eval" / "earlier.json")),
        "attacks": _attacks(folder),
        "limits": [
            *(LIMITS if request.matched else LIMITS[1:]),
            *without_names(verdict.get("limits") or facts.get("limits", [])),
        ],
        "erased": None,
        "told": [],
    }


def _earlier(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The audit of earlier requests in numbers: the record is of this request alone."""
    if found is None:
        return None
    lines, untested = found.get("lines", []), [*found["missing"], *found.get("unreadable", ())]
    facts = {"documents": len(lines), "back": found["back"], "untested": len(untested)}
    said = (
        f"of {counted(len(lines), 'document')} of earlier requests {found['back'] or 'none'} back"
    )
    unmeasured = sum(line["reading"] == READINGS[-1] for line in lines)
    said += f"; not measured: {unmeasured}" if unmeasured else ""
    said += f"; not tested: {counted(len(untested), 'request')}" if untested else ""
    return facts | {"says": f"Looked for again: {said}."}


def _attacks(folder: Path) -> list[dict[str, Any]]:
    """What each attack found, in its own words; see `axolotl-unlearn attack`. One on the weights of
    another model says nothing of this one."""
    from axolotl_unlearn.metrics.verdict import sentence

    models = (read_json(folder / "eval" / "results.json") or {}).get("models", ())
    own = next((one.get("weights") for one in models if one.get("name") == "after"), None)
    attacks = []
    for path in (p for part in ("eval", "attacks") for p in sorted((folder / part).glob("*.json"))):
        result = read_json(path)
        if not isinstance(result, dict) or not {"attack", "title"} <= set(result):
            continue
        if None not in (own, of := result.get("weights")) and of != own:
            continue
        variants, says = list(result.get("tests", {})), result.get("sentence")  # tests on texts
        if result.get("rows"):
            variants, says = [row["variant"] for row in result["rows"]], sentence(result)
        if says:
            said = {"attack": result["attack"], "variants": variants, "says": says}
            attacks.append(said | {"digest": {"sha256": digest(path)}})
    return attacks


# --- checking ------------------------------------------------------------------------------------


def read(folder: Path | str) -> dict[str, Any]:
    """The statement of a finished request, after it was compared with the ledger.

    Those of earlier versions are read as they are: what they lack is missing.

    Raises:
        UnlearnError: A broken ledger, a request that it does not know, a changed record.
    """
    folder = home(folder)
    try:
        return _read(folder)
    except UnlearnError:
        if not folder.is_dir():
            raise
    with locked(folder):  # another command is writing it, or was killed meanwhile
        return _read(folder, publish=True)


def _read(folder: Path, publish: bool = False) -> dict[str, Any]:
    """Likewise; with the lock a draft that the ledger knows, of who was killed, is published."""
    path, draft, ledger = folder / RECORD, folder / DRAFT, Ledger(folder.parent)
    entry = _entry(ledger, folder.name)
    if entry is None:
        Request.load(folder)
        says = f"{ledger.path} does not know request {folder.name!r}"
        then = f"axolotl-unlearn request run {quote(str(folder))}"
        raise fault("record.unknown", f"{says}; finish `{then}`.")
    there, next_ = (one.is_file() and digest(one) == entry["record"] for one in (path, draft))
    if publish and next_ and not there:
        _publish(folder, _pages(folder, parsed(draft, draft.read_bytes())))
    if not path.is_file():
        raise fault("record.missing", f"{path} is missing; restore it from a copy.")
    if digest(path) != entry["record"]:
        says = f"is not the record that the ledger knows (line {entry['entry']}): it was changed"
        raise fault("record.changed", f"{path} {says}; restore it from a copy.")
    return parsed(path, path.read_bytes())


def parsed(path: Path, raw: bytes) -> dict[str, Any]:
    """A statement that one of our versions wrote.

    Raises:
        UnlearnError: It is none.
    """
    try:
        return Statement.read(raw)
    except ValueError:
        says = f"{path} is no record of this version or one before; restore it, or read it there."
        raise fault("record.unreadable", says) from None


def _entry(ledger: Ledger, request: str) -> dict[str, Any] | None:
    """The last entry about the record of a request."""
    return next((entry for entry in reversed(ledger.of(request)) if "record" in entry), None)


# --- pages ---------------------------------------------------------------------------------------


def page(statement: Mapping[str, Any], *, evaluation: bool = False) -> str:
    """REPORT.html: one page, no script, nothing from elsewhere, no text of a row.

    Args:
        evaluation: link to the evaluation's own page, eval/report.html.
    """
    from markupsafe import Markup

    from axolotl_unlearn.report import page as report

    counts = Counter(line["reading"] for line in statement["predicate"]["documents"])
    css = (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")
    shown = _template().render(
        record=statement["predicate"],
        places=places(statement["predicate"].get("erased") or {}),
        subjects=statement["subject"],
        readings={reading: counts[reading] for reading in READINGS},
        listed=lambda part: part if isinstance(part, list) else [],
        many=lambda part: len(part) if isinstance(part, list) else part,
        counted=counted,
        evaluation=evaluation,
        css=Markup(css),
    )
    return report.harmless(shown)


@cache
def _template() -> Any:
    """Compiled once: a request has a page for each subject."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    templates = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    templates.filters["says"] = lambda text: Markup(
        re.sub("`([^`]*)`", r"<code>\1</code>", escape(text[:1].upper() + text[1:]))
    )
    return templates.get_template("report.html.j2")


#: Parts of a record that say nothing of a single subject.
OF_ALL = ("config", "model", "versions", "way", "bound", "verdict", "attacks", "tries", "seconds")
OF_ALL += ("told", "limits")
_KEYED = re.compile(r"\b[0-9a-f]{32}\b")


def subjects(folder: Path, statement: Mapping[str, Any]) -> dict[str, bytes]:
    """The records of a request's subjects and their pages, by name below its folder: each is a
    record of its own, with nothing of the rows, names and files of others."""
    every = read_json(folder / SUBJECTS) or {}
    ledger, whole, made = Ledger(folder.parent), statement["predicate"], {}
    for name, rows in every.items():
        mine = {ledger.keyed(row) for row in rows}
        documents = [line for line in whole["documents"] if line["document"] in mine]
        kept, tested = ("id", "created", "recorded"), mine & {*whole["request"].get("tested", ())}
        own = _without({key: whole[key] for key in OF_ALL if key in whole}, mine) | {
            "request": {key: whole["request"][key] for key in kept}
            | {"subject": name, "chosen": {}}
            | {
                "counts": dict(
                    forget=len(mine - tested), tested=len(tested), documents=len(documents)
                )
            },
            "documents": documents,
            "earlier": None,
            "erased": _counts(whole["erased"]),
        }
        own["limits"] += [
            f"The model was made for {len(every)} subjects together: verdict, attacks and times "
            "are those of all their rows."
        ]
        record = {**statement, "predicate": own}
        made[f"subjects/{name}/record.json"] = canonical(record) + b"\n"
        made[f"subjects/{name}/REPORT.html"] = page(record).encode()
    return made


def _without(value: Any, mine: set[str]) -> Any:
    """Ids of documents only where they are this subject's."""
    if isinstance(value, str):
        return _KEYED.sub(lambda m: m[0] if m[0] in mine else "(of another)", value)
    if isinstance(value, Mapping):
        return {key: _without(part, mine) for key, part in value.items()}
    return [_without(part, mine) for part in value] if isinstance(value, list) else value


def places(erased: Mapping[str, Any]) -> int | None:
    """How many places still hold rows; before v0.4 those that were listed. None: nothing was
    searched for, as of rows that are gone or of a single word."""
    if "places" not in erased:
        return sum(len(erased.get(part) or []) for part in ("left", "named"))
    searched = any(erased.get(part, 1) for part in ("windows", "names"))
    return erased["places"] or (0 if searched else None)


def _counts(erased: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What was erased without a place: its name may be another's."""
    parts = ("removed", "kept", "left", "named")
    whole = ("time", "bytes", "windows", "names", "model_before", "too_short", "unsearched")
    return erased and {
        **{part: len(erased[part]) for part in parts if part in erased},
        **{k: erased[k] for k in whole if k in erased},
        "places": places(erased),
    }


# --- signatures ----------------------------------------------------------------------------------


def sign_file(path: Path, private_key: Path | str) -> Path:
    """The signature of a file beside it, as ``NAME.sig``.

    Args:
        private_key: PEM file of an elliptic curve key (NIST P-256, P-384 or P-521).
    """
    config, made = _model_signing("signing").Config(), path.with_name(f"{path.name}.sig")
    try:
        config.use_elliptic_key_signer(private_key=Path(private_key))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = "it is a key of another kind" if type(error) is AttributeError else first_line(error)
        cure = "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem`"
        says = f"{private_key} cannot sign ({why}); give the PEM file of an elliptic curve key"
        raise fault("record.no-signing-key", f"{says}: {cure}.") from None
    with replacing(made, private=True) as draft:
        config.sign(path, draft)
    return made


def signature(path: Path, public_key: Path | str | None) -> tuple[str, str]:
    """Of a file with ``NAME.sig`` beside it: none, not compared or owner; and a sentence.

    Raises:
        UnlearnError: It is not the signature of the file under this key.
    """
    made = path.with_name(f"{path.name}.sig")
    if not made.is_file():
        return "none", "none: whoever has the key of the ledger could have written all of this"
    if public_key is None:
        return "not compared", "there is one; give `--public-key` to check it"
    config = _model_signing("verifying").Config()
    try:
        config.use_elliptic_key_verifier(public_key=Path(public_key)).verify(path, made)
    except Exception as error:  # the library raises what its parts raise
        says = f"{made} is not that of {path.name} under {public_key} ({first_line(error)})."
        raise fault("record.other-signature", says) from None
    return "owner", f"by the owner of {public_key}"


def check_key(public_key: Path | str | None) -> None:
    """Raises `UnlearnError`: no signature can be compared with it."""
    if public_key is not None and _model_signing("verifying") and not Path(public_key).is_file():
        says = f"{public_key} does not exist; name the PEM file of the public key."
        raise fault("record.no-public-key", says)


def _model_signing(part: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{part}")
    except ImportError:
        says = "signatures need the package model-signing"
        cure = "install it: `pip install 'axolotl-unlearn[sign]'`"
        raise fault("record.no-model-signing", f"{says}; {cure}.") from None
