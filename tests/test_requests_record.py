"""The record: in-toto shape, no text or name in it, and any change found."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from datetime import date

import kills
import pytest
from browser import hostile, needs_chromium, title_in_browser
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

from axolotl_unlearn import files
from axolotl_unlearn.requests.audit import Audit, audit_requests
from axolotl_unlearn.requests.record import amend, page, read, told, write
from axolotl_unlearn.requests.request import Ledger
from axolotl_unlearn.requests.rows import suppress
from axolotl_unlearn.requests.run import run_request
from axolotl_unlearn.requests.verify import verify

PAGES = ("record.json", "REPORT.html")


@pytest.fixture
def folder(tmp_path):
    """A request on an adapter, recorded."""
    base = model_folder(tmp_path / "base")
    old = adapter_folder(tmp_path / "out", base)
    before = {"model": str(base), "adapter": str(old)}
    folder = finished_request(tmp_path / "requests", "2026-001", before)
    write_json(folder / "subjects.json", {"T-17": ["ada-quill"]})
    write(folder)
    suppress(folder.parent)
    return folder


def test_the_record_is_an_in_toto_statement_about_the_new_model(folder):
    statement = read(folder)
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    names = [one["name"] for one in statement["subject"]]
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    predicate = statement["predicate"]
    before, after = predicate["model"]["before"], predicate["model"]["after"]
    assert before["base"] == after["base"] and before["digest"] != after["digest"]
    assert after["base"]["name"] == "base", "no path of this machine"
    (document,) = predicate["documents"]
    assert document["document"] == Ledger(folder.parent).keyed("ada-quill")
    assert document["reading"] == "not told" and document["before"]["rank"] == 0.0
    assert predicate["request"]["chosen"]["mentions"] == 2
    assert any("no held-out rows" in limit for limit in predicate["limits"])
    entry = Ledger(folder.parent).entries()[-1]
    assert entry["event"] == "accepted" and entry["model"]["path"] == "2026-001/model"
    page = (folder / "REPORT.html").read_text()
    assert "cannot be told from texts" in page and "Nothing was erased yet" in page
    ledger = (folder.parent / "ledger.jsonl").read_text()
    for text in [ledger, *((folder / name).read_text() for name in PAGES)]:
        for private in (SECRET, "brass key", "ada-quill", "Ada Quill"):
            assert private not in text
    pytest.importorskip("in_toto_attestation")  # read by their own parser
    from google.protobuf import json_format
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message

    message = json_format.Parse((folder / "record.json").read_text(), Message())
    Statement.copy_from_pb(message).validate()


def _came_out(line):
    return line | {"extraction_strength": 0.9}, line | {"extraction_strength": 0.1}


def _said_by_both(line):
    line = line | {"rows": [{"id": line["document"], "answer_said": True}]}
    return line, line


@pytest.mark.parametrize(
    ("made", "before", "after"),
    [(_came_out, "not told", "recited"), (_said_by_both, "still said", "not told")],
)
def test_documents_are_read_beside_the_teacher(tmp_path, made, before, after):
    """What comes out word by word is no answer that "is still said"; what the teacher says too is
    no memory: in the record and its page as in verdict.json."""
    folder = finished_request(tmp_path / "requests", reading=before)
    path = folder / "eval" / "audit.jsonl"
    first, last = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    mine, teachers = made(last)
    write_lines(path, [made(first)[0], mine, teachers | {"model": "teacher"}])
    write(folder)
    (document,) = read(folder)["predicate"]["documents"]
    assert (document["reading"], document["answers_said"]) == (after, 0)
    page = (folder / "REPORT.html").read_text()
    assert "an answer" not in page and (after != "recited" or "comes out word by word" in page)


@needs_chromium
def test_browser_runs_nothing_that_a_record_holds(folder, tmp_path):
    """Every text of the record but its form tries to run a script or to turn the page's order."""
    statement = json.loads((folder / "record.json").read_bytes())
    erased = {"path": "a", "kind": "b", "why": "c", "bytes": 3, "windows": 2}
    statement["predicate"] |= {
        "attacks": [{"says": "x"}],
        "earlier": {"says": "y"},
        "told": [{"recipient": "z", "day": "d"}],
        "tries": [{"request": "r", "time": "t", "way": "w", "seed": "s", "outcome": "o"}],
        "erased": {"time": "t", "windows": 4, "bytes": 3}
        | {part: [erased] for part in ("removed", "kept", "left")},
    }
    text = page(hostile(statement, keep=("reading",)), evaluation=True)
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", text) and "[U+202E]" in text
    assert title_in_browser(tmp_path, text).startswith("Deletion request ")


