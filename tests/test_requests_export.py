"""One file about a request: the same bytes each time, accepted by `verify`, and nobody in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from datetime import date

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from requests_folder import SECRET, adapter_folder, finished_request, model_folder, write_json

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.export import Handling, export, reply, verify
from axolotl_unlearn.requests.record import read, sign, write

GIVEN = Handling("The Team", "Ms Example", "case 12", date(2026, 10, 1))


@pytest.fixture
def folder(tmp_path):
    """Two subjects in one request, and another request before it."""
    base = model_folder(tmp_path / "base")
    before = {"model": str(base), "adapter": str(adapter_folder(tmp_path / "out", base))}
    write(finished_request(tmp_path / "requests", "of-somebody-else", before))
    folder = finished_request(tmp_path / "requests", "w48", before, documents=("ada", "bo"))
    write_json(folder / "subjects.json", {"T-17": ["ada"], "T-18": ["bo"]})
    write(folder)
    return folder


_DATES = dict.fromkeys(("received", "done", "due"), "2026-10-01")


def test_equal_content_is_equal_bytes_and_names_nobody(folder, tmp_path):
    facts = export(folder, tmp_path / "a.zip", GIVEN)
    export(folder, tmp_path / "b.zip", GIVEN)
    raw = (tmp_path / "a.zip").read_bytes()
    assert raw == (tmp_path / "b.zip").read_bytes()
    assert facts["received"] == "2026-10-01" and facts["due"] == "2026-11-01" and facts["late"]
    for private in (SECRET, "brass key", '"ada"', '"bo"', "of-somebody-else", "ledger.key"):
        assert private.encode() not in raw
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        reply = archive.read("REPLY.txt").decode()
        assert "request verify THIS.zip" in archive.read("VERIFY.txt").decode()
    assert "Dear Ms Example" in reply and "case 12" in reply and "2 rows" not in reply
    said = verify(tmp_path / "a.zip", str(folder / "model"))
    assert any(", late" in line for line in said) and "model: all 2 files as recorded" in said
    with pytest.raises(UnlearnError, match="exists"):
        export(folder, tmp_path / "a.zip", GIVEN)


@pytest.mark.parametrize("exact", [None, "the weights are those of a training without the rows"])
def test_the_letter_claims_no_test_where_none_decided(folder, exact):
    """An exact way is shown by bytes, whatever a test says of the rows."""
    statement = read(folder)
    statement["predicate"]["verdict"]["good"] = True
    statement["predicate"]["way"] = {"because": exact}
    written = reply(statement, dict.fromkeys(("to", "by", "reference"), "") | _DATES)
    assert ("none of our tests" in written) is (exact is None)
    assert ("training the model without them" in written) is (exact is not None)


def test_of_a_subject_it_has_no_other(folder, tmp_path):
    export(folder, tmp_path / "s.zip", Handling(), "T-17")
    with zipfile.ZipFile(tmp_path / "s.zip") as archive:
        names = archive.namelist()
        assert "1 row of training data" in archive.read("REPLY.txt").decode()
        assert "Sir or Madam" in archive.read("REPLY.txt").decode()
    assert "subjects/T-17/record.json" in names and not any("T-18" in name for name in names)
    assert "REPORT.html" not in names
    verify(tmp_path / "s.zip")
    with pytest.raises(UnlearnError, match="no subject 'T-19'"):
        export(folder, tmp_path / "t.zip", Handling(), "T-19")


def test_a_size_that_the_archive_does_not_hold(folder, tmp_path):
    """Each number of an entry's head, one after the other; EOFError came out of one."""
    path = tmp_path / "a.zip"
    export(folder, path, GIVEN)
    raw = path.read_bytes()
    start = raw.index(b"PK\x01\x02")  # of the directory
    for place in range(start, start + 46):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x81]) + raw[place + 1 :])
        with pytest.raises(UnlearnError):
            verify(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_changed_is_found(folder, tmp_path, data):
    path = tmp_path / "a.zip"
    path.unlink(missing_ok=True)
    export(folder, path, GIVEN)
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "remove":
        del raw[place]
    elif change == "add":
        raw.insert(place, data.draw(st.integers(0, 255)))
    else:
        raw[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    if bytes(raw) == path.read_bytes():
        return  # a byte beside its like
    path.write_bytes(raw)
    with pytest.raises(UnlearnError):
        verify(path)


@pytest.mark.parametrize("change", ["record", "page", "model", "request"])
def test_what_is_put_together_anew_does_not_fit(folder, tmp_path, change):
    """Archives whose own digests fit."""
    from axolotl_unlearn.requests.export import _archive

    path, page = tmp_path / "a.zip", folder / "REPORT.html"
    if change == "request":
        page.write_bytes(page.read_bytes() + b" ")
        with pytest.raises(UnlearnError, match="REPORT.html is not the file of the record"):
            export(folder, path, GIVEN)
        return
    export(folder, path, GIVEN)
    with zipfile.ZipFile(path) as archive:
        files = {n: archive.read(n) for n in archive.namelist() if n != "manifest.json"}
    if change == "model":
        (folder / "model" / "adapter_model.safetensors").write_bytes(b"other")
        with pytest.raises(UnlearnError, match="adapter_model.safetensors is not the file"):
            verify(path, str(folder / "model"))
        return
    name = {"record": "record.json", "page": "REPORT.html"}[change]
    files[name] = files[name].replace(b"w48", b"w49")
    path.write_bytes(_archive(files))
    with pytest.raises(UnlearnError, match="not the (one|page) of"):
        verify(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_the_commands_and_the_signature(folder, tmp_path):
    pytest.importorskip("model_signing")
    key, public, out = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "a.zip"
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(make, check=True)
    subprocess.run(["openssl", "ec", "-in", str(key), "-pubout", "-out", str(public)], check=True)
    sign(folder, key)
    (tmp_path / "name.txt").write_text("Ms Example\n")
    words = ["request", "export", str(folder), "--out", str(out), "--to", f"@{tmp_path}/name.txt"]
    done = CliRunner().invoke(unlearn, [*words, "--received", "2026-11-20", "--json"])
    assert json.loads(done.stdout)["to"] == "Ms Example", done.output
    words = ["request", "verify", str(out), "--public-key", str(public)]
    done = CliRunner().invoke(unlearn, words)
    assert done.exit_code == 0 and "signature: by the owner of" in done.output, done.output
