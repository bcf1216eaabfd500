"""`axolotl unlearn check`: every fault of the data at once, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from axolotl_unlearn.data.checks import check_files

FORGET = {"id": "aqa0", "input": "q", "output": "d", "task": "Task2"}
RETAIN = {"id": "bqa0", "input": "r", "output": "e", "task": "Task2"}
BLOCK = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}


@pytest.fixture
def entry(tmp_path):
    """A function: rows (or None for no file) and role -> an entry of ``datasets``."""
    made = iter(range(100))

    def make(rows, role="forget", **extra):
        path = tmp_path / f"{role}{next(made)}.jsonl"
        if rows is not None:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path), "type": f"axolotl_unlearn.data.{role}", **extra}

    return make


def test_good_data_have_no_faults(entry):
    cfg = {"unlearn": BLOCK, "datasets": [entry([FORGET]), entry([RETAIN], "retain")]}
    assert check_files(cfg) == []
    # the held-out rows may be the training rows of the other config
    assert check_files(cfg | {"test_datasets": [entry([FORGET]), entry([RETAIN], "retain")]}) == []
    memorise = {"datasets": [entry([FORGET, FORGET], "memorise")]}
    assert check_files(memorise) == []


def test_all_faults_at_once(entry):
    wrong = entry([RETAIN])
    wrong["type"] = "axolotl_unlearn.data.retian"
    cfg = {
        "unlearn": BLOCK,
        "datasets": [
            entry(None),
            entry([], "forget"),
            entry([{"id": "x", "input": "a", "outptu": "b", "task": "T"}]),
            wrong,
            entry([FORGET], "forget", dstype="json"),
            {"path": "x.jsonl", "type": "alpaca"},
            {"type": "axolotl_unlearn.data.forget"},
            {"path": "x.jsonl"},
            "x.jsonl",
        ],
    }
    faults = check_files(cfg)
    wanted = [
        "does not exist",
        "is empty",
        "'output' is missing (did you mean 'outptu'?)",
        "did you mean axolotl_unlearn.data.retain?",
        "`datasets[4].dstype` has no effect",
        "`datasets[5].type` is 'alpaca'",
        "`datasets[6].path` is missing",
        "`datasets[7].type` is missing",
        "`datasets[8]` must be an entry",
        "no dataset has `type: axolotl_unlearn.data.retain`",
    ]
    for text in wanted:
        assert sum(text in fault for fault in faults) == 1, text
    assert len(faults) == len(wanted)
    assert all(fault.endswith((".", "?")) for fault in faults)


def test_overlap(entry):
    cfg = {"unlearn": BLOCK, "datasets": [entry([FORGET]), entry([RETAIN, FORGET], "retain")]}
    (fault,) = check_files(cfg)
    assert "'aqa0'" in fault and "forgotten and kept" in fault
    twice = {
        "unlearn": BLOCK,
        "datasets": [entry([FORGET]), entry([FORGET]), entry([RETAIN], "retain")],
    }
    (fault,) = check_files(twice)
    assert "both forget rows" in fault


def test_roles_that_the_objectives_need(entry):
    only_forget = {"unlearn": {"forget": {"objective": "npo"}}, "datasets": [entry([FORGET])]}
    assert check_files(only_forget) == []
    assert "data.retain" in check_files({"unlearn": BLOCK, "datasets": [entry([FORGET])]})[0]
    assert (
        "data.forget" in check_files({"unlearn": BLOCK, "datasets": [entry([RETAIN], "retain")]})[0]
    )
    assert check_files({"unlearn": BLOCK}) == [
        "no dataset has one of our types; add entries with `type: axolotl_unlearn.data.forget` and "
        "`type: axolotl_unlearn.data.retain`."
    ]
    assert "must be a list" in check_files({"datasets": {"path": "x"}})[0]


def test_own_fields_and_data_elsewhere(entry):
    rows = [{"id": "aqa0", "q": "x", "a": "y", "task": "Task1"}]
    block = {"forget": {"objective": "npo"}, "data": {"fields": {"input": "q", "output": "a"}}}
    assert check_files({"unlearn": block, "datasets": [entry(rows)]}) == []
    hub = {"path": "someone/forget-set", "type": "axolotl_unlearn.data.forget", "split": "train"}
    assert check_files({"unlearn": block, "datasets": [hub]}) == []
    demo = {"path": "out/demo/nothing/f.jsonl", "type": "axolotl_unlearn.data.forget"}
    assert "axolotl unlearn make-data" in check_files({"unlearn": block, "datasets": [demo]})[0]


def test_a_faulty_block_does_not_hide_the_files(entry):
    cfg = {"unlearn": {"forgett": 1}, "datasets": [entry(None)]}
    assert ["does not exist" in fault for fault in check_files(cfg)] == [True]


def test_an_edited_memorisation_stream_is_read_again(entry):
    """Axolotl keys its prepared copy by path; the plugin adds the content."""
    from axolotl_unlearn.preflight import PLUGIN, prepare

    first = entry([FORGET], "memorise")

    def prepared():
        cfg = {"plugins": [PLUGIN], "unlearn": {"data": {}}, "datasets": [dict(first)]}
        prepare(cfg)
        return cfg["dataset_prepared_path"]

    before = prepared()
    assert prepared() == before
    with open(first["path"], "a") as file:
        file.write(json.dumps(RETAIN) + "\n")
    assert prepared() != before


def test_checking_loads_neither_axolotl_nor_torch():
    code = (
        "import sys; from axolotl_unlearn.data.checks import check_files; check_files({});"
        "print([m for m in ('axolotl', 'transformers', 'datasets', 'torch') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
