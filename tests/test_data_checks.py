"""`axolotl-unlearn check`: every fault of the data at once, before anything is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from fault_codes import fails

from axolotl_unlearn.checks import config as config_checks
from axolotl_unlearn.checks.config import (
    PLUGIN,
    config_faults,
    setting_notes,
)
from axolotl_unlearn.checks.report import check
from axolotl_unlearn.columns import SIDES, task_number
from axolotl_unlearn.config import UnlearnArgs, parse_unlearn
from axolotl_unlearn.config.reading import read_config
from axolotl_unlearn.data.checks import check_columns, check_entries, check_records
from axolotl_unlearn.data.coverage import RowCounts
from axolotl_unlearn.data.strategy import load_strategy
from axolotl_unlearn.errors import UnlearnError


def model_folder(folder: Path, **config) -> str:
    """Files with the names of a model's; only config.json is read."""
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


#: An entry of rows that are not here.
ANYWHERE = {"path": "someone/rows", "type": "axolotl_unlearn.data.forget"}


def plain(**changes) -> dict:
    """A config without faults, of rows that are not here."""
    block = {"forget": {"objective": "npo"}}
    return {"plugins": [PLUGIN], "unlearn": block, "datasets": [ANYWHERE], **changes}


FORGET = {"id": "a1qa0", "input": "q", "output": "d", "task": "Task2"}
RETAIN = {"id": "b1qa0", "input": "r", "output": "e", "task": "Task2"}
BLOCK = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}


def check_files(cfg: dict) -> list[str]:
    """Every fault of the data of a raw config."""
    return check_entries(cfg) + check_records(cfg).faults


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


@pytest.fixture
def both(entry):
    """A function: rows of both sides and the block -> a config."""

    def make(forgotten=(FORGET,), kept=(RETAIN,), **block):
        sides = [entry(forgotten), entry(kept, "retain")]
        return {"unlearn": BLOCK | block, "datasets": sides}

    return make


def test_good_data_have_no_faults(entry, both):
    cfg = both()
    assert check_files(cfg) == []
    # the held-out rows may be the training rows of the other config
    assert check_files(cfg | {"test_datasets": both()["datasets"]}) == []
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
        "did you mean 'axolotl_unlearn.data.retain'?",
        "`datasets[4].dstype` has no effect",
        "`datasets[5].type` is 'alpaca'",
        "`datasets[6].path` is missing",
        "`datasets[7].type` is missing",
        "`datasets[8]` must be an entry",
        "`datasets` has no entry with `type: axolotl_unlearn.data.retain`",
    ]
    for text in wanted:
        assert sum(text in fault for fault in faults) == 1, text
    assert len(faults) == len(wanted)
    assert all(fault.endswith((".", "?")) for fault in faults)


def test_a_share_of_an_entry_is_refused(entry, both):
    """It was said to have no effect: Axolotl draws rows of a dataset of the hub by it."""
    cfg = both()
    cfg["datasets"][0]["weight"] = 0.5
    (fault,) = check_files(cfg)
    assert fault.startswith("`datasets[0].weight` draws a part of the rows")


def test_overlap(entry, both):
    (fault,) = check_files(both(kept=[RETAIN, FORGET]))
    assert "have rows in common: 1 (the first is row 1 here, row 2 there)" in fault
    folder = {"path": "a/b", "type": "axolotl_unlearn.data.forget"}
    folders = [folder, folder | {"type": "axolotl_unlearn.data.retain"}]
    (fault,) = check_files({"unlearn": BLOCK, "datasets": folders})
    assert "`datasets` has 'a/b' on both sides" in fault.replace(f"{Path.cwd()}/", "")
    folders[0] = folder | {"data_files": "f.jsonl"}
    assert check_files({"unlearn": BLOCK, "datasets": folders}) == []
    twice = both()
    twice["datasets"].append(entry([FORGET]))
    (fault,) = check_files(twice)
    assert "both forget rows" in fault


