"""The ledger: any single change is found, and nothing is lost."""

from __future__ import annotations

import hashlib
import hmac
import json
import os

import kills
import pytest
from fault_codes import fails
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import request
from axolotl_unlearn.requests.request import HEAD, KEY, LEDGER, Ledger, canonical

MODEL = {"path": "gone", "digest": "ab" * 32, "base": None}


def written(folder, entries: int = 4) -> Ledger:
    ledger = Ledger(folder)
    for number in range(entries):
        ledger.append("accepted", f"2026-{number:03}", model=MODEL | {"digest": f"{number:064x}"})
    return ledger


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Bytes of a ledger of four entries, its head and its key."""
    folder = tmp_path_factory.mktemp("requests")
    written(folder)
    return {name: (folder / name).read_bytes() for name in (LEDGER, HEAD, KEY)}


def put(folder, files) -> Ledger:
    for name, content in files.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_bytes(content)
    if (folder / KEY).exists():
        (folder / KEY).chmod(0o600)
    return Ledger(folder)


def test_chain_by_hand(tmp_path):
    """Each line's `previous` is the SHA-256 of the line before; `mac` an HMAC of the rest."""
    written(tmp_path, 3)
    lines = (tmp_path / LEDGER).read_bytes().splitlines()
    entries = [json.loads(line) for line in lines]
    assert entries[0]["previous"] == "0" * 64
    for line, after in zip(lines, entries[1:], strict=False):
        assert after["previous"] == hashlib.sha256(line).hexdigest()
    key = bytes.fromhex((tmp_path / KEY).read_text())
    content = {name: value for name, value in entries[1].items() if name != "mac"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    mac = hmac.new(key, b"entry\0" + text.encode(), hashlib.sha256).hexdigest()
    assert entries[1]["mac"] == mac
    assert Ledger(tmp_path).entries() == entries


def test_the_chain_is_checked_once_until_a_byte_of_it_changes(tmp_path, monkeypatch):
    """Each question about one request checked the lines of all."""
    written(tmp_path, 20)
    lines, calls = (tmp_path / LEDGER).read_bytes(), []
    mac = request._mac
    monkeypatch.setattr(request, "_mac", lambda *given: calls.append(given[1]) or mac(*given))
    for number in range(20):
        (entry,) = Ledger(tmp_path).of(f"2026-{number:03}")
        entry["request"] = "changed by whoever asked"
    assert calls.count("entry") <= 20
    ledger = Ledger(tmp_path)
    Ledger(tmp_path).append("accepted", "by another process", model=MODEL)
    assert len(ledger.entries()) == 21
    whole = {name: (tmp_path / name).read_bytes() for name in (LEDGER, HEAD, KEY)}
    other = {LEDGER: whole[LEDGER].replace(b"2026-003", b"2026-004"), KEY: b"11" * 32 + b"\n"}
    for name, content in (other | {HEAD: None}).items():
        put(tmp_path, whole | {name: content})
        with pytest.raises(UnlearnError):
            ledger.entries()
    put(tmp_path, whole | {LEDGER: lines})  # the lines of before, which were checked
    with fails("ledger.end"):
        ledger.entries()


def test_the_key_is_read_once_for_all_rows(tmp_path, monkeypatch):
    ledger, calls, key = Ledger(tmp_path), [], Ledger.key
    first = ledger.keyed("row 0")
    monkeypatch.setattr(Ledger, "key", lambda self: calls.append(self) or key(self))
    assert len({ledger.keyed(f"row {n}") for n in range(50)} | {first}) == 50
    assert len(calls) <= 1 and Ledger(tmp_path).keyed("row 0") == first


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_single_change_of_a_file_is_found(four, tmp_path, data):
    """A byte changed, removed or added anywhere, in ledger or head, with the key or without; the
    HMAC of the head only with it."""
    name = data.draw(st.sampled_from([LEDGER, HEAD]))
    raw, keyed = four[name], data.draw(st.booleans(), label="with key")
    last = len(raw) - 1 if keyed or name == LEDGER else raw.index(b"mac") - 3
    place = data.draw(st.integers(0, last))
    byte = bytes([data.draw(st.integers(0, 255).filter(lambda b: b != raw[place]))])
    middle = data.draw(st.sampled_from([byte, b"", byte + raw[place : place + 1], None]))
    changed = raw[:place] + (b"" if middle is None else middle + raw[place + 1 :])
    ledger = put(tmp_path, four | {name: changed})
    if not keyed:
        (tmp_path / KEY).unlink()
    with pytest.raises(UnlearnError):
        ledger.entries()
    assert (tmp_path / name).read_bytes() == changed


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_line_removed_swapped_repeated_or_added_is_found(four, tmp_path, data):
    lines = four[LEDGER].splitlines(keepends=True)
    a, b = data.draw(
        st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda ab: ab[0] != ab[1])
    )
    swapped = list(lines)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    # A line that fits the chain, by somebody without the key.
    last = hashlib.sha256(lines[-1].rstrip(b"\n")).hexdigest()
    forged = json.loads(lines[-1]) | {"entry": 5, "previous": last}
    added = [*lines, canonical(forged) + b"\n"]
    kinds = [lines[:a] + lines[a + 1 :], swapped, lines[:a] + [lines[b]] + lines[a:], added, []]
    changed = data.draw(st.sampled_from(kinds))
    ledger = put(tmp_path, four | {LEDGER: b"".join(changed)})
    if not data.draw(st.booleans(), label="with key"):
        (tmp_path / KEY).unlink()
    with pytest.raises(UnlearnError):
        ledger.entries()


