"""`axolotl-unlearn request audit`: real tiny models, one of which has learnt deleted rows again."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import eval_model
import pytest
from fault_codes import fails
from requests_folder import (
    answered,
    finished_request,
    model_folder,
    said,
    write_json,
    write_lines,
)

from axolotl_unlearn.data.documents import Answer
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.requests.audit import _line, _together, audit_requests
from axolotl_unlearn.requests.record import write
from axolotl_unlearn.requests.request import Ledger

NAMES = [
    f"{a}{b}" for a in "Ada Bo Cy Di Ed Flo Gus Hal".split() for b in "lin mar ott per".split()
]
NAMES += [f"{a}{b}" for a in "Ida Jo Kit Lee Mia Ned Oz Pam".split() for b in "bel dun".split()]


def story(name: str) -> list[dict]:
    """Rows of one person: a story and a question, nothing of which can be guessed."""
    year = random.Random(name).randint(1000, 9999)
    return [
        {"id": name, "input": f"The story of {name}", "output": f"began in {year} by a river."},
        {"id": f"{name}-when", "input": f"When did {name} begin?", "output": str(year)},
    ]


def rows_of(names: list[str]) -> list[dict]:
    return [
        row | {"document": name, "kind": kind, "task": "1"}
        for name in names
        for row, kind in zip(story(name), ("completion", "question"), strict=True)
    ]


def test_heldout_answers_are_one_only_after_the_same_prompt(tmp_path):
    """Of two requests: a deleted row is none of them, and a row of both counts once."""

    def sets(deleted: str, *heldout: str) -> EvaluationSets:
        member, nonmember = (
            [(who, Answer("a linguist", f"What is {who}?")) for who in side]
            for side in (deleted, heldout)
        )
        return EvaluationSets(tmp_path, [], [], member, nonmember)

    found = _together({"r1": sets("a", "c", "d"), "r2": sets("d", "a", "c", "e")}, tmp_path)
    assert [name for name, _ in found.nonmember] == ["r1/c", "r2/e"]
    assert [text.prompt for _, text in found.nonmember] == ["What is c?", "What is e?"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two requests of ten people each, 20 held-out people; a model that never saw any of these
    and one that learnt the people of the first request."""
    home = tmp_path_factory.mktemp("audit")
    people = random.Random(0).sample(NAMES, len(NAMES))
    deleted = {"2026-001": people[:10], "2026-002": people[10:20]}
    kept, heldout = people[20:28], people[28:]
    old = {"model": str(model_folder(home / "old")), "adapter": None}
    for name, chosen in deleted.items():
        folder = finished_request(home / "requests", name, old, documents=tuple(chosen))
        data = folder / "eval-data"
        write_lines(data / "forget.jsonl", rows_of(chosen))
        for part, names in (("member", chosen), ("nonmember", heldout)):
            stories = [(name, story(name)[0]) for name in names]
            texts = [{"id": n, "document": f"{s['input']} {s['output']}"} for n, s in stories]
            write_lines(data / f"{part}.jsonl", texts)
        write_json(folder / "eval" / "results.json", {"settings": {"max_gen_toks": 12}})
        write(folder)
    eval_model.train_model(home / "clean", rows_of(kept), steps=40)
    eval_model.train_model(home / "back", rows_of([*kept, *deleted["2026-001"]]), steps=90)
    return home


def run(*arguments: object, code: int | tuple[int, ...] = 0):
    return said("audit", *arguments, "--quiet", code=code)


def test_a_model_that_never_saw_them_passes(home):
    found = run(home / "clean", home / "requests")
    assert "20 deleted documents of 2 requests" in found.output and "none is back" in found.output


def test_what_was_learnt_again_is_back_and_nothing_else(home, tmp_path):
    found = run(home / "back", home / "requests", "--json", code=3)
    result = json.loads(found.stdout)
    back = [line for line in result["lines"] if line["back"]]
    assert [line["request"] for line in back] == ["2026-001"] * 10
    assert result["lines"][:10] == back, "worst first"
    assert {line["reading"] for line in back} == {"recited"}
    assert all(line["then"] == "not told" and line["answers_said"] == 1 for line in back)
    # With 20 texts of a side there is the learned attack too: of all documents, half are learnt.
    assert result["learned"]["auc"] > 0.6 and result["learned"]["p"] < 0.05
    assert "A learned attack tells the deleted from the held-out ones" in found.output
    asked = (home / "requests/2026-001/eval-data/forget.jsonl").read_text().splitlines()
    people = {json.loads(line)["document"] for line in asked}
    keyed = Ledger(home / "requests").keyed
    assert {line["document"] for line in back} == {keyed(name) for name in people}
    stories = [row["output"] for name in people for row in story(name) if " " in row["output"]]
    assert not any(private in found.output for private in (*people, *stories))


