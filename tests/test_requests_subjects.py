"""A file of subjects: one request, and a record for each that holds nothing of the others."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from fault_codes import fails
from requests_folder import finished_request, model_folder
from test_requests_new import home  # noqa: F401

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.requests.choose import read_subjects, together
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.requests.record import amend, write
from axolotl_unlearn.requests.request import write_json
from axolotl_unlearn.requests.verify import verify


def lines(path, *rows) -> object:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["rows", "names"])
def test_rows_are_said_to_be_whose(home, tmp_path, kind):  # noqa: F811
    if kind == "rows":
        ada = {"subject": "T-17", "where": {"meta.person": "ada"}}
        path = lines(tmp_path / "s.jsonl", ada, {"subject": "T-18", "documents": ["p3", "p4"]})
        names = ["T-17", "T-18"]
    else:
        path = tmp_path / "s.txt"
        path.write_text("Ada Quill\n\nBo3 Berg3\n")
        names = ["001", "003"]
    out = tmp_path / "requests" / "w48"
    words = ["request", "new", str(home / "finetune.yml"), "--subjects", str(path)]
    done = CliRunner().invoke(unlearn, [*words, "--out", str(out)])
    assert done.exit_code == 0 and "2 subjects: each gets a record" in done.output, done.output
    whose = json.loads((out / "subjects.json").read_text())
    forget = [
        json.loads(line)["id"] for line in (out / "data/forget.jsonl").read_text().splitlines()
    ]
    assert list(whose) == names and {row for ids in whose.values() for row in ids} == set(forget)
    assert "Ada" not in (out / "request.json").read_text() + (out / "subjects.json").read_text()
    both = CliRunner().invoke(unlearn, [*words, "--person", "x", "--out", str(tmp_path / "r")])
    assert both.exit_code == 2 and "leave the other options out" in both.output
    people = [{"subject": "T-1", "person": "Ada Quill"}, {"subject": "T-2", "person": "No Body"}]
    words[4] = str(lines(tmp_path / "s.jsonl", *people))
    nobody = CliRunner().invoke(unlearn, [*words, "--out", str(tmp_path / "r")])
    assert nobody.exit_code == 2 and "subject T-2: --person" in nobody.output
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
        read_subjects(lines(tmp_path / "s.jsonl", *rows))
    rows = [ADA | {"person": ["Ada", "A."]}, {"subject": "b", "where": {"id": 7}}]
    wanted = together(read_subjects(lines(tmp_path / "s.jsonl", *rows)))
    assert wanted.people == ["Ada", "A."] and wanted.where == [("id", "7")]


def test_each_record_holds_its_own_documents_and_is_bound(tmp_path):
    old = {"model": str(model_folder(tmp_path / "old")), "adapter": None}
    folder = finished_request(tmp_path / "requests", "w48", old, documents=("ada", "bo", "both"))
    write_json(folder / "subjects.json", {"T-17": ["ada", "both"], "T-18": ["bo", "both"]})
    write(folder)
    keyed = Ledger(folder.parent).keyed
    for _ in range(2):
        for name, rows in {"T-17": ["ada", "both"], "T-18": ["bo", "both"]}.items():
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