def test_a_ledger_written_anew_is_found_with_the_key_only(four, tmp_path):
    """Somebody changes an entry and mends chain and head behind it."""
    entries = [json.loads(line) for line in four[LEDGER].splitlines()]
    entries[1]["request"] = "another"
    before, lines = "0" * 64, []
    for entry in entries:
        lines.append(canonical(entry | {"previous": before}))
        before = hashlib.sha256(lines[-1]).hexdigest()
    files = {
        LEDGER: b"\n".join(lines) + b"\n",
        HEAD: canonical({"entries": 4, "last": before, "mac": "0" * 64}) + b"\n",
    }
    assert len(put(tmp_path, files).entries()) == 4
    with fails("ledger.mac"):
        put(tmp_path, files | {KEY: four[KEY]}).entries()


def test_wrong_keys_are_one_sentence(four, tmp_path):
    faults = dict.fromkeys((b"not a key", four[KEY] + b"\t", b" " + four[KEY]), "ledger.no-key")
    faults |= {four[KEY].strip(): "ledger.no-key", b"11" * 32 + b"\n": "ledger.mac", None: ""}
    for key, code in faults.items():
        ledger = put(tmp_path, four | {KEY: key})
        with fails(code or "ledger.missing"):
            ledger.append("accepted", "next", model=MODEL)
        assert {name: (tmp_path / name).read_bytes() for name in (LEDGER, HEAD)} == {
            name: four[name] for name in (LEDGER, HEAD)
        }
    put(tmp_path, four)
    (tmp_path / KEY).chmod(0o644)
    with fails("ledger.open-key"):
        ledger.entries()


def head_of(entries: list[bytes], key: bytes | None) -> bytes:
    """A head as its format says, by hand."""
    last = hashlib.sha256(entries[-1]).hexdigest() if entries else "0" * 64
    head = {"entries": len(entries), "last": last}
    if key is not None:
        mac = hmac.new(bytes.fromhex(key.decode()), b"head\0" + canonical(head), hashlib.sha256)
        head["mac"] = mac.hexdigest()
    return canonical(head) + b"\n"


def test_an_append_that_was_killed_before_the_head_goes_on(four, tmp_path):
    """The line is whole and bears our HMAC: the head is only one behind, and follows."""
    head = head_of(four[LEDGER].splitlines()[:3], four[KEY])
    ledger = put(tmp_path, four | {HEAD: head})
    assert len(ledger.entries()) == 4
    ledger.append("accepted", "next", model=MODEL)
    assert json.loads((tmp_path / HEAD).read_bytes())["entries"] == 5
    assert len(ledger.entries()) == 5


def test_the_making_of_a_key_may_be_killed_at_any_moment(tmp_path):
    """A key that was cut off stopped every later command, which said: put the key back."""

    def first(folder):
        return lambda: Ledger(folder).keyed("ada-quill")

    whole = kills.moments(first(tmp_path / "whole"), tmp_path)
    for at in range(whole // 3, whole, whole // 16):
        folder = tmp_path / str(at)
        kills.kill_at(first(folder), at, tmp_path)
        assert Ledger(folder).keyed("ada-quill") and (folder / ".gitignore").is_file(), at


def _cut(four, count: int, key: bytes | None = None) -> dict:
    """The first entries, and a head that fits them, made without the key or with another."""
    lines = four[LEDGER].splitlines()[:count]
    return four | {LEDGER: b"".join(x + b"\n" for x in lines), HEAD: head_of(lines, key)}


#: What somebody without the key did -> the code of the fault.
ENDS = {
    "tail cut, head as before 0.3": (lambda f: _cut(f, 2), "ledger.end"),
    "tail cut, head with another key": (lambda f: _cut(f, 2, b"22" * 32), "ledger.mac"),
    "all entries cut": (lambda f: f | {LEDGER: b"", HEAD: head_of([], b"22" * 32)}, "ledger.mac"),
    "the HMAC of the head taken off": (lambda f: _cut(f, 4), "ledger.end"),
    "ledger and head removed": (lambda f: f | {LEDGER: None, HEAD: None}, "ledger.missing"),
    "ledger emptied, head removed": (lambda f: f | {LEDGER: b"", HEAD: None}, "ledger.missing"),
    "head removed": (lambda f: f | {HEAD: None}, "ledger.missing"),
}


@pytest.mark.parametrize("change", ENDS)
def test_an_end_that_was_cut_is_found(four, tmp_path, change):
    changed, code = ENDS[change]
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / "record.json").write_text("{}")
    ledger = put(tmp_path, changed(four))
    with fails(code):
        ledger.entries()
    with fails(code):
        ledger.append("accepted", "next", model=MODEL)