def test_roles_that_the_objectives_need(entry):
    only_forget = {"unlearn": {"forget": {"objective": "npo"}}, "datasets": [entry([FORGET])]}
    assert check_files(only_forget) == []
    for side, rows, other in (("forget", [FORGET], "retain"), ("retain", [RETAIN], "forget")):
        (fault,) = check_files({"unlearn": BLOCK, "datasets": [entry(rows, side)]})
        assert f"data.{other}" in fault
    assert check_files({"unlearn": BLOCK}) == [
        "no dataset has one of our types; add entries with `type: axolotl_unlearn.data.forget` and "
        "`type: axolotl_unlearn.data.retain`."
    ]
    assert "must be a list" in check_files({"datasets": {"path": "x"}})[0]


def test_alternatives_answer_forget_rows(entry):
    """By id, or by place where no file has ids; a row may have several."""
    block = {"forget": {"objective": "dpo"}}

    def faults(forget, other):
        sets = [entry(forget), *([entry(other, "alternative")] if other else [])]
        return check_files({"unlearn": block, "datasets": sets})

    idk = FORGET | {"output": "I do not know."}
    assert faults([FORGET], [idk]) == faults([FORGET], [idk, idk | {"output": "No idea."}]) == []
    plain = [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]
    assert faults(plain, [row | {"output": "e"} for row in plain]) == []
    (fault,) = faults([FORGET], None)
    assert (
        "other answers but `datasets` has no entry with `type: axolotl_unlearn.data.alternative`"
        in fault
    )
    for other in ({"id": "z1qa0"}, {"task": "Task3"}):  # the task was found by training alone
        (fault,) = faults([FORGET], [idk | other])
        assert "alternative 1 of" in fault and "answers no forget row" in fault
    (fault,) = faults([FORGET, FORGET | {"id": "b1qa0", "input": "other"}], [idk])
    assert "1 of 2 forget rows have no alternative, the first is row 2" in fault
    (fault,) = faults([FORGET], [idk | {"output": FORGET["output"]}])
    assert "write another answer" in fault
    unused = {"unlearn": {"forget": {"objective": "ga"}}}
    unused["datasets"] = [entry([FORGET]), entry([idk], "alternative")]
    (fault,) = check_files(unused)
    assert "`unlearn.forget` has no objectives that look at other answers" in fault


@pytest.mark.parametrize(
    "part",
    [
        {"split": "train[:1]"},
        {"split": "test"},
        {"shards": 2},
        {"preprocess_shards": 2},
        {"data_files": "other.jsonl"},
        {"name": "forget10"},
    ],
)
def test_a_part_of_a_local_file_is_refused(entry, part):
    """The file is read whole, by `check` and by training."""
    block = {"forget": {"objective": "npo"}}
    one = entry([FORGET], **part)
    (fault,) = check_files({"unlearn": block, "datasets": [one]})
    assert "which is read whole" in fault
    with fails("data.part-of-a-file"):
        load_strategy("memorise", None, {"sequence_len": 8}, one)
    assert not check_files({"unlearn": block, "datasets": [one | {"path": "someone/rows"}]})


ROWS = [
    {"id": "a1sc1", "input": "a", "output": "x", "task": "bio"},
    {"id": "b1sc1", "input": "b", "output": "x", "task": "PII"},
    {"id": "c1qa0", "input": "c", "output": "x", "task": "PII"},
]


@pytest.mark.parametrize(
    ("forget", "says"),
    [
        ({"kinds": "question", "tasks": "bio"}, r"forget\[0\]` \(npo\) is for no row.*question of"),
        ({"tasks": ["pii", "stories"]}, r"`unlearn.forget\[0\].tasks`: no forget row.*'stories'"),
        ({"tasks": 2}, "no forget row has the task 2; there are 1 completion of task 'PII'"),
        ({"kinds": "question"}, "for 1 completion of task 'PII' and 1 completion of task 'bio'"),
        ({}, None),
        ({"tasks": ["Bio", "pii"]}, None),
    ],
)
def test_entries_and_rows_that_do_not_meet(both, forget, says):
    """Seen before: such a run trained on the retain rows alone, and its forget loss fell."""
    faults = check_files(both(ROWS, forget={"objective": "npo"} | forget))
    assert re.search(says, " ".join(faults)) if says else faults == []


