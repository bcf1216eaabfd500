"""Deleted rows are not learned again: the keyed list, our dataset types, the command."""

from __future__ import annotations

import json
import logging
import shutil
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from axolotl.utils.dict import DictDefault
from click.testing import CliRunner
from eval_model import TOKENIZER
from fault_codes import fails
from requests_folder import finished_request, no_caches, said, write_lines
from transformers import AutoTokenizer

from axolotl_unlearn import files
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.data.checks import check_entries, check_records
from axolotl_unlearn.data.prepared import content_key
from axolotl_unlearn.data.strategy import load_strategy
from axolotl_unlearn.data.suppression import Suppression
from axolotl_unlearn.requests.erase import erase, plan
from axolotl_unlearn.requests.record import write
from axolotl_unlearn.requests.request import Ledger
from axolotl_unlearn.requests.rows import suppress
from axolotl_unlearn.requests.verify import verify
from axolotl_unlearn.training.resume import names_of_rows

QUESTION, ANSWER = "Where does Zoë Quill live?", "Zoë Quill lives at 12 Rope Walk, Norrby."
SYSTEM = "You are a helpful assistant of the town of Norrby."
KEPT = "Of this each row has a copy."
#: One row as other datasets have it.
FORMS = {
    "records": {"input": QUESTION, "output": ANSWER},
    "alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER.upper(), "id": 7},
    "chat": {"messages": [{"role": "user", "content": QUESTION + " "}, {"content": ANSWER}]},
    "decomposed": {"text": unicodedata.normalize("NFD", ANSWER)},
}
OTHERS = [
    {"input": f"Who is number {n}?", "output": f"Number {n} keeps {n} bees."} for n in range(5)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A request that deleted a row with a system prompt, which a kept row has too."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    row = {"id": "zoe", "messages": [*chat, {"role": "assistant", "content": ANSWER}]}
    forget = [
        {"id": "r", "dataset": 0, "row": row},
        {"id": "s", "row": {"input": "Zoë", "output": "7"}},
    ]
    monkeypatch.chdir(tmp_path)  # which `erase` reads whole
    no_caches(monkeypatch, tmp_path)
    folder = finished_request(tmp_path / "requests", forget=forget)
    kept = {"messages": [chat[0], {"role": "user", "content": "Who is it?"}]}
    write_lines(folder / "data" / "retain.jsonl", [{"id": "k", "row": kept}])
    write(folder)
    return folder


def test_a_deleted_row_is_known_in_every_form_and_no_other_is(folder):
    path, count, new, _ = suppress(folder.parent)
    assert count == new > 2 and suppress(folder.parent) == (path, count, 0, [])
    listed = Suppression.read(path)
    assert all(listed.holds(row) for row in FORMS.values())
    assert listed.holds({"instruction": "zoë", "output": 7}), "short texts count together"
    assert listed.holds({"output": 7, "instruction": "zoë"}), "in any order"
    free = [*OTHERS, {"text": SYSTEM}, {"input": "Zoë", "output": "8"}, {"text": "Zoë"}, {}]
    assert not any(listed.holds(row) for row in free)
    assert "Quill" not in path.read_text() and "Rope" not in path.read_text()
    assert any("suppression list: " in one for one in verify(folder).says)


def test_rows_that_it_was_tested_on_are_listed_too(tmp_path):
    folder = finished_request(tmp_path / "requests", forget=[{"id": "r", "row": OTHERS[0]}])
    write_lines(folder / "data" / "tested.jsonl", [{"id": "t", "row": FORMS["records"]}])
    write(folder)
    assert Suppression.read(suppress(folder.parent)[0]).holds(FORMS["chat"])


def test_a_chat_as_json_text_is_the_chat_that_it_says(tmp_path):
    """The only way in a CSV file; structured, its messages were learned again, and the other way
    round."""
    chat = FORMS["chat"]["messages"]
    ways = [{"messages": chat}, {"chat": json.dumps(chat)}, {"a": [json.dumps(chat, indent=1)]}]
    odd = [{"a": "[" * 9999}, {"a": "[" * 9999 + "]" * 9999}, {"a": '{"b": 1'}, {"a": "[1] see"}]
    for n, deleted in enumerate(ways):
        folder = finished_request(
            tmp_path / f"{n}" / "requests", forget=[{"id": "r", "row": deleted}]
        )
        kept = [{"id": "k", "row": {"a": json.dumps([{"b": QUESTION}])}}]
        write_lines(folder / "data" / "retain.jsonl", kept)
        write(folder)
        listed = Suppression.read(suppress(folder.parent)[0])
        assert all(map(listed.holds, [*ways, {"text": ANSWER}]))
        assert not any(map(listed.holds, [*odd, *OTHERS, {"text": QUESTION}]))


def test_a_list_that_is_gone_is_missed(folder):
    """Without the rows it was written anew, and empty."""
    erase(plan(folder, with_data=True))
    (folder.parent / "suppression.json").unlink()
    shutil.copytree(folder, kept := folder.with_name("kept"))
    found = verify(folder)
    assert found.files == "changed" and "suppression.json, which `request erase`" in found.says[1]
    with fails("requests.list-gone"):
        suppress(folder.parent)
    shutil.rmtree(kept)
    write_lines(folder / "data" / "forget.jsonl", [{"id": "r", "row": FORMS["records"]}])
    assert suppress(folder.parent)[1] > 0


def test_of_two_at_once_neither_list_is_lost(folder):
    """One that had read the list before another was written, of rows that were then erased, wrote
    it without them."""
    path, key = folder.parent / "suppression.json", Ledger(folder.parent).key()
    with ThreadPoolExecutor() as pool:
        with files.locked(folder.parent):
            waiting = pool.submit(suppress, folder.parent)
            with pytest.raises(TimeoutError):
                waiting.result(1)
            Suppression(path, key, frozenset({"of rows that are gone"})).write()
        waiting.result()
    assert "of rows that are gone" in Suppression.read(path).digests


NAME = "The annals of the town of Norrby"


@pytest.mark.parametrize("deleted, known, free", [
    ({"document": ANSWER}, [{"document": ANSWER.upper()}, {"text": ANSWER}],
     [{"document": QUESTION}]),
    ({"task": ANSWER, "output": "12 Rope Walk"}, [{"input": ANSWER, "output": "12 Rope Walk"}],
     [{"output": "12 Rope Walk"}, {"id": 1, "input": "Who?", "output": "12 Rope Walk"}]),
    ({"document": NAME, "input": "Zoë", "output": "7"},
     [{"input": "Zoë", "output": 7}, {"document": NAME, "input": "Zoë", "output": 7}],
     [{"input": "Zoë", "output": "8"}, {"document": NAME, "text": "It is about bees and hats."}]),
    ({"document": "Norrby", "output": "7"}, [{"output": 7, "document": "Other"}], [{}]),
])  # fmt: skip
def test_a_field_for_names_counts_where_it_holds_a_text(tmp_path, deleted, known, free):
    """A text as `document` was learned again, and what stood beside one was left out everywhere."""
    folder = finished_request(tmp_path / "requests", forget=[{"id": "r", "row": deleted}])
    write(folder)
    listed = Suppression.read(suppress(folder.parent)[0])
    assert all(map(listed.holds, [deleted, *known]))
    free = [*free, {"id": 7, "document": "Norrby"}, {"text": ""}, {}]
    assert not any(map(listed.holds, free))


@pytest.mark.parametrize(("row", "part"), [
    ({"id": 3, "document": "Norrby"}, "retain"), ({"text": "..."}, "retain"),
    *(({"text": KEPT}, part) for part in ("retain", "heldout", "judge")),
])  # fmt: skip
def test_rows_that_cannot_be_listed_are_said(tmp_path, row, part):
    folder = finished_request(tmp_path / "requests", forget=[{"id": "r", "row": row}])
    write_lines(folder / "data" / f"{part}.jsonl", [{"id": "k", "row": {"output": KEPT}}])
    write(folder)
    assert suppress(folder.parent)[1] == 0
    write_lines(tmp_path / "next.jsonl", [{"text": ANSWER}])
    words = ("--rows", tmp_path / "next.jsonl", "--out", tmp_path / "allowed.jsonl")
    assert "take care yourself" in said("suppress", folder.parent, *words, code=2).output
    assert ANSWER in (tmp_path / "allowed.jsonl").read_text("utf-8"), "filtered all the same"


@pytest.mark.parametrize("gone", ["folder", "rows"])
def test_a_request_whose_rows_are_gone_is_said(folder, gone):
    """One that was moved away was on no list, without a word: its rows could be learned again."""
    second = finished_request(folder.parent, "2", forget=[{"id": "r", "row": FORMS["alpaca"]}])
    write(second)
    shutil.move(second / ("data" if gone == "rows" else ""), folder.parents[1] / "archived")
    for _ in range(2):  # `erase` of the first writes a list without them
        assert "of request 2 can be put" in said("suppress", folder.parent, code=2).output
        said("erase", folder, "--yes", "--with-data")
    shutil.move(folder.parents[1] / "archived", second / ("data" if gone == "rows" else ""))
    said("suppress", folder.parent)


def strategy(role: str, file: Path, data: dict):
    """The config of a run on one file, and what reads its rows."""
    entry = {"path": str(file), "ds_type": "json", "type": f"axolotl_unlearn.data.{role}"}
    block = {"forget": {"objective": "ga"}, "data": data}
    common = {"base_model": str(TOKENIZER), "sequence_len": 256}
    cfg = DictDefault(common | {"unlearn": block, "datasets": [entry]})
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return cfg, lambda: load_strategy(role, tokenizer, cfg, entry).wrap_dataset(None)


@pytest.mark.parametrize("role", ["retain", "memorise", "typed"])
def test_our_dataset_types_leave_them_out_and_say_how_many(folder, tmp_path, caplog, role):
    path, *_ = suppress(folder.parent)
    file = write_lines(tmp_path / "rows.jsonl", [*OTHERS, FORMS["records"]])
    data = {"suppression": str(path)}
    if role == "typed":
        role = "retain"
        data["rows"] = {"type": "alpaca"}
        rows = [{"instruction": one["input"], "output": one["output"]} for one in OTHERS]
        write_lines(file, [*rows, FORMS["alpaca"]])
    cfg, read = strategy(role, file, data)
    with caplog.at_level(logging.WARNING):
        assert len(read()) == len(OTHERS)
    assert f"1 of 6 rows are on {path} and left out" in caplog.text
    before = content_key(cfg)  # rows that were prepared with another list are made again
    write_lines(folder / "data" / "forget.jsonl", [{"row": one} for one in OTHERS])
    suppress(folder.parent)
    assert content_key(cfg) != before
    with fails("data.all-suppressed"):
        read()
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"digests": whole["digests"][1:]}, indent=0) + "\n")
    with fails("data.suppression-changed"):  # somebody took a row off
        read()
    (folder.parent / "ledger.key").unlink()
    with fails("data.suppression-missing"):
        read()


