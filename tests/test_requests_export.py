"""One file about a request: signed as one, bounded before it is read, and nobody else in it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tracemalloc
import zipfile
from datetime import date
from pathlib import Path

import pytest
from fault_codes import fails
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from requests_folder import (
    SECRET,
    adapter_folder,
    answered,
    finished_request,
    keys,  # noqa: F401
    model_folder,
    said,
    write_json,
    write_lines,
)

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import verify as exporting
from axolotl_unlearn.requests.record import amend, read, sign_file, told, tried, write
from axolotl_unlearn.requests.request import Ledger, Request, canonical
from axolotl_unlearn.requests.verify import export, reply, verify, verify_export

GIVEN = {
    "by": "The Team",
    "to": "Ms Example",
    "reference": "case 12",
    "received": date(2026, 10, 1),
}


def recorded(place: Path) -> Path:
    """Two subjects in one request, and another request before it."""
    base = model_folder(place / "base")
    before = {"model": str(base), "adapter": str(adapter_folder(place / "out", base))}
    write(finished_request(place / "requests", "of-somebody-else", before))
    folder = finished_request(place / "requests", "w48", before, documents=("ada", "bo"))
    write_json(folder / "subjects.json", {"T-17": ["ada"], "T-18": ["bo"]})
    write(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return recorded(tmp_path)


@pytest.fixture(scope="module")
def signed(tmp_path_factory, keys):  # noqa: F811
    """The files of an export with a signature."""
    place = tmp_path_factory.mktemp("signed")
    export(recorded(place), place / "a.zip", **GIVEN, private_key=keys[0])
    return opened(place / "a.zip")


_DATES = dict.fromkeys(("received", "done", "due"), "2026-10-01")


def opened(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_equal_content_is_equal_bytes_and_names_nobody(folder, tmp_path):
    facts = export(folder, tmp_path / "a.zip", **GIVEN)
    export(folder, tmp_path / "b.zip", **GIVEN)
    raw = (tmp_path / "a.zip").read_bytes()
    assert raw == (tmp_path / "b.zip").read_bytes()
    assert facts["received"] == "2026-10-01" and facts["due"] == "2026-11-01" and facts["late"]
    for private in (SECRET, "brass key", '"ada"', '"bo"', "of-somebody-else", "ledger.key"):
        assert private.encode() not in raw
    files = opened(tmp_path / "a.zip")
    reply = files["REPLY.txt"].decode()
    assert "request verify THIS.zip" in files["VERIFY.txt"].decode()
    assert "Dear Ms Example" in reply and "case 12" in reply and "2 rows" not in reply
    found = verify_export(tmp_path / "a.zip", str(folder / "model")).require()
    assert any(", late" in line for line in found.says)
    for other in ("nowhere", str(folder.parent.parent / "base")):  # 2 says that a file was changed
        assert verify_export(tmp_path / "a.zip", other).exit == 5
    fields = (found.signature, found.model, found.files, found.ledger)
    assert fields == ("none", "same", "same", "not compared") and found.exit == 3
    with fails("requests.out-exists"):
        export(folder, tmp_path / "a.zip", **GIVEN)


def test_what_is_not_as_recorded_is_not_answered(folder, tmp_path):
    """Of a page that was changed, or of a model whose removal was stopped; dates that cannot be."""
    with fails("requests.dates"):
        export(folder, tmp_path / "a.zip", **GIVEN, due=date(2026, 9, 1))
    page = (folder / "REPORT.html").read_text()
    (folder / "REPORT.html").write_text(page.replace("Deletion", "No deletion"))
    with fails("record.changed"):
        export(folder, tmp_path / "a.zip", **GIVEN)
    (folder / "REPORT.html").write_text(page)
    Ledger(folder.parent).append("erasing", "w48", places=[], begun="x")
    with fails("requests.half-erased"):
        export(folder, tmp_path / "a.zip", **GIVEN)
    assert not (tmp_path / "a.zip").exists()


ERASED = {"time": "2026-11-25T00:00:00+00:00", "removed": [], "kept": [], "left": [], "bytes": 0}


@pytest.mark.parametrize(
    ("erased", "says"),
    [
        (None, "The model before has not been erased"),
        (ERASED | {"places": 3}, "3 places that we know of still hold such rows"),
        (ERASED | {"places": 1}, "1 place that we know of still holds such rows"),
        (ERASED | {"places": 0, "windows": 0, "names": 1}, "0 places that we know of still hold"),
        (ERASED | {"places": 0, "windows": 0, "names": 0}, "such rows are left was not searched"),
        (ERASED | {"left": [{"path": "x"}], "named": [{"path": "y"}]}, "2 places that we know of"),
        (
            ERASED | {"places": 0, "too_short": 2},
            "We did not look for 2 texts of a word or a short",
        ),
        (ERASED | {"places": 0, "unsearched": "3 weights"}, "We could not look into: 3 weights."),
        # It said "we removed the model before" of one that `erase` had listed as kept.
        (ERASED | {"model_before": False}, "The model before is not among them."),
        (ERASED | {"model_before": True}, "The model before is among them."),
    ],
)
def test_the_letter_counts_every_place_and_claims_no_test_where_none_decided(folder, erased, says):
    """It said 0 while files that were only named held rows, and where nothing was searched for, or
    not for all; an exact way is shown by bytes, but not if its verdict is not good."""
    statement, handled = read(folder), dict.fromkeys(("to", "by", "reference"), "") | _DATES
    predicate = statement["predicate"]
    predicate |= {"erased": erased, "told": [{"day": "2026-11-26", "recipient": "Cloud Ltd"}]}
    for exact in (None, "the weights are those of a training without the rows"):
        predicate["way"] = {"because": exact}
        written = reply(statement, handled)
        assert "We did so on 2026-10-01 (due by 2026-10-01)." in written
        assert says in written and "On 2026-11-26 we told Cloud Ltd." in written
        known = "model_before" in (erased or {})  # a record before v0.4 does not say it
        assert ("The model before is" in written) is known
        assert ("none of our tests" in written) is (exact is None)
        assert ("training the model without them" in written) is (exact is not None)
        predicate["verdict"]["good"] = False
        written = reply(statement, handled)
        predicate["verdict"]["good"] = True
        assert "Our tests did not show that the model has forgotten these rows" in written
    del predicate["told"], predicate["erased"]  # as v0.1 may
    assert "has not been erased" in reply(statement, handled)


def test_who_was_told_and_when_it_was_erased_stand_in_the_record(folder):
    amend(folder, "erased", erased=ERASED | {"places": 0})
    said("told", folder, "--recipient", "Cloud Ltd", "--day", "2026-11-26")
    predicate = read(folder)["predicate"]
    assert predicate["told"] == [{"recipient": "Cloud Ltd", "day": "2026-11-26"}]
    page = (folder / "REPORT.html").read_text()
    assert "2026-11-26: Cloud Ltd was told" in page and "Erased 2026-11-25" in page
    with fails("requests.control-character"):
        told(folder, "Cloud\nLtd", date(2026, 11, 26))
    with fails("requests.dates"):
        told(folder, "Cloud Ltd", date(2126, 11, 26))
    with fails("requests.dates"):  # the letter said that it was done before it was asked for
        export(folder, folder.parent.parent / "a.zip", received=date(2126, 11, 26))
    verify(folder).require()


# --- one subject of many -------------------------------------------------------------------------


def test_of_a_subject_it_has_nothing_of_others(tmp_path):
    """Names of subjects, ids of their documents, file names and requests of others were in it."""
    rows = [{"id": one, "row": {"text": SECRET}} for one in ("ada", "bo")]
    whose = {"documents": ("ada", "bo"), "forget": rows}
    folder = finished_request(tmp_path / "requests", "w48", **whose)
    write_json(folder / "subjects.json", {"ada@example.com": ["ada"], "bo@example.com": ["bo"]})
    write_lines(folder / "data" / "tested.jsonl", rows[:1])
    verdict = json.loads((folder / "verdict.json").read_text())
    write_json(folder / "verdict.json", verdict | {"reasons": ["document bo is still said"]})
    write(folder)
    place = {"path": "../bo@example.com.jsonl", "kind": "x", "bytes": 1}
    amend(folder, "erased", erased=ERASED | {"removed": [place], "places": 2})
    ledger = Ledger(folder.parent)
    ledger.append("erasing", "w48", places=[place])
    more = {"places": 2, "too_short": 1, "unsearched": "1 PDF"}
    amend(folder, "erased", erased=ERASED | {"removed": [place]} | more)
    out = tmp_path / "s.zip"
    handling = export(folder, out, subject="ada@example.com")
    files = opened(out)
    for name, content in files.items():
        assert b"bo@example" not in content and ledger.keyed("bo").encode() not in content, name
    statement = json.loads(files["record.json"])
    assert [one["document"] for one in statement["predicate"]["documents"]] == [ledger.keyed("ada")]
    assert statement["predicate"]["erased"]["removed"] == 1
    assert b"We removed 1 row of training data (1 of them it was only" in files["REPLY.txt"]
    assert b"2 places that we know of" in files["REPLY.txt"]
    assert b"look into: 1 PDF. We did not look for 1 text of a word" in files["REPLY.txt"]
    assert b"record lists" not in files["REPLY.txt"], "that of a subject has their number alone"
    whole = (folder / "record.json").read_bytes()
    assert handling["record"] == hashlib.sha256(whole).hexdigest(), "the digest of the whole"
    verify_export(out, str(folder / "model")).require()
    with fails("record.no-subject"):
        export(folder, tmp_path / "t.zip", subject="T-19")


# --- forged --------------------------------------------------------------------------------------


def _handled(**facts):
    def change(files):
        said = json.loads(files["handling.json"]) | facts
        files["handling.json"] = canonical(said) + b"\n"

    return change


def _put(name: str, content: bytes | None):
    def change(files):
        files.pop(name, None)
        if content is not None:
            files[name] = content

    return change


def _replaced(name: str, old: bytes, new: bytes):
    def change(files):
        assert old in files[name]
        files[name] = files[name].replace(old, new)

    return change


def _statement(way: tuple[str, ...], value):
    """In the record, with entries and handling that fit it."""

    def change(files):
        statement = place = json.loads(files["record.json"])
        for key in way[:-1]:
            place = place[key]
        place[way[-1]] = value
        files["record.json"] = canonical(statement) + b"\n"
        known = hashlib.sha256(files["record.json"]).hexdigest()
        entries = [json.loads(line) for line in files["ledger-entries.jsonl"].splitlines()]
        lines = [canonical(entry | {"record": known}) + b"\n" for entry in entries]
        files["ledger-entries.jsonl"] = b"".join(lines)
        _handled(record=known)(files)

    return change


FORGED = {
    "dates": _handled(received="2026-11-26", due="2027-11-26", late=False),
    "late": _handled(late=False),
    "of another request": _handled(request="w49"),
    "done on another day": _handled(done="2026-11-02"),
    "a line": _handled(to="x\nsignature: by the owner of key.pub"),
    "an escape": _handled(by="\x1b[2J"),
    "turned order": _handled(reference="\u202eabc"),
    "a number for a name": _handled(to=7),
    "head is a number": _handled(head=7),
    "head has a line": _handled(head={"entries": "x\nsignature: by the owner", "last": "y"}),
    "head is of fewer": _handled(head={"entries": 0, "last": "0" * 64}),
    "handling is a list": _put("handling.json", b"[1]"),
    "a key twice": _replaced("handling.json", b'"late":', b'"late":false,"late":'),
    "a time that is none": _statement(("predicate", "request", "created"), "x"),
    "an infinite loss": _replaced("record.json", b'"versions":{', b'"versions":{"a":1e999,'),
    "letter": _put("REPLY.txt", b"We removed every copy. This deletion is lawful."),
    "page": _put("REPORT.html", b"<script>alert(1)</script>"),
    "entries gone": _put("ledger-entries.jsonl", None),
    "a place elsewhere": _put("../../evil.sh", b"x"),
    "record": _replaced("record.json", b"w48", b"w49"),
    "subject is a number": _statement(("subject",), 7),
    "a reading": _replaced("record.json", b'"reading":"not told"', b'"reading":"not said"'),
    "no request": _statement(("predicate", "request"), [1]),
    "record is a list": _put("record.json", b"[]"),
    "record is deep": _put("record.json", b"[" * 100_000 + b"]" * 100_000),
    "another event": _replaced("ledger-entries.jsonl", b'"accepted"', b'"allerased"'),
    "an entry is a number": _put("ledger-entries.jsonl", b"7\n"),
}


#: What only a signature is of.
UNSIGNED = ("dates", "letter", "page", "another event")


@pytest.mark.parametrize("change", FORGED)
def test_what_is_put_together_anew(signed, tmp_path, keys, change):  # noqa: F811
    """Its manifest fits: with the owner's signature of another one beside it, or none."""
    files, path = dict(signed), tmp_path / "a.zip"
    signature = {"manifest.json.sig": files.pop("manifest.json.sig")}
    del files["manifest.json"]
    FORGED[change](files)
    files["manifest.json"] = exporting._manifest(files)
    for beside, code, says in ((signature, 4, "other"), ({}, 3, "none")):
        path.write_bytes(exporting._archive(files | beside))
        code = code if change in UNSIGNED else 2
        done = said("verify", path, "--public-key", keys[1], "--json", code=code)
        assert json.loads(done.stdout).get("signature") in (None, says)
        lines = done.stderr.splitlines()
        assert not any(line.startswith("signature: by the owner") for line in lines)
        assert "\x1b" not in done.stderr and "\u202e" not in done.stderr