@pytest.mark.parametrize(("tasks", "found"), [(None, 0), ("bio", 1)])
def test_an_entry_beside_a_teacher_may_match_no_row(entry, tasks, found):
    """docs/own-model.md: the preset has entries for either kind."""
    sides = [{"objective": "match"}, {"objective": "match", "kinds": "question", "tasks": tasks}]
    block = {"preset": "never-seen", "teacher": "t", "heldout": "h", "forget": sides}
    cfg = {"datasets": [entry(ROWS[:2]), entry([RETAIN], "retain")], "unlearn": block}
    assert ["is for no row" in one for one in check_files(cfg)] == [True] * found


def test_entries_of_phases_are_counted_together(entry):
    """The second phase may be for other rows than the first."""
    phases = [
        {"steps": 1, "forget": {"objective": "npo", "tasks": "bio"}},
        {"steps": 1, "forget": {"objective": "npo", "tasks": "pii"}, "retain": BLOCK["retain"]},
    ]
    cfg = {"datasets": [entry(ROWS), entry([RETAIN], "retain")], "unlearn": {"phases": phases}}
    assert check_files(cfg) == []
    phases[1]["forget"]["tasks"] = "stories"
    assert "`unlearn.phases[1].forget[0].tasks`: no forget row" in check_files(cfg)[0]


@pytest.mark.parametrize(
    ("kinds", "tasks", "documents", "said"),
    [("question", None, True, True), ("question", None, False, False), (None, None, True, False),
     ("completion", None, True, False), (None, [7], True, True)],
)  # fmt: skip
def test_entries_that_draw_no_document_are_named(kinds, tasks, documents, said):
    """They looked at documents alone, and did nothing without a word."""
    given = {"objective": "feature_matching", "kinds": kinds, "tasks": tasks}
    args = UnlearnArgs(forget=[{"objective": "ga"}, given], retain={"objective": "nll"})
    counts = RowCounts()
    counts.rows[("forget", "question", 7)] = 3
    counts.rows |= {("forget", "completion", 1): 3} if documents else {}
    assert any("`feature_matching` does nothing" in one for one in counts.notes(args)) == said


def test_retain_rows_that_no_entry_is_for_are_named(entry):
    block = BLOCK | {"retain": {"objective": "nll", "kinds": "completion"}}
    rows = [RETAIN, RETAIN | {"id": "c1sc1", "input": "other"}]
    cfg = {"unlearn": block, "datasets": [entry([FORGET]), entry(rows, "retain")]}
    checked = check_records(cfg)
    assert checked.faults == []
    (note,) = checked.counts.notes(parse_unlearn(block))
    assert "1 question of task 'Task2': these retain rows" in note


@pytest.mark.parametrize(
    ("more", "data", "says"),
    [
        (
            {"instruction": "Who?"},
            {},
            "field 'instruction' holds text .*`unlearn.data.rows: {type: a",
        ),
        (
            {"messages": [{"role": "user"}]},
            {},
            "field 'messages' holds text .*{type: chat_template}",
        ),
        ({"system": "Be brief."}, {}, "field 'system' holds text that is not read"),
        ({"instruction": "", "messages": [], "system": None, "note": "x"}, {}, None),
        ({"question": "Who?"}, {"fields": {"input": "question"}}, None),
    ],
)
def test_text_that_nobody_reads_is_a_fault(both, more, data, says):
    """Alpaca rows were "ready", and bare answers forgotten without their question."""
    retain = {"id": "b", "input": "r", "question": "r", "output": "e", "task": ""}
    found = check_files(both([FORGET | more], [retain if data else RETAIN], data=data))
    assert len(found) == (says is not None), found
    assert says is None or (re.search(says, found[0]) and "Who?" not in found[0])


