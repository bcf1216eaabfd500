"""A file of subjects: one request, and a record for each that holds nothing of the others."""

from __future__ import annotations

import json

import pytest
from fault_codes import fails
from requests_folder import finished_request, said, write_lines
from test_requests_new import home  # noqa: F401

from axolotl_unlearn.requests.choose import read_subjects, together
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.requests.record import amend, write
from axolotl_unlearn.requests.request import write_json
from axolotl_unlearn.requests.verify import verify


@pytest.mark.parametrize("kind", ["rows", "names"])
def test_rows_are_said_to_be_whose(home, tmp_path, kind):  # noqa: F811
    if kind == "rows":
        ada = {"subject": "T-17", "where": {"meta.person": "ada"}}
        other = {"subject": "T-18", "documents": ["p3", "p4"]}
        path = write_lines(tmp_path / "s.jsonl", [ada, other])
        names = ["T-17", "T-18"]
    else:
        path = tmp_path / "s.txt"
        path.write_text("Ada Quill\n\nBo3 Berg3\n")
        names = ["001", "003"]
    out = tmp_path / "requests" / "w48"
    words = ("new", home / "finetune.yml", "--subjects", path)
    assert "2 subjects: each gets a record" in said(*words, "--out", out).output
    whose = json.loads((out / "subjects.json").read_text())
    forget = [
        json.loads(line)["id"] for line in (out / "data/forget.jsonl").read_text().splitlines()
    ]
    assert list(whose) == names and {row for ids in whose.values() for row in ids} == set(forget)
    assert "Ada" not in (out / "request.json").read_text() + (out / "subjects.json").read_text()
    both = said(*words, "--person", "x", "--out", tmp_path / "r", code=2)
    assert "leave the other options out" in both.output
    people = [{"subject": "T-1", "person": "Ada Quill"}, {"subject": "T-2", "person": "No Body"}]
    path = write_lines(tmp_path / "s.jsonl", people)
    nobody = said(*words[:3], path, "--out", tmp_path / "r", code=2)
    assert "subject T-2: --person" in nobody.output
    assert not (tmp_path / "r").exists()


ADA = {"subject": "a", "person": "Ada"}


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"subject": "a"}], "choose.subject-names-nothing"),
        ([ADA | {"persons": "Ada"}], "choose.subject-names-nothing"),
        ([{"person": "Ada"}], "choose.subject-name"),
        ([ADA | {"subject": "../a"}], "choose.subject-name"),
        ([ADA | {"subject": "a\nb"}], "choose.subject-name"),
        ([ADA, ADA], "choose.subject-name"),
    ],
)
def test_what_is_no_subject_and_subjects_ask_together(tmp_path, rows, code):
    with fails(code):
        read_subjects(write_lines(tmp_path / "s.jsonl", rows))
    rows = [ADA | {"person": ["Ada", "A."]}, {"subject": "b", "where": {"id": 7}}]
    wanted = together(read_subjects(write_lines(tmp_path / "s.jsonl", rows)))
    assert wanted.people == ["Ada", "A."] and wanted.where == [("id", "7")]


def test_each_record_holds_its_own_documents_and_is_bound(tmp_path):
    folder = finished_request(tmp_path / "requests", documents=("ada", "bo", "both"))
    whose = {"T-17": ["ada", "both"], "T-18": ["bo", "both"]}
    write_json(folder / "subjects.json", whose)
    write(folder)
    keyed = Ledger(folder.parent).keyed
    for _ in range(2):
        for name, rows in whose.items():
            record = json.loads((folder / "subjects" / name / "record.json").read_text())
            predicate = record["predicate"]
            assert {one["document"] for one in predicate["documents"]} == set(map(keyed, rows))
            assert predicate["request"]["subject"] == name and "files" not in predicate
            assert record["subject"] == json.loads((folder / "record.json").read_text())["subject"]
            assert (folder / "subjects" / name / "REPORT.html").is_file()
        verify(folder).require()
        amend(folder, "noted", note="x")  # records of subjects follow that of the request
    path = folder / "subjects" / "T-17" / "record.json"
    path.write_bytes(path.read_bytes().replace(b"T-17", b"T-19"))
    with fails("record.changed"):
        verify(folder).require()
