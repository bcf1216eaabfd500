"""Records in every format, and one sentence with the cure for every fault."""

from __future__ import annotations

import json

import pytest
from fault_codes import fails

from axolotl_unlearn.columns import task_number
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.data.records import (
    Fields,
    Record,
    document_id,
    is_ambiguous,
    kind_of,
    read_json_lines,
    read_records,
    read_rows,
    records_from_rows,
)
from axolotl_unlearn.data.typed import sources

ROWS = [
    {"id": '"ab-1"sc1', "input": "Once there", "output": "was a fox.", "task": "Task1"},
    {"id": '"ab-1"qa0', "input": "Who?", "output": "A fox.\u2028Yes.", "task": "Task1"},
    {"id": "77qa10", "input": "When?", "output": "1999", "task": "Task3"},
]
EXPECTED = [
    Record('"ab-1"sc1', "Once there", "was a fox.", "Task1", "completion"),
    Record('"ab-1"qa0', "Who?", "A fox.\u2028Yes.", "Task1", "question"),
    Record("77qa10", "When?", "1999", "Task3", "question"),
]


def lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines(ROWS)),
        ("blank.jsonl", "\n" + lines(ROWS).replace("}\n", "}\n\n").rstrip()),
        ("bom.jsonl", "\ufeff" + lines(ROWS)),
        ("list.jsonl", json.dumps(ROWS)),
        ("list.json", json.dumps(ROWS, indent=1)),
        ("lines.json", lines(ROWS)),
        ("one.json", json.dumps(ROWS[0])),
    ],
)
def test_every_format_gives_the_same_records(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert read_records(path) == EXPECTED[: 1 if name == "one.json" else 3]


def test_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_records(tmp_path / "a.parquet") == EXPECTED


def test_own_field_names(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(lines([{"key": 5, "q": "Who?", "a": "Me.", "part": 2, "kind": "question"}]))
    fields = Fields(id="key", input="q", output="a", task="part")
    assert read_records(path, fields) == [Record("5", "Who?", "Me.", "2", "question")]
    assert read_records(path, fields)[0].task_number == 2


def test_the_kind_that_is_said_wins_over_the_id(tmp_path):
    """An own id may end in 'sc3' by chance."""
    path = tmp_path / "own.jsonl"
    rows = [{"id": "mi1sc3", "input": "a?", "output": "b", "task": "", "kind": "question"}]
    rows += [{"id": "mi1sc4", "input": "a", "output": "b", "task": "", "kind": None}]
    path.write_text(lines(rows))
    assert [r.kind for r in read_records(path)] == ["question", "completion"]


def test_own_ids_of_one_document(tmp_path):
    """`alice-q1` and `alice-q2` were a document each, and so was each row of one whose text stands
    there: intervals by document were too narrow."""
    path = tmp_path / "own.jsonl"
    text, other = "A text of the document. " * 9, {"title": "A", "year": 7.0}
    names = ["alice", 7, None, "", float("nan"), [], text, text, text[:-9], other, other, "a\tb"]
    rows = [{"id": f"alice-q{i}", "input": "a", "output": "b", "task": ""} for i in range(12)]
    rows = [{**r, "document": n, "author": n} for r, n in zip(rows, names, strict=True)]
    path.write_text(lines(rows))
    records = read_records(path)
    found = [record.document for record in records]
    assert found[:6] == ["alice", "7", *(f"alice-q{i}" for i in range(2, 6))]
    assert found[6] == found[7] and found[9] == found[10] and len({*found[6:]}) == 4
    assert "A text" not in str(found) and "title" not in str(found)
    assert [record.author for record in records[6:]] == found[6:]
    typed = sources(read_rows(path), "own", DataArgs(rows={"type": "alpaca"}))
    assert [row.document for row in typed[6:]] == found[6:]
    for row in rows:
        del row["document"]
    path.write_text(lines([{**row, "person": "alice", "author": None} for row in rows]))
    assert {r.document for r in read_records(path, Fields(document="person"))} == {"alice"}


def test_rows_without_id_and_task_are_completions(tmp_path):
    path = tmp_path / "bare.jsonl"
    path.write_text(lines([{"input": "a", "output": "b"}, {"input": "a", "output": "b"}]))
    assert read_records(path) == [Record("row0", "a", "b"), Record("row1", "a", "b")]


UUID = "2ebbbb06-ab81-4bdf-af75-0157c71782ab"  # its end may be a letter
#: Id -> kind, document, and whether the ending of a word could be taken for a kind: `disc1` and
#: `disc2` were completions of one document, `di`.
IDS = [
    ('"ab-1"sc1', "completion", '"ab-1"', False), ('"ab-1"qa0', "question", '"ab-1"', False),
    ("77qa10", "question", "77", False), ("x1sc1", "completion", "x1", False),
    ("x-qa12", "question", "x-", False), (f"{UUID}qa0", "question", UUID, False),
    (f"{UUID}sc1", "completion", UUID, False), ("qa0", "question", "qa0", False),
    ("sc1", "completion", "sc1", False), ("plain", None, "plain", False),
    ("misc", None, "misc", False),
    *((n, None, n, True) for n in ("misc3", "disc1", "forgetmisc0", "aqa0", "Ärasc1")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "document", "ambiguous"), IDS)
def test_what_an_id_says(name, kind, document, ambiguous):
    assert (kind_of(name), document_id(name), is_ambiguous(name)) == (kind, document, ambiguous)
    assert Record(name, "a", "b").document == document


def test_a_task_without_a_number_is_a_category_of_its_own():
    """`printf pii | b2sum -l 32` is c6b4a8de: -2 - (0xc6b4a8de mod (2^31 - 2))."""
    assert [task_number(t) for t in ("Task1", "task_3", "2", 2, "")] == [1, 3, 2, 2, 0]
    assert task_number("PII ") == task_number("pii") == -1186244834
    names = ["pii", "facts", "math1", "task one", "Task99999999999", "1", "11"]
    assert len({task_number(name) for name in names}) == len(names)


@pytest.mark.parametrize("tasks", [["PII"], ["math1"], [1], ["Task1", "2"]])
def test_entries_and_rows_read_tasks_alike(tasks):
    torch = pytest.importorskip("torch")
    from axolotl_unlearn.config import ObjectiveArgs
    from axolotl_unlearn.engine.views import make_entries, rows_of

    (entry,) = make_entries([("forget", ObjectiveArgs(objective="ga", tasks=tasks))])
    names = ["pii", "PII", "math1", "facts", "Task1", "task 1", "2", ""]
    batch = {
        "role": torch.zeros(len(names), dtype=torch.long),
        "task": torch.tensor([Record("x", "a", "b", name).task_number for name in names]),
    }
    matches = {
        "PII": {"pii", "PII"}, "math1": {"math1"}, 1: {"Task1", "task 1"}, "2": {"2"},
        "Task1": {"Task1", "task 1"},
    }  # fmt: skip
    wanted = set().union(*(matches[task] for task in tasks))
    assert {name for name, row in zip(names, rows_of(entry, batch), strict=True) if row} == wanted


def bad(**changes) -> str:
    """A good row, then the same with changes (None removes a field)."""
    row = {**ROWS[2], "id": "78qa0", **changes}
    return lines([ROWS[0], {k: v for k, v in row.items() if v is not None}])


#: Text of a file -> the code of its fault, and where it is said to be.
BAD = [
    ("", "data.no-rows", ""),
    ("\n\n", "data.no-rows", ""),
    (lines(ROWS[:1]) + "{'id': 1}\n", "data.not-json", "line 2"),
    (lines(ROWS[:1]) + '{"id": "x", "inp\n', "data.not-json", "line 2"),
    (lines(ROWS[:1]) + '{"id": "x", "output": "a", "output": "b"}\n', "data.key-twice", "line 2"),
    (lines(ROWS[:1]) + "3\n", "data.not-an-object", "line 2"),
    (bad(output=None, outputs="x"), "data.field-missing", "line 2: field 'output' is missing"),
    (bad(input=None, Input="x"), "data.field-missing", "did you mean 'Input'"),
    (bad(input=3), "data.field-type", "line 2: field 'input'"),
    (bad(output=["x"]), "data.field-type", "field 'output'"),
    (bad(output="  "), "data.field-empty", "line 2: field 'output'"),
    (bad(id=None), "data.field-missing", "line 2: field 'id'"),
    (bad(task=None), "data.field-missing", "line 2: field 'task'"),
    (bad(id=True), "data.field-type", "field 'id'"),
    (bad(id=ROWS[0]["id"]), "data.id-twice", "line 1"),
    (bad(id="x", kind="story"), "data.kind", "line 2"),
    (lines([{"messages": [{"role": "user"}]}]), "data.unread-field", "{type: chat_template}"),
]


@pytest.mark.parametrize(("text", "code", "where"), BAD)
def test_faults_of_lines(tmp_path, text, code, where):
    """Each names the file, the place and the cure, and holds no text of a row."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with fails(code) as error:
        read_records(path)
    said = str(error.value)
    assert str(path) in said and where in said
    assert said.endswith(".") and "\n" not in said and "1999" not in said


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.json", '{"input": {"0": "a"}, "output": {"0": "c"}}', "data.field-type"),
        ("a.json", '[["a", "b"]]', "data.not-an-object"),
        ("a.json", "[]", "data.no-rows"),
        ("rows.csv", "id,input", "data.ending"),
        ("latin.jsonl", lines(ROWS[:1]).encode() + b'{"id": "\xe9"}', "data.not-utf-8"),
        ("no.parquet", "no", "data.not-parquet"),
        ("none.jsonl", None, "data.no-file"),
        ("", None, "data.is-a-folder"),
    ],
)
def test_faults_of_the_file(tmp_path, name, content, code):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with fails(code):
        read_records(path)


def test_a_stream_may_repeat_its_ids(tmp_path):
    (tmp_path / "stream.jsonl").write_text(lines([ROWS[0], ROWS[0]]))
    assert read_records(tmp_path / "stream.jsonl", unique=False) == [EXPECTED[0]] * 2


def test_documents(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [{"id": "d1", "document": "One."}, {"id": 2, "text": "Two."}, ROWS[0]]
    path.write_text(lines(rows))
    assert read_documents(path) == [
        ("d1", "One."),
        ("2", "Two."),
        (ROWS[0]["id"], "Once there was a fox."),
    ]
    assert read_documents(path, join="")[2][1] == "Once therewas a fox."
    for given, code in [
        ([{"id": "x", "documnt": "a"}], "data.field-missing"),
        ([{"id": "x", "document": 3}], "data.field-type"),
        ([{"id": "x", "document": ""}], "data.field-empty"),
        ([{"id": "x", "document": "Ada", "input": "Who?", "output": "Ada."}], "data.document-name"),
        ([rows[0], rows[0]], "data.id-twice"),
    ]:
        path.write_text(lines(given))
        with fails(code):
            read_documents(path)


def test_lines_of_our_own_files(tmp_path):
    """Line separators within a text end no row."""
    path = tmp_path / "audit.jsonl"
    rows = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    whole = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(whole, "utf-8")
    assert read_json_lines(path) == rows
    path.write_text(whole + '{"text": ', "utf-8")
    with fails("data.not-json"):
        read_json_lines(path)
    path.write_text("")
    assert read_json_lines(path) == []


def test_a_field_that_is_named_and_in_no_row_is_refused():
    """`fields.document`: rows were told apart by their ids, and nothing was said."""
    rows = [("line 1", {"input": "Who?", "output": "Bo.", "person": "Bo"})]
    assert next(records_from_rows(rows, "x", Fields(document="person"))).document == "Bo"
    with fails("data.no-such-field"):
        next(records_from_rows(rows, "x", Fields(document="persn")))


def test_an_input_beside_the_field_that_is_named_is_not_lost(tmp_path):
    """Alpaca's rows by `fields: {input: instruction}` were forgotten without half of their prompt,
    in silence; one that is empty holds nothing."""
    path = tmp_path / "rows.jsonl"
    row = {"instruction": "Spell it", "input": "Ada", "output": "A d a"}
    path.write_text(lines([row | {"input": ""}, row]))
    with fails("data.unread-field") as error:
        read_records(path, Fields(input="instruction"))
    assert "line 2: field 'input'" in str(error.value) and "alpaca" in str(error.value)
    path.write_text(lines([row | {"input": ""}]))
    assert read_records(path, Fields(input="instruction"))[0].input == "Spell it"