@pytest.mark.parametrize(
    ("rows", "data", "says"),
    [
        ([FORGET], {}, []),
        ([FORGET | {"input": ""}], {}, ["no forget row of .* has a prompt"]),
        ([FORGET | {"input": "Who?"}], {}, []),
        ([FORGET | {"id": "misc3"}], {}, ["the ending of the id 'misc3' .* no kind"]),
        ([FORGET | {"id": "misc3", "kind": "question"}], {}, []),
        ([FORGET | {"input": "Who?", "id": "a"}], {}, ["1 of 1 forget rows .* labelled whole"]),
        ([FORGET | {"input": "Who?", "id": "a", "kind": "question"}], {}, []),
        ([FORGET | {"input": "Who?", "id": "a"}], {"labels": {"completion": "answer"}}, []),
        ([FORGET | {"input": "Who?", "id": "a"}], {"template": "{input} {output}"}, []),
    ],
)
def test_prompts_that_are_empty_or_labelled_are_noted(both, rows, data, says):
    found = check_records(both(rows, data=data)).notes
    assert len(found) == len(says)
    assert all(re.search(one, note) for one, note in zip(says, found, strict=True))


def test_rows_in_columns_are_counted_alike(entry):
    """Data of the hub are seen only as columns, in which tasks are numbers."""
    from datasets import Dataset

    columns = {"role": [0, 0, 1], "kind": [0, 1, 1], "task": [task_number("PII"), 3, 2]}
    rows = Dataset.from_dict(columns)
    args = lambda **more: parse_unlearn(BLOCK | {"forget": {"objective": "npo"} | more})  # noqa: E731
    assert check_columns(args(), rows) == check_columns(args(tasks=["pii", 3]), rows) == []
    with fails("data.entries-and-rows"):
        check_columns(args(tasks=3), rows)