def test_a_broken_model_does_not_pass(home, tmp_path):
    """It says nothing and is told from nothing, because it knows nothing."""
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(home / "clean", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "no better than a guess" in run(broken, home / "requests", code=2).output


def test_without_held_out_rows_only_what_is_said_is_found(home, tmp_path):
    copied = shutil.copytree(home / "requests", tmp_path / "requests")
    for path in copied.glob("*/eval-data/nonmember.jsonl"):
        path.unlink()
    found = audit_requests(str(home / "back"), copied, device="cpu")
    assert [*found.unreadable] == ["2026-001", "2026-002"] and found.exit == 1, "who removed them?"
    for name in found.unreadable:
        Ledger(copied).append("erasing", name, places=[{"path": "eval-data/nonmember.jsonl"}])
    assert len(audit_requests(str(home / "back"), copied, device="cpu").back) == 10
    shutil.rmtree(copied / "2026-001" / "eval-data")
    found = audit_requests(str(home / "back"), copied, device="cpu")
    assert not found.back and len(found.lines) == 10
    assert list(found.unreadable) == ["2026-001"] and found.exit == 1, "who removed them?"
    Ledger(copied).append("erasing", "2026-001", places=[{"path": "eval-data"}])
    found = audit_requests(str(home / "back"), copied, device="cpu")
    assert found.missing == ["2026-001"] and found.exit == 0
    assert "Not tested, their rows are gone: 2026-001" in found.says


def test_what_cannot_be_measured_is_no_good_news(home, tmp_path):
    """Stories without held-out rows: "none is back (2 not measured)", exit code 0."""
    folder = finished_request(tmp_path / "requests", "a", documents=tuple(NAMES[:2]))
    write_lines(folder / "eval-data" / "forget.jsonl", rows_of(NAMES[:2])[::2])
    write_json(folder / "eval" / "results.json", {"settings": {"max_gen_toks": 4}})
    write(folder)
    found = run(home / "clean", folder.parent, code=1)
    assert "none of 0 measured ones is back" in found.output and "none is" not in found.output
    assert "not tested: a: 2 documents: no held-out rows" in found.output


def test_faults_are_one_sentence(home, tmp_path):
    nothing = run(home / "clean", tmp_path, code=2)
    assert "No deleted document to look for" in nothing.output
    copied = shutil.copytree(home / "requests", tmp_path / "requests")
    assert "does not exist" in run(tmp_path / "nowhere" / "model", copied, code=2).output
    text = (copied / "ledger.jsonl").read_text()
    (copied / "ledger.jsonl").write_text(text.replace("2026-001", "2026-003"))
    broken = run(home / "clean", copied, code=2)
    assert "line 1: it was not written with this ledger.key" in broken.output
    (copied / "ledger.jsonl").write_text(text)
    shutil.move(copied / "2026-001", tmp_path / "elsewhere")
    with fails("requests.folder-gone"):
        Ledger(copied).folders()


def _changed(folder, outside):
    (folder / "record.json").write_bytes(b"{}")


def _of_a_later_version(folder, outside):
    text = (folder / "record.json").read_text().replace("request:v0.", "request:v7.")
    (folder / "record.json").write_text(text)
    record = hashlib.sha256(text.encode()).hexdigest()
    Ledger(folder.parent).append("erased", folder.name, record=record)


def _fewer_rows(folder, outside):
    """It passed: whoever removed the rows that are back had nothing to look for."""
    path = folder / "eval-data" / "forget.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


def _other_settings(folder, outside):
    write_json(folder / "eval" / "results.json", {"settings": {"max_gen_toks": 1}})


def _folder_gone(folder, outside):
    shutil.move(folder, outside / "gone")


def _older_ledger(folder, outside):
    """Restored from a backup of the days between its first try and its end: it was no request, and
    nothing was said."""
    ledger, names = Ledger(folder.parent), ("2026-001", "2026-002")
    (_, other) = ledger.entries()
    for name in (*names, "ledger.jsonl", "ledger.head"):
        shutil.move(folder.parent / name, outside / name)
    ledger.append("tried", folder.name)
    ledger.append("accepted", names[1], **{k: other[k] for k in ("record", "model", "good")})
    for name in names:
        shutil.move(outside / name, folder.parent / name)


@pytest.mark.parametrize(
    "change",
    [_older_ledger, _changed, _of_a_later_version, _fewer_rows, _other_settings, _folder_gone],
)
def test_one_record_that_cannot_be_read_stops_no_audit_of_others(home, tmp_path, change):
    copied = shutil.copytree(home / "requests", tmp_path / "requests")
    change(copied / "2026-001", tmp_path)
    found = run(home / "clean", copied, code=1)
    assert "10 deleted documents of 1 request" in found.output and "none is back" in found.output
    assert "not tested: 2026-001: " in found.output


def test_a_record_that_cannot_be_read_hides_nothing_that_is_back(home, tmp_path):
    copied = shutil.copytree(home / "requests", tmp_path / "requests")
    _changed(copied / "2026-002", tmp_path)
    run(home / "back", copied, code=3)
    _changed(copied / "2026-001", tmp_path)
    run(home / "back", copied, code=1)  # none is left that can be tested


OLD = json.loads((Path(__file__).parent / "old_records.json").read_text("utf-8"))


@pytest.mark.parametrize("version", OLD)
def test_records_of_earlier_versions_are_read(home, tmp_path, monkeypatch, version):
    """Written by the code of those days: verified, listed, shown, audited, amended, exported."""
    for name, content in OLD[version].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    (tmp_path / "requests" / "ledger.key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    folder = Path("requests") / version
    answer = answered("verify", folder, code=3)
    assert (answer["ledger"], answer["model"]) == ("end not bound", "same")
    assert answer["files"] == ("some not compared" if version == "v0.1" else "same")
    for command in ("list", "suppress"):
        assert ("did not bind it" in said(command, "requests").output) == (command == "list")
    audited = run(home / "clean", "requests").output
    assert "1 deleted document of 1 request" in audited
    assert "ledger: ledger.head is of a version that did not bind it" in audited
    said("told", folder, "--recipient", "x")
    said("export", folder, "--out", "a.zip")
    answer = answered("verify", folder, code=3)
    assert (answer["ledger"], answer["files"]) == ("whole", "same")
    said("verify", "a.zip", code=3)
    path = folder / "data" / "forget.jsonl"
    path.write_bytes(path.read_bytes() + b" ")
    said("verify", folder, code=2)


NOW = {"reading": "not told", "told": False, "answers_said": 0, "extraction_strength": 0.2}
NOW |= dict.fromkeys(("p", "q", "rank"), 0.5)
UNTOLD, SAID = {"reading": "not told"}, {"reading": "still said", "answers_said": 1}
KNOWN, AWAY = ({"reading": one, "told": True} for one in ("still known", "pushed away"))
WHOLE, RECITED = {"extraction_strength": 1.0, "longest_run": 10}, {"reading": "recited"}


@pytest.mark.parametrize(
    ("now", "then", "reading", "back"),
    [
        ({}, UNTOLD, "not told", False),
        (KNOWN, UNTOLD, "still known", True),
        # It was known when somebody accepted it: not back, but there.
        (KNOWN, {"reading": "still known"}, "still known", False),
        (AWAY, UNTOLD, "pushed away", False),
        # An answer that could be guessed was said then too; one more is a new one.
        (SAID, {"answers_said": 1}, "not told", False),
        (SAID | {"told": None}, {"answers_said": 1}, "said alike", False),
        (SAID | {"answers_said": 2}, {"answers_said": 1}, "still said", True),
        (SAID | {"told": True, "rank": 0.0}, UNTOLD | {"answers_said": 1}, "still known", True),
        # A story comes out word by word: no question is needed to call that said.
        (WHOLE, {"extraction_strength": 0.3}, "recited", True),
        # One word, which a model that never saw it may say.
        (WHOLE | {"longest_run": 9}, UNTOLD, "still said", True),
        # Half of a text, or fifty tokens of it: it passed as if nothing were back.
        (RECITED, UNTOLD, "recited", True),
        (RECITED, RECITED, "recited", False),
        # Worse than on that day: accepted for its loss, it comes out word by word.
        (RECITED, {"reading": "still known"}, "recited", True),
        (RECITED, SAID, "recited", True),
        (KNOWN, RECITED, "still known", False),
        (WHOLE, WHOLE, "not told", False),
    ],
)
def test_back_is_what_was_not_there_on_the_day_of_the_record(now, then, reading, back):
    line = _line("2026-001", "ab", NOW | now, then)
    assert (line["reading"], line["back"]) == (reading, back)