def test_an_older_copy_of_all_is_found_with_a_head_kept_elsewhere(four, tmp_path):
    ledger = put(tmp_path, four)
    kept, first = ledger.head(), json.loads(head_of(four[LEDGER].splitlines()[:1], None))
    assert ledger.goes_on_from(kept) and ledger.goes_on_from(first)
    older = put(tmp_path, _cut(four, 2, four[KEY].strip()))
    assert len(older.entries()) == 2, "all its HMACs are right"
    with fails("ledger.older-copy"):
        older.goes_on_from(kept)
    for _ in range(3):  # another end of the same beginning
        older.append("erased", "r9")
    with fails("ledger.older-copy"):
        older.goes_on_from(kept)
    assert older.goes_on_from(first)


def test_what_is_no_fault_is_said(four, tmp_path, monkeypatch):
    """A head of a version before, a clock that runs backwards, a record that no line knows."""
    lines = four[LEDGER].splitlines()
    assert put(tmp_path, four).warnings() == []
    key, before, old = bytes.fromhex(four[KEY].decode()), "0" * 64, []
    for number, line in enumerate(lines, start=1):  # as 0.2 wrote them, the third of a day before
        entry = {n: v for n, v in json.loads(line).items() if n not in ("format", "mac")}
        entry |= {"previous": before} | ({"time": "2020-01-01"} if number == 3 else {})
        mac = hmac.new(key, b"entry\0" + canonical(entry), hashlib.sha256).hexdigest()
        old.append(canonical(entry | {"mac": mac}))
        before = hashlib.sha256(old[-1]).hexdigest()
    content = {LEDGER: b"".join(x + b"\n" for x in old), HEAD: head_of(old, None)}
    ledger = put(tmp_path, four | content)
    (tmp_path / "r9").mkdir()
    (tmp_path / "r9" / "record.json").write_text("{}")
    said = ledger.warnings()
    assert "did not bind" in said[0] and "line 3 is of 2020" in said[1] and "r9" in said[2]
    ledger.append("accepted", "r9", model=MODEL)
    assert len(ledger.warnings()) == 1, "the head is bound now"
    monkeypatch.setattr("axolotl_unlearn.requests.request.now", lambda: "2021-01-01T00:00:00+00:00")
    with fails("ledger.clock"):
        ledger.append("erased", "r9")


def test_current_model_and_a_request_run_twice(tmp_path):
    ledger = Ledger(tmp_path / "requests")
    assert ledger.entries() == [] and ledger.current() is None
    assert not (tmp_path / "requests").exists(), "reading makes nothing"
    model = tmp_path / "requests" / "2026-001" / "model"
    model.mkdir(parents=True)
    ledger.append("accepted", "2026-001", model=MODEL | {"path": "2026-001/model"})
    ledger.append("erased", "2026-001", removed=[])
    assert ledger.current() == MODEL | {"path": str(model)}
    os.rename(tmp_path / "requests", tmp_path / "moved")
    ledger = Ledger(tmp_path / "moved")
    assert ledger.current()["path"] == str(tmp_path / "moved" / "2026-001" / "model")
    with fails("requests.run-twice"):
        ledger.refuse_twice("2026-001")
    ledger.refuse_twice("2026-002")


def test_key_is_private_and_makes_the_ids(tmp_path):
    ledger = Ledger(tmp_path)
    name = ledger.keyed("ada-quill")
    assert len(name) == 32 and ledger.keyed("ada-quill") == name
    assert name != hashlib.sha256(b"ada-quill").hexdigest()[:32]
    assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o600
    assert Ledger(tmp_path / "other").keyed("ada-quill") != name
