"""What a data folder may hold, and one sentence for everything that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_model import documents_of, made_up_rows, write_folder

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import interleave, load_sets
from axolotl_unlearn.metrics.semeval import CELLS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sides = made_up_rows(7)
    return write_folder(tmp_path / "data", sides, documents_of(sides), general=8)


def rows_of(folder: Path, name: str) -> list[dict]:
    text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def rewrite(folder: Path, name: str, rows: list[dict]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def test_everything_is_found(folder):
    sets = load_sets(folder)
    assert len(sets.forget) == len(sets.retain) == 42
    assert len(sets.member) == len(sets.nonmember) == 21
    assert len(sets.utility) == 8 and sets.utility_source == "general"
    assert sets.notes == [] and not sets.synthetic


def test_rows_and_documents_are_interleaved(folder):
    sets = load_sets(folder)
    assert {row.cell for row in sets.rows[:12]} == set(CELLS)
    assert [side for side, _, _ in sets.documents[:4]] == ["member", "nonmember"] * 2
    assert sorted(row.key for row in sets.rows) == sorted({row.key for row in sets.rows})


def test_interleave_by_hand():
    assert interleave(["abc", "d", "", "ef"]) == ["a", "d", "e", "b", "f", "c"]


def test_limit_takes_from_every_cell(folder):
    sets = load_sets(folder).limited(12)
    assert {row.cell for row in sets.rows} == set(CELLS)
    assert len(sets.member) == len(sets.nonmember) == 6 and len(sets.utility) == 8
    with pytest.raises(UnlearnError, match="--limit is 0"):
        sets.limited(0)


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_other_formats_give_the_same_content(folder, suffix):
    import pandas as pd

    before = load_sets(folder)
    for name in ("forget", "retain", "member", "nonmember", "general"):
        frame = pd.DataFrame(rows_of(folder, name))
        if suffix == ".json":
            frame.to_json(folder / f"{name}.json", orient="records")
        else:
            frame.to_parquet(folder / f"{name}.parquet")
        (folder / f"{name}.jsonl").unlink()
    after = load_sets(folder)
    assert after.digest == before.digest
    assert after.rows == before.rows


def test_digest_changes_with_the_content(folder):
    before = load_sets(folder).digest
    rows = rows_of(folder, "forget")
    rows[0]["output"] += "!"
    rewrite(folder, "forget", rows)
    assert load_sets(folder).digest != before


def test_missing_folder_asks_for_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnlearnError, match="examples/demo.*name your own folder"):
        load_sets()


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(UnlearnError, match=r"nowhere does not exist; name a folder with forget"):
        load_sets(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["forget", "retain", "member", "nonmember"])
def test_a_missing_file_is_named(folder, name):
    (folder / f"{name}.jsonl").unlink()
    with pytest.raises(UnlearnError, match=rf"has no {name}.jsonl \(.json, .parquet\): "):
        load_sets(folder)


@pytest.mark.parametrize("name", ["forget", "member", "general"])
def test_an_empty_file(folder, name):
    (folder / f"{name}.jsonl").write_text("")
    with pytest.raises(UnlearnError, match=f"{name}.jsonl is empty"):
        load_sets(folder)


def test_ids_that_are_neither_sc_nor_qa(folder):
    rows = rows_of(folder, "forget")
    rows[3]["id"] = "number-4"
    rewrite(folder, "forget", rows)
    with pytest.raises(UnlearnError, match=r"line 4: the id 'number-4' ends in neither sc"):
        load_sets(folder)
    rows[3]["kind"] = "question"
    rewrite(folder, "forget", rows)
    assert load_sets(folder).forget[3].kind == "question"


def test_an_unknown_task(folder):
    rows = rows_of(folder, "retain")
    rows[0]["task"] = "Task7"
    rewrite(folder, "retain", rows)
    with pytest.raises(UnlearnError, match="line 1: task 'Task7' is none of Task1, Task2, Task3"):
        load_sets(folder)


def test_without_tasks_all_rows_are_task_1(folder):
    for side in ("forget", "retain"):
        rewrite(folder, side, [{**row, "task": ""} for row in rows_of(folder, side)])
    sets = load_sets(folder)
    assert {row.cell.split("_")[1] for row in sets.rows} == {"task1"}
    assert "names no tasks" in sets.notes[0]
    assert "4 of 12 cells" in sets.notes[-1]


def test_every_row_a_document_is_said_unless_documents_are_named(folder):
    rows = rows_of(folder, "forget")
    own = [{**row, "id": f"person-{i}", "kind": "question"} for i, row in enumerate(rows)]
    rewrite(folder, "forget", own)
    assert any("every row of forget counts as a document" in n for n in load_sets(folder).notes)
    rewrite(folder, "forget", [{**row, "document": f"d{i // 2}"} for i, row in enumerate(own)])
    sets = load_sets(folder)
    assert not any("of its own" in note for note in sets.notes)
    assert len({row.document for row in sets.forget}) == (len(own) + 1) // 2


def test_a_kind_without_rows_is_said(folder):
    rows = [r for r in rows_of(folder, "forget") if r["task"] != "Task2" or "sc" in r["id"]]
    rewrite(folder, "forget", rows)
    (note,) = load_sets(folder).notes
    assert note.startswith("no rows for forget_task2_knowledge: n/a") and "11 of 12" in note


def test_a_duplicate_id(folder):
    rows = rows_of(folder, "forget")
    rewrite(folder, "forget", [*rows, rows[0]])
    with pytest.raises(UnlearnError, match="line 43: the id .* is already that of line 1"):
        load_sets(folder)


def test_a_row_in_both_sets(folder):
    rewrite(folder, "retain", [*rows_of(folder, "retain"), rows_of(folder, "forget")[5]])
    with pytest.raises(UnlearnError, match="forgotten and kept"):
        load_sets(folder)


def test_a_text_that_is_member_and_nonmember(folder):
    rows = rows_of(folder, "nonmember")
    rows[2]["document"] = rows_of(folder, "member")[4]["document"]
    rewrite(folder, "nonmember", rows)
    with pytest.raises(UnlearnError, match="1 texts are both member and non-member .*'member4'"):
        load_sets(folder)


def test_too_few_members(folder):
    rewrite(folder, "member", rows_of(folder, "member")[:19])
    with pytest.raises(UnlearnError, match="has 19 documents; an AUC needs at least 20"):
        load_sets(folder)
    assert len(load_sets(folder, min_members=5).member) == 19


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 4}, "'answer' is 4 but the choices are numbered 0 to 3"),
        ({"answer": "B"}, "'answer' must be the number of a choice"),
        ({"choices": ["a"]}, "'choices' must be a list of two or more texts"),
        ({"choices": ["a", "a", "b"]}, "two of the 'choices' are the same"),
        ({"question": ""}, "'question' must be a text that is not empty"),
    ],
)
def test_faults_of_four_option_questions(folder, change, message):
    rows = rows_of(folder, "general")
    rewrite(folder, "general", [rows[0], {**rows[1], **change}])
    with pytest.raises(UnlearnError, match=f"line 2: .*{message}"):
        load_sets(folder)


def test_wrong_encoding_and_wrong_types(folder):
    (folder / "forget.jsonl").write_bytes('{"id": "é"}'.encode("latin-1"))
    with pytest.raises(UnlearnError, match="not UTF-8"):
        load_sets(folder)
    rewrite(folder, "forget", [{"id": "a1sc1", "input": "x", "output": 3, "task": "Task1"}])
    with pytest.raises(UnlearnError, match="'output' is of type int but must be a text"):
        load_sets(folder)


def test_no_utility_is_a_note_with_the_cure(folder):
    (folder / "general.jsonl").unlink()
    sets = load_sets(folder)
    assert sets.utility == [] and "general.jsonl" in sets.notes[0]


def test_only_the_embedded_data_count_as_made_up(folder):
    """Neither a manifest of another forget file, nor one that does not say so (demo-real's)."""
    import hashlib

    def synthetic(**manifest) -> bool:
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return load_sets(folder).synthetic

    digest = hashlib.sha256((folder / "forget.jsonl").read_bytes()).hexdigest()
    assert not synthetic(synthetic=True, files={"forget": {"sha256": "0" * 64}})
    assert not synthetic(files={"forget": {"sha256": digest}})
    assert synthetic(synthetic=True, files={"forget": {"sha256": digest}})