RMU = {"objective": "rmu"}
PHASE = {"phases": [{"steps": 2, "forget": {"objective": "npo"}}]}
ANEW = {"phases": 2 * [PHASE["phases"][0] | {"fresh_optimizer": True}]}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 4, "lora_target_linear": True}
NPO = {"objective": "npo"}
SHARDED = LORA | {"fsdp_config": {"x": 1}}
IN_PARTS = [{"fsdp_version": 2, "fsdp_config": {"x": 1}}, {"deepspeed": "zero3.json"}]
STARTS = [{}, {"adapter": "lora", "lora_model_dir": "someone/adapter"}]
#: Settings -> what a fault says; None: there is none.
SETTINGS = [
    ({"unlearn": PHASE, "max_steps": 9}, "`max_steps` does not go with `unlearn.phases`"),
    ({"unlearn": PHASE, "num_epochs": 2}, "`num_epochs` does not go with `unlearn.phases`"),
    ({"unlearn": ANEW, "deepspeed": "x.json"}, "DeepSpeed's own"),
    ({"unlearn": ANEW, "optimizer": "schedule_free_adamw"}, "keeps more than the moments"),
    ({"unlearn": ANEW, "optimizer": "muon"}, "keeps more than the moments"),
    ({"unlearn": PHASE, "optimizer": "muon"}, None), ({"unlearn": ANEW, "optimizer": "sgd"}, None),
    ({"unlearn": PHASE, "optimizer": "schedule_free_adamw"}, None),
    (SHARDED | {"lora_model_dir": "someone/adapter"}, "set `fsdp_version: 2`"),
    (SHARDED | {"unlearn": {"forget": NPO, "reference": "frozen_copy"}}, "no process has under F"),
    ({"unlearn": {"forget": NPO, "reference": {"model": "./not-there"}}},
     "`reference.model: ./not-there` does not"),
    *(({"unlearn": {"forget": NPO, "reference": reference}} | way | start, None) for way in IN_PARTS
      for start in STARTS for reference in ("auto", "cached", {"model": "."})),
    ({"learning_rate": -1e-4}, "`learning_rate: -0.0001` must be above 0"),
    ({"learning_rate": "1e-4", "lora_dropout": 0.0, "max_grad_norm": 0}, None),
    ({"lora_r": -8}, "`lora_r: -8`"),
    ({"weight_decay": float("nan")}, "`weight_decay: nan` must be 0 or more"),
    ({"relora": True}, "`relora: True` does not go with unlearning (the reference is"),
    ({"group_by_length": True, "sample_packing": True}, None),
    ({"context_parallel_size": 2}, "`context_parallel_size: 2`"),
    ({"context_parallel_size": 1, "tensor_parallel_size": 1, "relora": False}, None),
    ({"streaming": True}, "; use `datasets:`"),
    ({"use_tensorboard": True, "use_mlflow": False}, None),
    ({"dataset_num_proc": 0, "dataloader_num_workers": 0, "pad_to_multiple_of": 64}, None),
    ({"lr_scheduler": ["linear"]}, "must be a text"),
    ({"saves_per_epoch": "./"}, "`saves_per_epoch: ./` must be a number"),
    ({"chat_template_kwargs": 1}, "must be a block of keys"),
    ({"peft_layers_to_transform": 12}, "must be a list"),
    ({"plugins": [PLUGIN, 1]}, "`plugins` must be a list of names"),
    ({"push_dataset_to_hub": "me/rows"}, "would upload forget rows"),
    (LORA | {"unfrozen_parameters": ["down_proj"]}, "outside of the adapter"),
    (LORA | {"unfrozen_parameters": ["base_model.model.*lora_"]}, None),
    ({"unfrozen_parameters": ["down_proj"]}, None),
    ({"optimizer": "dion"}, "give both"),
    (LORA | {"lora_target_linear": False}, "`adapter: lora` has no module to adapt"),
    (LORA | {"adapter": "qlora", "lora_alpha": None}, "`adapter: qlora` cannot be made without"),
    ({"lr_scheduler": "rex"}, None),
    ({"unlearn": PHASE, "lr_scheduler": "rex"}, "`lr_scheduler: rex` cannot begin anew in each"),
    ({"unlearn": PHASE, "lr_scheduler": "linear"}, None),
    ({"unlearn": PHASE, "jagged_restart_steps": 5}, "does not go with `unlearn.phases`"),
    ({"unlearn": {"forget": RMU | {"layer": 9}}, "peft_layers_to_transform": [12, 10]} | LORA,
     "from layer 10 on"),
    ({"unlearn": {"forget": RMU | {"layer": 10}}, "peft_layers_to_transform": [12, 10]} | LORA,
     None),
    (LORA | {"base_model": "gpt2", "lora_model_dir": "nowhere"}, "does not exist"),
    (LORA | {"base_model": "gpt2", "lora_model_dir": "someone/adapter"}, None),
    ({"base_model": "gpt2", "lora_model_dir": "someone/adapter"}, "is not read without `adapter`"),
    ({"learning_rat": 1}, "did you mean `learning_rate`?"),
    ({"lora_layers_to_transform": 1}, "did you mean `peft_layers_to_transform`?"),
    ({"pairing": 1}, "belongs into the block `unlearn:`"),
    ({"x-datasets": 1}, None),  # where YAML anchors stand
    ({"datasets": [ANYWHERE | {"path": "rows.parquet", "ds_type": "json"}]},
     "ds_type: json` would read 'rows.parquet' as what"),
    ({"datasets": [ANYWHERE | {"path": "rows.jsonl", "ds_type": "csv"}]}, "use json, or remove"),
    ({"datasets": [ANYWHERE | {"path": "rows.parquet", "ds_type": "parquet"}]}, None),
    ({"datasets": [ANYWHERE | {"ds_type": "json", "split": "train"}]}, None),
    ({"datasets": [ANYWHERE | {"path": "json", "data_files": "/data/rows.jsonl"}]},
     "`datasets[0].path: json` is a format"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "says"), SETTINGS, ids=str)