@pytest.mark.parametrize("name", exporting.FILES)
@pytest.mark.parametrize("change", [b"added to it", None])
def test_beside_the_signed_manifest_no_file_may_change(signed, tmp_path, keys, name, change):  # noqa: F811
    """The archive is whole and the signature the owner's."""
    files = dict(signed)
    _put(name, change and files[name] + change)(files)
    (tmp_path / "a.zip").write_bytes(exporting._archive(files))
    found = verify_export(tmp_path / "a.zip", public_key=keys[1])
    assert (found.signature, found.files, found.exit) == ("owner", "changed", 2)


def _zip(how: int, files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


BOMBS = {
    "zeros": lambda: _zip(zipfile.ZIP_DEFLATED, {"record.json": bytes(1 << 29)}),
    "members": lambda: _zip(zipfile.ZIP_STORED, {f"{n}": b"" for n in range(50_000)}),
    "large": lambda: bytes(exporting.LARGEST + 1),
    "directory": lambda: b"PK\x01\x02" * 200_000 + b"PK\x05\x06" + bytes(18),
    "no zip": lambda: b"PK",
}


@pytest.mark.parametrize("name", BOMBS)
def test_sizes_are_bounded_before_anything_is_read(tmp_path, name):
    """A file of 1.5 MB took 3.3 GB."""
    (tmp_path / name).write_bytes(BOMBS[name]())
    tracemalloc.start()
    with fails("record.no-export"):
        verify_export(tmp_path / name)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * exporting.LARGEST


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_changed_is_found(signed, tmp_path, data):
    path, whole = tmp_path / "a.zip", exporting._archive(signed)
    raw = bytearray(whole)
    place = data.draw(st.integers(0, len(raw) - 1))
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "remove":
        del raw[place]
    elif change == "add":
        raw.insert(place, data.draw(st.integers(0, 255)))
    else:
        raw[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    if bytes(raw) == whole:
        return  # a byte beside its like
    path.write_bytes(raw)
    with pytest.raises(UnlearnError):
        verify_export(path).require()


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "a\u202eb", "a\u2028b", "\x00"])
def test_fields_are_one_line_of_plain_text(tmp_path, text):
    for part in ("to", "by", "reference"):
        with fails("requests.control-character"):
            export(tmp_path, tmp_path / "a.zip", **{part: text})