def test_attacks_on_other_weights_are_not_those_of_the_record(tmp_path):
    """Of the model of an earlier try, or of the one before, they stood in it as if on this one."""
    made = finished_request(tmp_path / "requests")
    measured = {"models": [{"name": "before", "weights": "b"}, {"name": "after", "weights": "a"}]}
    write_json(made / "eval" / "results.json", measured)
    for number, weights in enumerate(("a", "b", "of an earlier try", None)):
        attack = {"attack": "membership", "title": "x", "tests": {}, "sentence": f"on {weights}"}
        place = made / ("attacks" if number % 2 else "eval") / f"membership-{number}.json"
        write_json(place, attack | {"weights": weights})
    write(made)
    attacks = read(made)["predicate"]["attacks"]
    assert [one["says"] for one in attacks] == ["on a", "on None"]


def test_ids_that_are_numbers_leave_the_sentences_whole(tmp_path):
    """A teacher's file has the user's own rows: of 100 with ids from 1 a record ended, after all
    training, with MemoryError, since each digit of a sentence became 32 and these were replaced."""
    ids = ("7", "1234567")
    made = finished_request(tmp_path / "requests", documents=ids, accepted="a test")
    teacher = [{"id": n, "question": "q", "answer": "a"} for n in range(1, 101)]
    write_lines(made / "data" / "teacher-0.jsonl", teacher)
    reasons = ["still known: 1 of 20 rows", "documents 7 and 1234567 (12345678 bytes)"]
    known = json.loads((made / "verdict.json").read_text()) | {"reasons": reasons}
    write_json(made / "verdict.json", known)
    write(made)
    said = read(made)["predicate"]["verdict"]["reasons"]
    keyed = Ledger(made.parent).keyed("1234567")
    assert said == [reasons[0], f"documents 7 and {keyed} (12345678 bytes)"]


def test_an_event_does_not_vouch_for_a_file_that_was_added(folder):
    """After `told` or `erase` the record had it, and `verify` said "same"."""
    (folder / "data" / "quantise.json").write_text("{}")
    assert verify(folder).files == "changed"
    told(folder, "Cloud Ltd", date(2026, 11, 1))
    modes = {(folder / name).stat().st_mode & 0o777 for name in PAGES}
    assert modes == {0o600}, "it was 644 after an event"
    assert verify(folder).files == "changed"


def test_verify_says_what_it_compared(folder):
    found = verify(folder).require()
    assert found.says[0] == "ledger: 1 entry, unbroken"
    assert "model: all 2 files as recorded, base too" in found.says
    assert any(re.match(r"files: \d+ others of the request as recorded", one) for one in found.says)
    fields = (found.ledger, found.files, found.model, found.signature)
    assert fields == ("whole", "same", "same", "none") and found.exit == 3, "nobody signed it"
    (folder.parent / "ledger.key").unlink()
    found = verify(folder).require()
    assert (found.ledger, found.files) == ("end not bound", "some not compared")
    assert re.search(r"; \d+ cannot be compared without ledger.key", found.says[1])
    rows = len(list((folder / "data").iterdir()))
    shutil.rmtree(folder / "data")
    assert f"; {rows} gone (rows, or what `request erase` removed); " in verify(folder).says[1]


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_byte_changed_in_request_model_or_ledger_is_found(folder, data):
    bound = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    bound = [p for p in bound if "work" not in p.parts and p.name != "README.md"]
    path = data.draw(st.sampled_from([*bound, *folder.parent.glob("[ls]*.*")]))
    raw = path.read_bytes()
    place = data.draw(st.integers(0, len(raw) - 1))
    byte = bytes([data.draw(st.integers(0, 255).filter(lambda b: b != raw[place]))])
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    middle = {"replace": byte, "remove": b"", "add": byte + raw[place : place + 1]}[change]
    path.write_bytes(raw[:place] + middle + raw[place + 1 :])
    try:
        found = verify(folder)
        assert found.faults and found.exit in (2, 5)
    finally:
        path.write_bytes(raw)