def test_settings_of_axolotl(settings, says):
    """Each was called ready, and then trained on something else or failed after loading."""
    found = [
        one
        for one in config_faults(plain() | settings, trains=True)
        if "needs the package" not in one
    ]
    assert len(found) == (says is not None) and (says is None or says in found[0]), found


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_adapter_whose_config_cannot_be_read(tmp_path, content):
    """It was called ready, or ended in a traceback."""
    if content:
        (tmp_path / "adapter_config.json").write_text(content)
    given = plain() | LORA | {"base_model": "gpt2", "lora_model_dir": str(tmp_path)}
    assert any("adapter_config.json cannot be read" in fault for fault in config_faults(given))
    setting_notes(given)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ({"num_hidden_layers": 4}, {}, r"`layer: 7` \(the default\) of forget/rmu .* 0 to 3"),
        ({"text_config": {"num_hidden_layers": 4}}, {}, "has layers 0 to 3"),
        ({"num_hidden_layers": 8}, {}, None),
        ({"model_type": "gemma3n"}, {}, "of which Gemma 3n has four at once"),
        ({"model_type": "gpt2"}, LORA | {"lora_target_linear": True}, "name them in `lora_target"),
        ({"model_type": "llama"}, LORA | {"lora_target_linear": True}, None),
    ],
)
def test_what_a_model_cannot_take(model, settings, says, tmp_path):
    """Found from config.json; it was found in the first step."""
    cfg = plain(unlearn={"forget": RMU}, base_model=model_folder(tmp_path, **model))
    found = config_faults(cfg | settings)
    assert len(found) == (says is not None) and (says is None or re.search(says, found[0])), found


@pytest.mark.parametrize(
    ("deepspeed", "told"),
    [
        ({"zero_optimization": {"stage": 3}}, True),
        ({"zero_optimization": {"stage": 2}}, False),
        ("zero3exp/ds2.json", False),
        ("ds3.json", True),
        ("not_there/zero3_bf16.json", True),
        ("not_there/ds.json", False),
        (None, False),
    ],
)
def test_zero_3_is_that_of_its_config(deepspeed, told, tmp_path, monkeypatch):
    """It was "zero3" anywhere in the path, so that a block or `ds3.json` passed."""
    monkeypatch.chdir(tmp_path)
    Path("zero3exp").mkdir()
    for name, number in (("ds3.json", 3), ("zero3exp/ds2.json", 2)):
        Path(name).write_text(json.dumps({"zero_optimization": {"stage": number}}))
    cfg = plain(unlearn=BLOCK | {"reference": "frozen_copy"}, deepspeed=deepspeed)
    assert any("under FSDP or ZeRO-3" in fault for fault in config_faults(cfg)) == told