def test_the_commands_and_the_signature(folder, tmp_path, keys):  # noqa: F811
    private, public, other = keys
    out = tmp_path / "a.zip"
    (tmp_path / "name.txt").write_text("Ms Example\n")
    words = ("--to", f"@{tmp_path}/name.txt", "--received", "2026-11-20", "--key", private)
    done = said("export", folder, "--out", out, *words, "--json")
    assert json.loads(done.stdout)["to"] == "Ms Example"
    assert "has not been erased, and the reply says so: `request erase` first" in done.output
    mine = ("verify", out, "--public-key", public, "--model", folder / "model")
    found = answered(*mine)
    fields = [found[part] for part in ("signature", "model", "files", "ledger")]
    assert fields == ["owner", "same", "same", "whole"]
    assert answered("verify", out, code=3)["signature"] == "not compared"
    said("verify", out, "--public-key", other, code=4)
    for place, option in ((out, "--head"), (folder, "--rows"), (folder, "--base")):
        said("verify", place, option, out, code=2)  # it would be compared with nothing
    another = f"{model_folder(tmp_path / 'another', b'another')}+{folder / 'model'}"
    for place in (folder, out):
        found = answered("verify", place, "--public-key", public, "--model", another, code=5)
        assert found["model"] == "other", "on another base"
    (folder / "model" / "adapter_model.safetensors").write_bytes(b"other")
    assert answered(*mine, code=5)["model"] == "other"