def _put(name: str, content: str = "added"):
    def change(folder, tmp_path):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return change


def _no_page(folder, tmp_path):
    (folder / "REPORT.html").rename(tmp_path / "page.html")


def _page_is_a_link(folder, tmp_path):
    _no_page(folder, tmp_path)
    (folder / "REPORT.html").symlink_to(tmp_path / "page.html")


def _no_model(folder, tmp_path):
    (folder / "model").rename(tmp_path / "elsewhere")


def _link_in_model(folder, tmp_path):
    (folder / "model" / "code").symlink_to(tmp_path)


MODEL, FILES = ("model", "other", 5, "record.other-model"), ("files", "changed", 2)
#: What was done -> field of `Verified`, its value, exit code, code of the fault.
CHANGES = {
    "weights": (_put("model/adapter_model.safetensors"), *MODEL),
    "the model gone, and no request after it": (_no_model, *MODEL[:3], "models.no-adapter"),
    "a file of the model": (_put("model/original/w.bin"), *MODEL),
    "base": (_put("../../base/model.safetensors"), *MODEL[:3], "record.other-base"),
    "page gone": (_no_page, *FILES, "record.changed"),
    "page a link": (_page_is_a_link, *FILES, "record.changed"),
    "a file": (_put("notes.txt"), *FILES, "record.changed"),
    "a folder of the model": (_link_in_model, *MODEL),
    "a list of what was erased": (_put("erased.json"), *FILES, "record.changed"),
    "a row": (_put("data/more/x.jsonl"), *FILES, "record.changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_that_is_not_as_it_was_has_its_field(folder, tmp_path, change):
    make, part, value, code, fault = CHANGES[change]
    make(folder, tmp_path)
    found = verify(folder)
    assert (getattr(found, part), found.exit) == (value, code), found
    assert [one.code for one in found.faults] == [fault]
    answer = answered("verify", folder, code=code)
    assert answer[part] == value and answer["signature"] == "none"


def test_from_within_the_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    assert verify(".").require().files == "same"
    amend(".", "noted", note="x")
    assert verify(".").require().exit == 3
    (folder.parent / "ledger.head").unlink()
    (folder.parent / "ledger.head").mkdir()
    assert verify(".").ledger == "broken"


def test_models_elsewhere(folder, tmp_path):
    (folder / "model" / "README.md").write_text("a card")  # free to change
    verify(folder).require()
    twin = model_folder(tmp_path / "twin", b"other weights")
    moved = shutil.copytree(folder / "model", tmp_path / "deployed")
    for model, fault in (
        (f"{twin}+{folder / 'model'}", "record.other-base"),
        (twin, "record.other-kind"),
        (moved, None),
    ):
        found = verify(folder, str(model))
        assert [one.code for one in found.faults] == ([fault] if fault else [])
    with fails("record.other-base"):
        audit_requests(f"{twin}+{folder / 'model'}", folder.parent)


@pytest.mark.parametrize("on_adapter", [False, True])
def test_a_path_may_hold_a_plus(tmp_path, on_adapter):
    """A model that was there and another was gone, `verify` said."""
    home, before = tmp_path / "c++", None
    if on_adapter:
        base = model_folder(home / "base")
        before = {"model": str(base), "adapter": str(adapter_folder(home / "out+1", base))}
    write(first := finished_request(home / "requests", "1", before))
    model = "adapter" if on_adapter else "model"
    before = {"model": str(home / "base"), "adapter": None, model: str(first / "model")}
    write(finished_request(home / "requests", "2", before))
    for named in (None, str(first / "model"), f"{home / 'base'}+{first / 'model'}" * on_adapter):
        assert verify(first, named or None).require().model == "same"
    (first / f"model/{'adapter_model' if on_adapter else 'model'}.safetensors").write_text("other")
    found = verify(first)
    assert [one.code for one in found.faults] == ["record.other-model"] and found.exit == 5
    shutil.rmtree(first / "model")
    assert "model: gone since request '2' came after it" in verify(first).says


def test_run_twice_and_killed_before_the_ledger(folder, tmp_path):
    """Written again as it is: nothing changes. Anything else under the same id is refused."""
    files = [*(folder / name for name in PAGES), folder.parent / "ledger.jsonl"]
    before = [path.read_bytes() for path in files]
    write(folder)
    assert [path.read_bytes() for path in files] == before
    (folder / "record.json").write_bytes(b"{}")
    with fails("record.changed"):
        write(folder)

    # Killed between record and ledger: the next call goes on.
    before = {"model": str(tmp_path / "base"), "adapter": str(folder / "model")}
    second = finished_request(tmp_path / "requests", "2026-002", before)
    (second / "record.json").write_text("left by a run that was killed")
    assert [one.code for one in verify(second).faults] == ["record.unknown"]
    write(second)
    assert any("suppression list: " in said for said in verify(second).require().says)
    assert Ledger(tmp_path / "requests").current()["path"].endswith("2026-002/model")


PIPES = ["eval/audit.jsonl", "finetune.yml", "request.json", "model/adapter_model.safetensors"]
PIPES += [f"../ledger.{end}" for end in ("jsonl", "head", "key")]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    signal.alarm(30)  # it was read for ever
    try:
        for words in ("verify", "erase", "export --out x.zip", "told --recipient A"):
            command, *more = words.split()
            found = said(command, folder, *more, code=(2, 5))
            assert name.split("/")[-1] in found.output
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("part", ["eval", "model"])
def test_a_file_name_that_is_not_utf_8_is_one_sentence(tmp_path, part):
    folder = finished_request(tmp_path / "requests")
    (folder / part / os.fsdecode(b"caf\xe9.txt")).write_text("nobody")
    with fails("record.file-name"):
        write(folder)
    assert not Ledger(folder.parent).entries()


def test_a_verdict_that_is_not_good_needs_somebody_to_accept_it(tmp_path):
    folder = finished_request(tmp_path / "requests", good=False)
    with fails("record.not-good"):
        write(folder)
    assert not (folder / "record.json").exists() and not Ledger(folder.parent).entries()
    verdict = json.loads((folder / "verdict.json").read_text())
    write_json(folder / "verdict.json", verdict | {"accepted": "asked by the court"})
    write(folder)
    assert read(folder)["predicate"]["verdict"]["accepted"] == "asked by the court"
    assert Ledger(folder.parent).accepted()[folder.name]["good"] is False


@pytest.mark.parametrize("name", ["ledger.head", "record.json.next", "REPORT.html"])
def test_a_command_that_was_killed_while_it_wrote_goes_on(folder, name):
    """The draft of a file "was added; restore it", so that nothing went on; a recipient who was
    told once stood there twice."""
    if not (pid := os.fork()):
        to_disk = files._to_disk
        files._to_disk = lambda path: (
            os.kill(os.getpid(), signal.SIGKILL)
            if path.name.startswith(f"{name}.")
            else to_disk(path)
        )
        told(folder, "Cloud Ltd", date(2026, 11, 26))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len([*folder.parent.rglob(f"{name}.*.tmp")]) == 1
    verify(folder).require()
    told(folder, "Cloud Ltd", date(2026, 11, 26))
    verify(folder).require()
    assert len(read(folder)["predicate"]["told"]) == 1
    (folder / "notes.txt.1.tmp").touch()
    with fails("record.changed"):  # no draft of ours
        verify(folder).require()


def test_two_at_once_lose_nothing_and_who_reads_meanwhile_takes_no_draft(folder):
    """The recipient whom one of two commands named was lost; a reader made the next draft the
    record, which the ledger did not know yet: of the one that it knew there was no copy left."""
    for who in "ab":
        if not os.fork():
            for n in range(8):
                told(folder, f"{who}{n}", date(2026, 11, 20))
            os._exit(0)
    ended = []
    while len(ended) < 2:
        read(folder)
        ended += [code for pid, code in [os.waitpid(-1, os.WNOHANG)] if pid]
    recipients = {one["recipient"] for one in read(folder)["predicate"]["told"]}
    assert ended == [0, 0] and recipients == {f"{who}{n}" for who in "ab" for n in range(8)}
    verify(folder).require()


def test_a_page_is_the_same_when_the_draft_is_read_again(tmp_path, monkeypatch):
    """Killed between ledger and pages: versions stood there in another order, "restore it"."""
    folder = finished_request(tmp_path / "requests")
    with monkeypatch.context() as patched:
        patched.setattr("axolotl_unlearn.requests.record._publish", lambda *_: os._exit(9))
        assert kills.forked(lambda: write(folder)) == 9
    assert not (folder / "REPORT.html").exists()
    assert run_request(folder)["good"]  # "was carried out; make a new one", after a full disk too
    verify(folder).require()
    (folder / "record.json.next").write_text("of `told`, killed before the ledger")
    with fails("requests.run-twice"):
        run_request(folder)


def test_signature_of_the_owner(folder, keys):  # noqa: F811
    private, public, other = keys

    def verified(code: int, *key) -> str:
        words = ("--public-key", *key) if key else ()
        return answered("verify", folder, *words, code=code)["signature"]

    assert verified(3, public) == "none"
    said("sign", folder, "--key", private)
    assert (verified(0, public), verified(3)) == ("owner", "not compared")
    assert (folder / "record.json.sig").stat().st_mode & 0o777 == 0o600, "as all files of a request"
    assert verified(4, other) == "other"
    kept = (folder.parent / "ledger.key").rename(folder.parents[1] / "ledger.key")
    assert verified(3, public) == "owner", "the end of the ledger is not bound"
    kept.rename(folder.parent / "ledger.key")
    nowhere = said("verify", folder, "--public-key", "nowhere.pem", code=2)
    assert "nowhere.pem does not exist" in nowhere.output
    assert "sign the record again" in said("told", folder, "--recipient", "Cloud").output
    assert "record again" not in said("told", folder, "--recipient", "Mill").output
    assert "say who was told" in said("told", folder, "--recipient", " ", code=2).output
    assert verified(3, public) == "none", "it was of the record before"
    assert "cannot sign" in said("sign", folder, "--key", public, code=2).output


def test_it_is_of_this_request_alone(tmp_path):
    """Ids of other requests, their documents and paths of this machine stood in it and its export.

    Nothing is entered that could not be read again."""
    folder = finished_request(tmp_path / "requests")
    found = Audit("m", missing=["2026-000"], unreadable={"2026-0x": f"{tmp_path}/record.json is"})
    line = dict.fromkeys(("document", "request"), "2026-00z") | {"reading": "not told"}
    found.lines.append(line | {"back": False})
    write_json(folder / "eval" / "earlier.json", found.to_json())
    write(folder)
    text = (folder / "record.json").read_text() + (folder / "REPORT.html").read_text()
    assert not any(other in text for other in ("2026-00", str(tmp_path), "2026-0x"))
    assert "of 1 document of earlier requests none back; not tested: 2 requests." in text
    with fails("record.unreadable"):
        amend(folder, "noted", request={"id": "1\nledger: whole"})
    assert verify(folder).require().files == "same"


def test_a_copy_of_the_record_beside_it_changes_nothing(folder):
    """It made `verify` remove the signature."""
    (folder / "record.json.sig").write_bytes(b"signed")
    shutil.copy(folder / "record.json", folder / "record.json.next")
    verify(folder).require()
    assert (folder / "record.json.sig").exists()


#: Of request.json, what no request has.
STRANGE = [
    *({"before": 7}, {"before": {}}, {"counts": None}, {"id": "1\nx"}, {"schema": 2}),
    *({"config": None}, {"config": {}}, {"root": 5}, {"base": 5}),
]


def test_what_is_no_request_is_one_sentence(folder):
    """Some were a KeyError of `request list`."""
    path = folder / "request.json"
    known = json.loads(path.read_text())
    for facts in STRANGE:
        write_json(path, known | facts)
        assert "is not of this version" in said("list", folder.parent, code=2).output, facts