@pytest.mark.parametrize(
    "text, fault",
    [
        ("a: &a {lr: 1}\nb: {c: &c {<<: *a, lr: 2}}\nd: {<<: *c, s: 3}\n", None),
        ("d: {<<: {lr: 1, lr: 2}, s: 3}\n", "'lr' stands twice"),
        ("a: &one {b: 1}\nd: {<<: *one}\ndatasets: []\ndatasets: []\n", "'datasets' stands twic"),
    ],
)
def test_a_key_that_stands_twice_in_a_config(tmp_path, text, fault):
    """YAML takes the last one: the first `datasets:`, with the forget rows, was not read."""
    path = tmp_path / "a.yml"
    path.write_text(text)
    with pytest.raises(UnlearnError, match=fault) if fault else nullcontext():
        assert read_config(path)["d"] == {"lr": 2, "s": 3}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_target_modules": ["q_proj", "embed_tokens"]}, "`lora_target_modules` has embed"),
        ({"lora_target_modules": r".*\.(q_proj|lm_head)"}, "`lora_target_modules` has"),
        (
            {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
            "set `peft_ensure_weight_tying`",
        ),
        ({"lora_modules_to_save": ["lm_head"], "peft_ensure_weight_tying": True}, None),
        (
            {"lora_target_modules": ["lm_head"], "peft_ensure_weight_tying": True},
            "merged; remove",
        ),
        ({"lora_target_modules": ["lm_head"], "adapter": None}, None),
        ({"lora_target_linear": True}, None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_not_adapted(settings, says, nested, tied, tmp_path):
    """As trained, evaluated and merged in two ways they were up to four models."""
    config = {"tie_word_embeddings": tied}
    model_folder(tmp_path, **({"text_config": config} if nested else config))
    cfg = plain(base_model=str(tmp_path))
    found = config_faults(cfg | LORA | settings)
    assert len(found) == (tied and says is not None), found
    assert not found or re.search(says, found[0])


def test_a_teacher_of_another_vocabulary_is_found_by_check(tmp_path):
    """Training alone refused it."""
    from data_tokenizers import byte_tokenizer, word_tokenizer

    from axolotl_unlearn.checks.estimate import teacher_faults

    word_tokenizer(["other words"]).save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher/config.json").write_text('{"model_type": "llama"}')
    reference = {"model": str(tmp_path / "teacher")}
    cfg = {"unlearn": {"forget": {"objective": "npo"}, "reference": reference}}
    (fault,) = teacher_faults(cfg, byte_tokenizer())
    assert "another tokenizer than base_model" in fault


def test_the_block_stays_a_dict_of_axolotl():
    """Else its own `validate_config` ends in "cannot be converted to 'SchemaSerializer'"."""
    from axolotl.utils.dict import DictDefault

    block = {"forget": [{"objective": "npo"}], "data": {"join": ""}}
    cfg = DictDefault({"plugins": [PLUGIN], "unlearn": block})
    cfg.datasets = [{"path": "someone/rows", "type": "axolotl_unlearn.data.forget"}]
    config_checks.prepare(cfg)
    assert type(cfg.to_dict()["unlearn"]["data"]) is dict


def test_a_fault_of_the_block_is_the_only_one(entry):
    """How rows are read stands in the block: without it they looked faulty too."""
    row = {"q": "Who?", "a": "Ada", "id": "x"}
    block = {"forget": {"objective": "npo"}, "data": {"fields": {"input": "q", "output": "a"}}}
    cfg = {"plugins": [PLUGIN], "datasets": [entry([row])], "unlearn": block}
    assert config_checks.faults(cfg) == []
    wrong = cfg | {"unlearn": block | {"forget": {"objective": "nopo"}}}
    assert len(config_checks.faults(wrong)) == 1


def test_memory_is_of_the_rows_that_there_are(tmp_path):
    """ "at least 805.5 MB" for rows of 261 tokens: logits of a whole chunk were counted."""
    import torch
    from safetensors.torch import save_file

    from axolotl_unlearn.checks.estimate import largest_batches, memory

    save_file({"embed_tokens.weight": torch.zeros(100, 8)}, tmp_path / "model.safetensors")
    args = parse_unlearn({"forget": {"objective": "npo"}, "retain": {"objective": "nll"}})
    cfg = {"base_model": str(tmp_path), "micro_batch_size": 2}
    assert memory(cfg, args, 50)["logits"] == pytest.approx(3.8 * 100 * 100 * 4)
    assert memory(cfg, args, 10**9)["logits"] == pytest.approx(3.8 * args.chunk_mib * 2**20)
    seen = set()
    for length in (10**5, 10**6, 10**7, 10**8):
        for gpu, batch in largest_batches(cfg, args, length).items():
            both = ({**cfg, "micro_batch_size": n} for n in (batch, 2 * batch or 1))
            of = [memory(one, args, length) for one in both]
            fits = [one["at_least"] + one["activations"] <= 0.9e9 * int(gpu[:2]) for one in of]
            assert (fits[0] or not batch) and (not fits[1] or batch == 16)
            seen.add(batch)
    assert {0, 16} < seen


def test_the_vocabulary_is_that_of_the_embeddings():
    """An MLP may have more rows: nine times the logits were counted. GPT-2 has names of its own."""
    from axolotl_unlearn.checks.estimate import memory

    args = parse_unlearn({"forget": {"objective": "npo"}})
    layer = {f"layers.{n}.mlp.up_proj.weight": [9000, 64] for n in range(2)}
    for name in ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight"):
        found, narrow = (
            memory({"load_in_4bit": True, "bf16": True}, args, 100, {name: [1000, 64]} | more)
            for more in (layer, {})
        )
        assert found["logits"] == narrow["logits"] > 0
        assert narrow["weights"] == 1000 * 64 * 4 and found["weights"] == 1000 * 64 * 4 + 9000 * 64


def test_phases_are_told(tmp_path):
    entries = [
        {"path": f"someone/{side}", "type": f"axolotl_unlearn.data.{side}"} for side in SIDES
    ]
    file = tmp_path / "my.yml"
    cfg = {"plugins": [PLUGIN], "unlearn": {"preset": "ails-ntua-agad"}, "datasets": entries}
    cfg["base_model"] = model_folder(tmp_path)
    file.write_text(yaml.safe_dump(cfg))
    found, lines, _ = check(file)
    assert found == []
    assert "phase 2, epochs=3.0, learning_rate=5e-05, fresh_optimizer=True:" in lines


def test_keys_that_are_nobodys_are_named(tmp_path):
    entry = {"path": "someone/rows", "type": "axolotl_unlearn.data.forget"}
    block = {"forget": {"objective": "npo"}}
    plugins = [PLUGIN, "axolotl.integrations.lm_eval.LMEvalPlugin"]
    cfg = {"plugins": plugins, "unlearn": block, "datasets": [entry], "model_type": "AutoModel"}
    cfg["base_model"] = model_folder(tmp_path)
    file = tmp_path / "my.yml"
    file.write_text(yaml.safe_dump(cfg | {"x-datasets": {"a": 1}, "lm_eval_batch_size": 8, 5: 1}))
    found, lines, _ = check(file)
    assert found == [] and lines[-1].endswith("at most: `x-datasets`, `lm_eval_batch_size`, `5`")
    file.write_text(yaml.safe_dump(cfg))
    assert "no option" not in check(file)[1][-1]


def test_test_datasets_need_the_same_sides(entry, both):
    """Forget rows alone were called ready, and failed after the model had been loaded."""
    (fault,) = check_files(both() | {"test_datasets": [entry([FORGET])]})
    assert "`test_datasets` has no entry with `type: axolotl_unlearn.data.retain`" in fault
    mixed = [*both()["datasets"], entry([FORGET], "memorise")]
    (fault,) = check_files(both() | {"test_datasets": mixed})
    assert "`test_datasets` mixes" in fault


def test_checking_loads_neither_axolotl_nor_torch(entry, tmp_path):
    """`axolotl-unlearn check`, whole: objectives and their parameters are judged without torch,
    as with it, and can be computed afterwards."""
    cfg = {
        "base_model": model_folder(tmp_path),
        "plugins": [PLUGIN],
        "unlearn": BLOCK | {"forget": {"objective": "npo", "reduction": "batch_token_mean"}},
        "datasets": [entry([FORGET]), entry([RETAIN], "retain")],
    }
    good, bad = tmp_path / "good.yml", tmp_path / "bad.yml"
    good.write_text(json.dumps(cfg))
    bad.write_text(
        json.dumps(cfg | {"unlearn": BLOCK | {"forget": {"objective": "npo", "beta": 0}}})
    )
    code = f"""
import sys
from axolotl_unlearn.cli import unlearn
for arguments in (["--help"], ["methods"], ["check", {str(good)!r}], ["check", {str(bad)!r}]):
    try:
        unlearn(arguments)
    except SystemExit as end:
        print("code", end.code)
print("loaded", [m for m in ("axolotl", "transformers", "datasets", "torch") if m in sys.modules])
import torch
from axolotl_unlearn.objectives import OBJECTIVES, LabelScores
scores = LabelScores(torch.zeros(1, 2), torch.ones(1, 2).bool(), torch.zeros(1, 2))
print("npo", OBJECTIVES["npo"].function(scores).values.item())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line for line in lines if line.startswith("code")] == ["code 0"] * 3 + ["code 2"]
    assert "mean over batches, reduction=batch_token_mean, for 1 rows" in run.stdout
    assert "beta: Input should be greater than 0" in run.stderr
    assert "loaded []" in lines
    assert lines[-1].startswith("npo 13.86")  # 2 / .1 * ln 2