def test_an_export_that_was_kept_finds_an_older_ledger(folder, tmp_path):
    export(folder, tmp_path / "a.zip", **GIVEN)
    kept = answered("verify", folder, "--head", tmp_path / "a.zip", code=3)
    assert kept["ledger"] == "whole"
    older = shutil.copytree(folder.parent, tmp_path / "older")
    amend(folder, "erased", erased=ERASED)
    export(folder, tmp_path / "b.zip", **GIVEN)
    found = answered("verify", older / "w48", "--head", tmp_path / "b.zip", code=2)
    assert found["ledger"] == "broken"


def test_every_try_has_an_entry_and_stands_in_the_record(tmp_path):
    """The best of how many: refused, not shown and shown ones, of other requests too; the same rows
    in another order had lost the tries of before."""
    rows = [{"id": who, "dataset": 0, "row": {"text": SECRET}} for who in ("ada", "bo")]
    for name, outcome in (("1", "refused"), ("2", "not shown")):
        folder = finished_request(tmp_path / "requests", name, forget=rows[:: 3 - 2 * int(name)])
        (folder / "forget.yml").write_text("seed: 7\nmax_steps: 5\nbase_model: x\n")
        made = {"outcome": outcome, "status": "x", "good": False}
        for _ in range(2):  # a run that goes on does not count twice
            tried(Request.load(folder), made)
    (folder / "model" / "model.safetensors").write_bytes(b"another seed")
    tried(Request.load(folder), {"outcome": "shown", "status": "good", "good": True})
    write(folder)
    tries = read(folder)["predicate"]["tries"]
    assert [(t["request"], t["outcome"]) for t in tries] == [
        ("1", "refused"), ("2", "not shown"), ("2", "shown")
    ]  # fmt: skip
    assert {(t["seed"], t["options"]["max_steps"]) for t in tries} == {(7, 5)}
    assert (folder / "REPORT.html").read_text().count("seed 7") == 3
    verify(folder).require()


@pytest.mark.parametrize("kind", ["ed25519", "none", "text"])
def test_a_key_that_cannot_sign_is_refused_with_the_line_that_makes_one(tmp_path, keys, kind):  # noqa: F811
    key, signed = tmp_path / "key.pem", tmp_path / "record.json"
    signed.write_text("{}")
    if kind == "text":
        key.write_text("no key")
    elif kind != "none":
        subprocess.run(["openssl", "genpkey", "-algorithm", kind, "-out", key], check=True)
    with fails("record.no-signing-key") as caught:
        sign_file(signed, key)
    assert "openssl ecparam" in str(caught.value)