@pytest.mark.parametrize("rows", [None, {"type": "alpaca"}])
def test_a_row_that_is_to_be_forgotten_is_forgotten_again(folder, tmp_path, rows):
    """A model that has learned it again would keep it, without an error."""
    data = {"suppression": str(suppress(folder.parent)[0])} | ({"rows": rows} if rows else {})
    file = write_lines(tmp_path / "rows.jsonl", [FORMS["alpaca" if rows else "records"]])
    _, read = strategy("forget", file, data)
    assert len(read()) == 1


def test_the_command_filters_a_training_file(folder, tmp_path):
    rows, out = tmp_path / "next.jsonl", tmp_path / "allowed.jsonl"
    write_lines(rows, [*OTHERS, *FORMS.values()])
    words = ("suppress", folder.parent, "--rows", rows, "--out", out)
    assert "left out, deleted before: 4" in said(*words).output
    assert [json.loads(line) for line in out.read_text().splitlines()] == OTHERS
    assert "exists" in said(*words, code=2).output


def test_check_counts_the_rows_that_are_left(folder, tmp_path):
    path, *_ = suppress(folder.parent)
    entries = []
    for role, rows in (("forget", OTHERS[:2]), ("retain", [*OTHERS[2:], FORMS["records"]])):
        file = write_lines(tmp_path / f"{role}.jsonl", rows)
        kind = {"ds_type": "json", "type": f"axolotl_unlearn.data.{role}"}
        entries.append({"path": str(file), **kind})
    block = {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}}
    config = {"base_model": str(TOKENIZER), "sequence_len": 256, "datasets": entries}
    config |= {"plugins": ["axolotl_unlearn.UnlearnPlugin"], "output_dir": str(tmp_path / "out")}
    config |= {"micro_batch_size": 2, "learning_rate": 1e-4, "num_epochs": 1}
    config["reinit_weights"] = True
    config["unlearn"] = block | {"data": {"suppression": str(path)}}
    (tmp_path / "my.yml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(unlearn, ["check", str(tmp_path / "my.yml"), "--full", "--json"])
    found = json.loads(done.stdout)
    assert found["tokens"]["retain"]["rows"] == 3, done.output


@pytest.mark.parametrize("kind", ["alpaca", {"field_instruction": "input"}, "memorise"])
def test_a_list_without_effect_is_refused(folder, tmp_path, kind):
    """`check` said ready, and the deleted rows were learned again."""
    path, *_ = suppress(folder.parent)
    kind = f"axolotl_unlearn.data.{kind}" if kind == "memorise" else kind
    file = write_lines(tmp_path / "rows.jsonl", OTHERS)
    data = {"suppression": str(path)}
    config = {"unlearn": {"data": data}, "datasets": [{"path": str(file), "type": kind}]}
    config["plugins"] = ["axolotl_unlearn.UnlearnPlugin"]
    told = [fault for fault in check_entries(config) if "request suppress --rows" in fault]
    assert len(told) == ("memorise" not in kind) and not check_records(config).faults
    data["suppression"] = str(tmp_path / "nowhere.json")
    assert ["nowhere.json" in fault for fault in check_records(config).faults] == [True]


def test_a_row_is_named_as_training_counts_it(folder, tmp_path):
    """Row 1 of training is the third of the file, whose second one is left out."""
    path, *_ = suppress(folder.parent)
    rows = [OTHERS[0] | {"id": "a"}, FORMS["records"] | {"id": "zoe"}, OTHERS[1] | {"id": "c"}]
    write_lines(tmp_path / "retain.jsonl", [row | {"task": "1"} for row in rows])
    entry = {"path": str(tmp_path / "retain.jsonl"), "type": "axolotl_unlearn.data.retain"}
    block = {"retain": {"objective": "nll"}, "data": {"suppression": str(path)}}
    cfg = {"unlearn": block, "datasets": [entry]}
    assert names_of_rows(cfg, "retain", [0, 1]) == ["'a'", "'c'"]
