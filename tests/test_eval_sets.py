"""What a data folder may hold, and one sentence for everything that is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from eval_model import documents_of, made_up_rows, write_folder
from fault_codes import fails

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.measurement import Settings
from axolotl_unlearn.evaluation.sets import interleave, load_sets
from axolotl_unlearn.metrics.semeval import CELLS

#: Files of each part that can be asked for.
PARTS = {"tasks": ("forget", "retain"), "mia": ("member", "nonmember"), "mmlu": ("general",),
         "coins": ("canaries",)}  # fmt: skip


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
    assert len(sets.utility) == 8
    assert sets.notes == []


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
    assert "at most 12 each of rows, documents and questions" in sets.notes[-1]
    with fails("eval.limit"):
        sets.limited(0)


def test_a_file_is_the_one_of_its_name(folder):
    """forget.backup.jsonl was read in the place of forget.jsonl, forget.jsonl in that of .json."""
    before = load_sets(folder).digest
    (folder / "forget.backup.jsonl").write_text('{"id": "a", "input": "b", "output": "c"}\n')
    assert load_sets(folder).digest == before
    shutil.copy(folder / "forget.jsonl", folder / "forget.json")
    with fails("eval.two-files"):
        load_sets(folder)


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


@pytest.mark.parametrize("name, key", [
    ("forget", "output"), ("member", "prompt"), ("canaries", "document"), ("canaries", "prompt"),
])  # fmt: skip
def test_digest_changes_with_the_content(folder, name, key):
    """With only new prompts, canaries had the losses of the old ones."""
    coins = [{"id": f"c{i}", "document": f"d {i}", "included": i % 2 == 0} for i in range(10)]
    rewrite(folder, "canaries", coins)
    before = load_sets(folder).digest
    rows = rows_of(folder, name)
    rows[0][key] = rows[0].get(key, "") + "!"
    rewrite(folder, name, rows)
    assert load_sets(folder).digest != before


@pytest.mark.parametrize("name, new", [("CODE", "9.9"), ("versions", lambda: {"torch": "99"})])
def test_what_other_code_measured_is_measured_anew(folder, monkeypatch, name, new):
    """It was taken from the cache, and results.json named the new code."""
    sets, settings = load_sets(folder), Settings()
    before = Cache(None).key("w", sets, settings)
    assert before == Cache(None).key("w", sets, settings)
    monkeypatch.setattr(f"axolotl_unlearn.evaluation.cache.{name}", new)
    assert before != Cache(None).key("w", sets, settings)


def test_a_kind_may_be_named_in_place_of_the_id(folder):
    rows = rows_of(folder, "forget")
    rewrite(folder, "forget", [{**rows[0], "id": "number-4", "kind": "question"}, *rows[1:]])
    assert load_sets(folder).forget[0].kind == "question"


def first(**change):
    """The first row changed."""
    return lambda rows: [{**rows[0], **change}, *rows[1:]]


@pytest.mark.parametrize("code, name, change", [
    ("data.no-rows", "forget", lambda rows: []),
    ("data.no-rows", "member", lambda rows: []),
    ("data.no-rows", "general", lambda rows: []),
    ("eval.no-kind", "forget", first(id="number-4")),
    ("eval.no-task", "retain", first(task="Task7")),
    ("data.id-twice", "forget", lambda rows: [*rows, rows[0]]),
    ("eval.white-space", "member", first(document=" Once upon a time.")),
    ("eval.few-documents", "member", lambda rows: rows[:19]),
    ("data.field-type", "forget", first(output=3)),
    *(("eval.bad-question", "general", first(**change)) for change in (
        {"answer": 4}, {"answer": "B"}, {"answer": True}, {"choices": ["a"]}, {"choices": "abcd"},
        {"choices": ["a", "a", "b"]}, {"choices": ["a", "b", " a"]}, {"choices": ["a", "b", 3]},
        {"question": " "},
    )),
])  # fmt: skip
def test_faults_of_rows(folder, code, name, change):
    rewrite(folder, name, change(rows_of(folder, name)))
    with fails(code) as caught:
        load_sets(folder)
    assert f"{name}.jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["forget", "retain", "member", "nonmember"])
def test_a_missing_file_or_folder_is_named(folder, name):
    (folder / f"{name}.jsonl").unlink()
    with fails("eval.no-file") as caught:
        load_sets(folder)
    assert f"{name}.jsonl" in str(caught.value)
    for place in (folder / "nowhere", folder / "general.jsonl"):
        with fails("eval.no-folder"):
            load_sets(place)


def test_a_row_or_a_text_of_both_sides(folder):
    others = rows_of(folder, "nonmember")
    rewrite(folder, "nonmember", [*others, {**rows_of(folder, "member")[4], "id": "x"}])
    with fails("eval.both-sides") as caught:
        load_sets(folder)
    assert "'member4'" in str(caught.value)
    rewrite(folder, "retain", [*rows_of(folder, "retain"), rows_of(folder, "forget")[5]])
    with fails("data.both-sides"):
        load_sets(folder)
    assert len(load_sets(folder, parts=("mmlu",)).utility) == 8


def test_ids_of_both_sides_are_said_before_anything_is_measured(folder):
    """The evaluation ended so when all was measured, and said: evaluate again."""
    others = rows_of(folder, "nonmember")
    rewrite(folder, "nonmember", [{**others[0], "id": "member4"}, *others[1:]])
    with fails("eval.same-ids") as caught:
        load_sets(folder)
    assert "'member4'" in str(caught.value)


def test_an_answer_is_a_text_of_both_sides_only_after_the_same_prompt(folder):
    """Short answers come again: the second of ten requests in a row ended after its training."""

    def answers(side, who):
        return [{"id": f"{side}{i}", "prompt": f"Q: what is {name}? A: ", "document": "a linguist"}
                for i, name in enumerate(who)]  # fmt: skip

    rewrite(folder, "member", answers("member", "abcdefgh"))
    rewrite(folder, "nonmember", answers("nonmember", "ijklmnop"))
    assert len(load_sets(folder, min_members=8).nonmember) == 8
    rewrite(folder, "nonmember", answers("nonmember", "ijklmnoa"))
    with fails("eval.both-sides") as caught:
        load_sets(folder, min_members=8)
    assert "1 texts" in str(caught.value) and "'nonmember7'" in str(caught.value)


@pytest.mark.parametrize(("prompt", "code"), [
    ([{"role": "user", "content": "Who?"}], "data.field-type"), (3, "data.field-type"),
    ("Who\ud800", "data.not-unicode"), (None, None), ("", None),
])  # fmt: skip
def test_a_prompt_that_is_no_text_is_refused(folder, prompt, code):
    """Turns of a chat were left out: what a model tells after its prompt was not asked."""
    rewrite(folder, "member", [{**row, "prompt": prompt} for row in rows_of(folder, "member")])
    if code is None:
        load_sets(folder)
        return
    with fails(code) as caught:
        load_sets(folder)
    assert "'prompt'" in str(caught.value)


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


def test_no_utility_is_a_note_with_the_cure(folder):
    (folder / "general.jsonl").unlink()
    sets = load_sets(folder)
    assert sets.utility == [] and "general.jsonl" in sets.notes[0]


def test_rows_of_input_and_output_are_joined_as_the_settings_say(folder):
    """`eval --join` read members with a space between, and rows by coin whatever was said."""
    for name in ("member", "nonmember", "canaries"):
        rows = [{"id": f"{name}{i}", "input": f"{name} {i}", "output": "A"} for i in range(20)]
        rewrite(folder, name, [row | {"included": True} for row in rows])
    sets = Settings(join="::").load_sets(folder)
    for name in ("member", "nonmember", "canaries"):
        assert [text for _, text in getattr(sets, name)] == [f"{name} {i}::A" for i in range(20)]


@pytest.mark.parametrize("part", PARTS)
def test_files_of_other_parts_are_not_read(folder, part):
    """A bad canaries.jsonl stopped `attack membership`."""
    for name in (name for other in PARTS if other != part for name in PARTS[other]):
        (folder / f"{name}.jsonl").write_text("{\n")
    if part == "coins":
        rewrite(folder, "canaries", [{"text": f"t{i}", "included": True} for i in range(12)])
    sets = load_sets(folder, parts=(part,))
    fields = {"general": "utility"}
    read = {n for names in PARTS.values() for n in names if getattr(sets, fields.get(n, n))}
    assert read == {*PARTS[part]}
    with pytest.raises(UnlearnError):
        load_sets(folder)
