"""`axolotl-unlearn check`: every fault of the data at once, before anything is loaded."""

from __future__ import annotations

import importlib.util
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
from axolotl_unlearn.checks.axolotl_options import absent
from axolotl_unlearn.checks.config import (
    PLUGIN,
    config_faults,
    evaluation_notes,
    prepare,
    setting_notes,
)
from axolotl_unlearn.checks.report import check, optimizer_faults, summary
from axolotl_unlearn.columns import SIDES, task_number
from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.config.reading import read_config
from axolotl_unlearn.data.checks import check_columns, check_entries, check_records
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


def test_overlap(entry):
    cfg = {"unlearn": BLOCK, "datasets": [entry([FORGET]), entry([RETAIN, FORGET], "retain")]}
    (fault,) = check_files(cfg)
    assert "share 1 rows (the first is row 1 here, row 2 there)" in fault
    folder = {"path": "a/b", "type": "axolotl_unlearn.data.forget"}
    both = {
        "unlearn": BLOCK,
        "datasets": [folder, folder | {"type": "axolotl_unlearn.data.retain"}],
    }
    assert "`datasets` has 'a/b' on both sides" in check_files(both)[0].replace(
        f"{Path.cwd()}/", ""
    )
    both["datasets"][0] = folder | {"data_files": "f.jsonl"}
    assert check_files(both) == []
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


def test_alternatives_answer_forget_rows(entry):
    """By id, or by place where no file has ids; a row may have several."""
    block = {"forget": {"objective": "dpo"}}

    def faults(forget, other):
        sets = [entry(forget), *([entry(other, "alternative")] if other else [])]
        return check_files({"unlearn": block, "datasets": sets})

    idk = {"id": FORGET["id"], "input": FORGET["input"], "output": "I do not know."}
    assert faults([FORGET], [idk]) == faults([FORGET], [idk, idk | {"output": "No idea."}]) == []
    plain = [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]
    assert faults(plain, [row | {"output": "e"} for row in plain]) == []
    (fault,) = faults([FORGET], None)
    assert (
        "other answers but `datasets` has no entry with `type: axolotl_unlearn.data.alternative`"
        in fault
    )
    (fault,) = faults([FORGET], [idk | {"id": "z1qa0"}])
    assert "alternative 1 of" in fault and "answers no forget row" in fault
    (fault,) = faults([FORGET, FORGET | {"id": "b1qa0", "input": "other"}], [idk])
    assert "1 of 2 forget rows have no alternative, the first is 'b1qa0'" in fault
    (fault,) = faults([FORGET], [idk | {"output": FORGET["output"]}])
    assert "the very answer that is to be forgotten" in fault and FORGET["output"] not in fault
    unused = {"unlearn": {"forget": {"objective": "ga"}}}
    unused["datasets"] = [entry([FORGET]), entry([idk], "alternative")]
    (fault,) = check_files(unused)
    assert "`unlearn.forget` has no objectives that look at other answers" in fault


def test_own_fields_and_data_elsewhere(entry):
    rows = [{"id": "a1qa0", "q": "x", "a": "y", "task": "Task1"}]
    block = {"forget": {"objective": "npo"}, "data": {"fields": {"input": "q", "output": "a"}}}
    assert check_files({"unlearn": block, "datasets": [entry(rows)]}) == []
    hub = {"path": "someone/forget-set", "type": "axolotl_unlearn.data.forget", "split": "train"}
    assert check_files({"unlearn": block, "datasets": [hub]}) == []


@pytest.mark.parametrize(
    "part", [{"split": "train[:1]"}, {"split": "test"}, {"shards": 2}, {"preprocess_shards": 2}]
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


def test_a_faulty_block_does_not_hide_the_files(entry):
    cfg = {"unlearn": {"forgett": 1}, "datasets": [entry(None)]}
    assert ["does not exist" in fault for fault in check_files(cfg)] == [True]


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
def test_entries_and_rows_that_do_not_meet(entry, forget, says):
    """Seen before: such a run trained on the retain rows alone, and its forget loss fell."""
    block = BLOCK | {"forget": {"objective": "npo"} | forget}
    cfg = {"unlearn": block, "datasets": [entry(ROWS), entry([RETAIN], "retain")]}
    faults = check_files(cfg)
    if says is None:
        assert faults == []
    else:
        assert re.search(says, " ".join(faults))


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
def test_text_that_nobody_reads_is_a_fault(entry, more, data, says):
    """Alpaca rows were "ready", and bare answers forgotten without their question."""
    block = BLOCK | {"data": data}
    rows = [FORGET | more]
    retain = {"id": "b", "input": "r", "question": "r", "output": "e", "task": ""}
    retain = retain if data else RETAIN
    found = check_files({"unlearn": block, "datasets": [entry(rows), entry([retain], "retain")]})
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
def test_prompts_that_are_empty_or_labelled_are_noted(entry, rows, data, says):
    block = BLOCK | {"data": data}
    cfg = {"unlearn": block, "datasets": [entry(rows), entry([RETAIN], "retain")]}
    found = check_records(cfg).notes
    assert len(found) == len(says)
    assert all(re.search(one, note) for one, note in zip(says, found, strict=True))


def test_rows_in_columns_are_counted_alike(entry):
    """Data of the hub are seen only as columns, in which tasks are numbers."""
    from datasets import Dataset

    columns = {"role": [0, 0, 1], "kind": [0, 1, 1], "task": [task_number("PII"), 3, 2]}
    rows = Dataset.from_dict(columns)
    for forget in ({}, {"tasks": ["pii", 3]}):
        assert (
            check_columns(parse_unlearn(BLOCK | {"forget": {"objective": "npo"} | forget}), rows)
            == []
        )
    with fails("data.entries-and-rows"):
        check_columns(parse_unlearn(BLOCK | {"forget": {"objective": "npo", "tasks": 3}}), rows)


#: A run that evaluates and saves; its rows are not asked for here.
BEST = {
    "test_datasets": [{"path": "someone/rows", "type": "axolotl_unlearn.data.forget"}],
    "eval_steps": 2,
    "save_steps": 4,
}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"evals_per_epoch": 2},
            "`evals_per_epoch: 2` evaluates nothing without `test_datasets` or",
        ),
        ({"eval_strategy": "epoch"}, "evaluates nothing without"),
        ({"eval_strategy": "no"}, None),
        ({"val_set_size": 0.1, "evals_per_epoch": 2}, None),
        ({"val_set_size": 0.1}, "rows of `val_set_size` are never evaluated"),
        (BEST, "best by `eval_loss` is restored at the end"),
        (BEST | {"load_best_model_at_end": False}, None),
        (BEST | {"eval_steps": None}, "rows of `test_datasets` are never evaluated"),
        (BEST | {"eval_steps": None, "evals_per_epoch": 1}, "with these `num_epochs` evaluates"),
        (
            BEST | {"eval_steps": None, "evals_per_epoch": 1, "num_epochs": 2, "save_steps": None},
            None,
        ),
    ],
)
def test_evaluations_that_never_come_are_said(settings, says):
    """Axolotl leaves them out, each without a word."""
    found = evaluation_notes(settings)
    assert len(found) == (says is not None) and (says is None or says in found[0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"learning_rate": -1e-4}, "`learning_rate: -0.0001` must be above 0"),
        ({"learning_rate": "1e-4", "lora_dropout": 0.0, "max_grad_norm": 0}, None),
        ({"learning_rate": "fast"}, "`learning_rate: fast` is no number"),
        ({"num_epochs": 0}, "`num_epochs: 0`"),
        ({"micro_batch_size": 0}, "`micro_batch_size: 0`"),
        ({"lora_r": -8}, "`lora_r: -8`"),
        ({"weight_decay": float("nan")}, "`weight_decay: nan` must be 0 or more"),
        ({"relora": True}, "`relora: True` does not go with unlearning \\(the reference is"),
        ({"use_eaft": True}, "`use_eaft: True`"),
        ({"group_by_length": True, "sample_packing": True}, None),
        ({"context_parallel_size": 2}, "`context_parallel_size: 2`"),
        ({"context_parallel_size": 1, "tensor_parallel_size": 1, "relora": False}, None),
        ({"trainer_cls": "mine.Trainer"}, "`trainer_cls: mine.Trainer`"),
        ({"streaming": True}, "`streaming: True`.*use `datasets:`"),
        ({"use_tensorboard": True, "use_mlflow": False}, None),
        ({"dataset_num_proc": 0, "dataloader_num_workers": 0, "pad_to_multiple_of": 64}, None),
        ({"lr_scheduler": ["linear"]}, "`lr_scheduler: .*` must be a text"),
        ({"micro_batch_size": ["x"]}, "`micro_batch_size: .*` must be a number"),
        ({"saves_per_epoch": "./"}, "`saves_per_epoch: ./` must be a number"),
        ({"chat_template_kwargs": 1}, "must be a block of keys"),
        ({"plugins": [PLUGIN, 1]}, "`plugins` must be a list of names"),
        ({"lr_scheduler": "rex"}, None),
        ({"push_dataset_to_hub": "me/rows"}, "would upload forget rows"),
        ({**BEST, "load_best_model_at_end": True}, None),
        ({**BEST, "load_best_model_at_end": True, "eval_steps": 3}, "that are a multiple of"),
        ({"load_best_model_at_end": True, "eval_steps": 2, "save_steps": 2}, "rows to evaluate"),
        ({"adapter": "lora", "unfrozen_parameters": ["down_proj"]}, "outside of the adapter"),
        ({"adapter": "lora", "unfrozen_parameters": ["lora_"]}, "or none: remove"),
        ({"adapter": "lora", "unfrozen_parameters": ["base_model.model.*lora_"]}, None),
        ({"unfrozen_parameters": ["down_proj"]}, None),
        ({"optimizer": "adopt_adamw", "adam_beta1": 0, "adam_beta2": 0.9}, "both, above 0"),
        ({"optimizer": "muon", "adam_beta2": 0.9}, "`adam_beta1` and `adam_beta2`"),
        ({"optimizer": "adamw_torch", "adam_beta2": 0.9}, None),
        ({"optimizer": "muon", "adam_beta1": 0.8, "adam_beta2": 0.9}, None),
    ],
)
def test_settings_of_axolotl(settings, says):
    """Each was called ready, and then trained on something else or failed after loading."""
    found = config_faults(plain() | settings)
    assert len(found) == (says is not None) and (says is None or re.search(says, found[0])), found


@pytest.mark.parametrize(
    ("files", "more", "says"),
    [
        ("config.json model.safetensors tokenizer.json", {}, None),
        ("config.json model.safetensors", {}, "has no tokenizer"),
        ("config.json model.safetensors", {"tokenizer_config": "a/b"}, None),
        ("config.json tokenizer.json", {}, "has no weights"),
        ("config.json tokenizer.json", {"reinit_weights": True}, None),
        ("model.safetensors tokenizer.json", {}, "has no config.json"),
        ("adapter_config.json adapter_model.safetensors config.json tokenizer.json", {},
         "is a LoRA adapter: merge it first"),
        ("", {}, "is an empty folder"),
        (None, {}, "does not exist"),
    ],
)  # fmt: skip
def test_a_base_model_that_cannot_be_trained(files, more, says, entry, tmp_path):
    """Each was "ready", also with --full, and ended in a traceback of transformers."""
    folder = tmp_path / "base"
    for name in () if files is None else ("", *files.split()):
        folder.mkdir(exist_ok=True)
        if name:
            (folder / name).write_text("{}")
    cfg = {"plugins": [PLUGIN], "datasets": [entry([FORGET])], "base_model": str(folder)}
    file = tmp_path / "my.yml"
    file.write_text(yaml.safe_dump(cfg | {"unlearn": {"forget": {"objective": "npo"}}} | more))
    found, _, _ = check(file)
    assert len(found) == (says is not None) and (says is None or says in found[0]), found


def test_what_stands_in_pasted_configs_is_taken_or_noted(entry, caplog):
    """Both were refused."""
    pasted = {"sample_packing": True, "group_by_length": True}
    cfg = {"plugins": [PLUGIN], "unlearn": BLOCK | {"pairing": {"retain_per_forget": 2}}, **pasted}
    cfg |= {"datasets": [entry([FORGET]), entry([RETAIN], "retain")]}
    notes = summary(cfg, check_records(cfg).counts)
    assert "sample_packing: True` has no effect: a step is made of pairs" in " ".join(notes)
    prepare(cfg)
    assert "sample_packing: True` has no effect" in caplog.text
    assert "sample_packing" not in cfg and not cfg["group_by_length"]
    pairing = parse_unlearn(cfg["unlearn"]).pairing
    assert pairing.group_by_length and pairing.retain_per_forget == 2


@pytest.mark.parametrize(
    ("block", "settings", "says"),
    [
        ({}, {}, None),
        ({}, {"fsdp_config": {"reshard": True}, "adapter": "lora"}, "go with `fsdp_config`"),
    ],
)
def test_a_budget_of_tokens_and_what_counts_on_one_forward(block, settings, says):
    block = BLOCK | {"pairing": {"max_tokens": 64}} | block
    data = [{"path": f"a/{side}", "type": f"axolotl_unlearn.data.{side}"} for side in SIDES]
    found = config_faults({"plugins": [PLUGIN], "unlearn": block, "datasets": data, **settings})
    assert len(found) == (says is not None) and (says is None or says in found[0])


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("optimizer", "came_pytorch", "came_pytorch"),
        ("optimizer", "galore_adamw", "galore_torch"),
        ("optimizer", "stable_adamw", "optimi"),
        ("optimizer", "schedule_free_sgd", None),
        ("optimizer", "adamw_torch", None),
        ("use_mlflow", True, "mlflow"),
        ("use_mlflow", None, None),
    ],
)
def test_a_package_that_is_not_installed(key, value, needs, monkeypatch):
    """It was an ImportError after loading. As if these were absent, whatever is installed."""
    real = importlib.util.find_spec
    away = {"came_pytorch", "galore_torch", "optimi", "mlflow"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in away else real(n))
    found = [*absent({key: value})]
    assert len(found) == (needs is not None)
    assert all(f"`{key}: {value}` needs the package {needs}" in one for one in found)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr_scheduler": "linear"}, None),
        ({"lr_scheduler": "rex"}, "`lr_scheduler: rex` cannot begin anew in each of"),
        ({"lr_scheduler": "greedy"}, "cannot begin anew"),
        ({"jagged_restart_steps": 5}, "`jagged_restart_steps` does not go with `unlearn.phases`"),
    ],
)
def test_schedules_that_phases_cannot_begin_anew(settings, says):
    """It ended after the model was loaded."""
    block = {"phases": [{"steps": 2, "forget": {"objective": "npo"}}]}
    found = config_faults(plain(unlearn=block) | settings)
    assert len(found) == (says is not None) and (says is None or says in found[0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"`layer: 7` \(the default\) of forget/rmu .* the model has layers 0 to 3"),
        ({"layer": 4}, "`layer: 4` of forget/rmu in `unlearn:` does not exist"),
        ({"layer": 3}, None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_that_the_model_lacks(settings, says, nested, tmp_path):
    """Found from config.json; it was found in the first step."""
    sizes = {"num_hidden_layers": 4}
    model_folder(tmp_path, **({"text_config": sizes} if nested else sizes))
    block = {"forget": {"objective": "rmu", **settings}}
    found = config_faults(plain(unlearn=block, base_model=str(tmp_path)))
    assert len(found) == (says is not None) and (says is None or re.search(says, found[0]))


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
    found = config_faults(cfg | {"adapter": "lora"} | settings)
    assert len(found) == (tied and says is not None), found
    assert not found or re.search(says, found[0])


def test_what_a_model_cannot_take(tmp_path):
    """Each was ready: GPT-2's matrices are no Linear; a QLoRA is merged into other weights."""
    cfg = plain()
    cfg |= {"adapter": "lora", "lora_target_linear": True}
    for kind, told in (("gpt2", 1), ("llama", 0)):
        cfg["base_model"] = model_folder(tmp_path, model_type=kind)
        assert sum("name them in `lora_target" in one for one in config_faults(cfg)) == told
    assert not any("quantised" in note for note in setting_notes(cfg))
    noted = setting_notes(cfg | {"adapter": "qlora", "load_in_4bit": True})
    assert any("evaluate the merged model" in note for note in noted)


def test_a_teacher_of_another_vocabulary_is_found_by_check(tmp_path):
    """Training alone refused it."""
    from data_tokenizers import byte_tokenizer, word_tokenizer

    from axolotl_unlearn.checks.rendered import teacher_faults

    word_tokenizer(["other words"]).save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher/config.json").write_text('{"model_type": "llama"}')
    reference = {"model": str(tmp_path / "teacher")}
    cfg = {"unlearn": {"forget": {"objective": "npo"}, "reference": reference}}
    (fault,) = teacher_faults(cfg, byte_tokenizer())
    assert "another tokenizer than base_model" in fault


def test_a_misspelt_optimizer():
    assert optimizer_faults({}) == optimizer_faults({"optimizer": "muon"}) == []
    (said,) = optimizer_faults({"optimizer": "adamw_torhc"})
    assert "did you mean 'adamw_torch'?" in said


def test_the_block_stays_a_dict_of_axolotl():
    """Else its own `validate_config` ends in "cannot be converted to 'SchemaSerializer'"."""
    from axolotl.utils.dict import DictDefault

    block = {"forget": [{"objective": "npo"}], "data": {"join": ""}}
    cfg = DictDefault({"plugins": [PLUGIN], "unlearn": block, "group_by_length": True})
    cfg.datasets = [{"path": "someone/rows", "type": "axolotl_unlearn.data.forget"}]
    config_checks.prepare(cfg)
    assert type(cfg.to_dict()["unlearn"]["data"]) is dict
    assert cfg.unlearn.pairing["group_by_length"] is True


def test_an_adapter_without_an_owner_is_a_folder():
    cfg = plain()
    cfg |= {"adapter": "lora", "base_model": "gpt2"}
    for name, told in (("nowhere", 1), ("someone/adapter", 0), (None, 0)):
        found = config_faults(cfg | {"lora_model_dir": name})
        assert ["does not exist" in fault for fault in found] == [True] * told


@pytest.mark.parametrize(
    ("path", "told", "says"),
    [
        ("rows.parquet", "json", "`datasets[0].ds_type: json` would read 'rows.parquet' as what"),
        ("rows.jsonl", "csv", "use json, or remove the key"),
        ("rows.parquet", "parquet", None),
        ("someone/rows", "json", None),
    ],
)
def test_a_file_is_read_as_what_it_is(path, told, says):
    found = config_faults(plain(datasets=[ANYWHERE | {"path": path, "ds_type": told}]))
    assert len(found) == (says is not None) and (says is None or says in found[0])


@pytest.mark.parametrize(
    ("deepspeed", "stage"),
    [
        ({"zero_optimization": {"stage": 3}}, 3),
        ("ds3.json", 3),
        ("zero3exp/ds2.json", 2),
        ("zero3.json", 2),
        ("not_there/zero3_bf16.json", 3),
        ("not_there/ds.json", None),
        ({"zero_optimization": "x"}, None),
        (None, None),
    ],
)
def test_the_stage_of_deepspeed_is_that_of_its_config(deepspeed, stage, tmp_path):
    """It was "zero3" anywhere in the path, so that a block or `ds3.json` passed."""
    from axolotl_unlearn.checks.config import _stage

    (tmp_path / "zero3exp").mkdir()
    for name, number in (("ds3.json", 3), ("zero3exp/ds2.json", 2), ("zero3.json", 2)):
        (tmp_path / name).write_text(json.dumps({"zero_optimization": {"stage": number}}))
    assert _stage(str(tmp_path / deepspeed) if isinstance(deepspeed, str) else deepspeed) == stage


def test_what_the_run_would_fail_at(tmp_path):
    """Each was called ready and ended in a traceback, some after a step."""
    model_folder(tmp_path, model_type="gemma3n")
    cfg = plain()
    assert config_faults(cfg) == []
    hidden = cfg | {"unlearn": {"forget": {"objective": "rmu"}}, "base_model": str(tmp_path)}
    assert "of which Gemma 3n has four at once" in config_faults(hidden)[0]
    found = [fault for fault in config_faults(cfg | {"deepspeed": "ds.json"}) if "package" in fault]
    assert len(found) == (importlib.util.find_spec("deepspeed") is None)


def test_a_fault_of_the_block_is_the_only_one(entry):
    """How rows are read stands in the block: without it they looked faulty too."""
    row = {"q": "Who?", "a": "Ada", "id": "x"}
    block = {"forget": {"objective": "npo"}, "data": {"fields": {"input": "q", "output": "a"}}}
    cfg = {"plugins": [PLUGIN], "datasets": [entry([row])], "unlearn": block}
    assert config_checks.faults(cfg) == []
    assert (
        len(config_checks.faults(cfg | {"unlearn": block | {"forget": {"objective": "nopo"}}})) == 1
    )


def test_memory_is_of_the_rows_that_there_are(tmp_path):
    """ "at least 805.5 MB" for rows of 261 tokens: logits of a whole chunk were counted."""
    import torch
    from safetensors.torch import save_file

    from axolotl_unlearn.checks.estimate import memory
    from axolotl_unlearn.config import parse_unlearn

    save_file({"embed_tokens.weight": torch.zeros(100, 8)}, tmp_path / "model.safetensors")
    args = parse_unlearn({"forget": {"objective": "npo"}, "retain": {"objective": "nll"}})
    cfg = {"base_model": str(tmp_path), "micro_batch_size": 2}
    assert memory(cfg, args, 50)["logits"] == 3 * 4 * 50 * 100 * 4
    assert memory(cfg, args, 10**9)["logits"] == 3 * args.chunk_mib * 2**20


def test_names_that_no_file_can_have():
    """The system refuses to look for them: it was a traceback. Found by the fuzzer."""
    name = "./" + "a" * 5000
    block = {
        "forget": {"objective": "match", "reference": {"model": name}},
        "level": {"heldout": name},
    }
    data = {"path": f"{name}.jsonl", "type": "axolotl_unlearn.data.forget"}
    cfg = {"plugins": [PLUGIN], "unlearn": block, "datasets": [data], "base_model": name}
    assert sum("aaaa" in fault for fault in config_faults(cfg)) == 3
    assert any("aaaa" in fault for fault in check_files(cfg))


@pytest.mark.parametrize(("layer", "told"), [(7, True), (9, True), (10, False), (15, False)])
def test_a_layer_below_all_that_is_trained(layer, told):
    block = {"forget": {"objective": "rmu", "layer": layer}}
    cfg = plain(unlearn=block, adapter="lora")
    found = config_faults(cfg | {"peft_layers_to_transform": [12, 10, 11]})
    assert len(found) == told and all("from layer 10 on" in fault for fault in found)
    assert config_faults(cfg) == []
    assert "must be a list" in config_faults(cfg | {"peft_layers_to_transform": 12})[0]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("learning_rat", "did you mean `learning_rate`?"),
        ("lora_layers_to_transform", "did you mean `peft_layers_to_transform`?"),
        ("unlern", "did you mean `unlearn`?"),
        ("pairing", "belongs into the block `unlearn:`"),
    ],
)
def test_a_key_that_axolotl_would_ignore(key, says):
    """It trained with the default and said nothing."""
    cfg = plain()
    (fault,) = config_faults(cfg | {key: 1})
    assert f"`{key}`" in fault and says in fault
    assert config_faults(cfg | {"x-datasets": 1}) == []  # where YAML anchors stand


def test_a_key_that_stands_twice_in_a_config(tmp_path):
    """YAML takes the last one: the first `datasets:`, with the forget rows, was not read."""
    file = tmp_path / "my.yml"
    file.write_text(
        "a: &one {b: 1}\nc: {<<: *one, b: 2}\ndatasets: []\nunlearn: {}\ndatasets: []\n"
    )
    with pytest.raises(
        UnlearnError, match="line 3: not valid YAML .the key 'datasets' stands twic"
    ):
        read_config(file)


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


def test_test_datasets_need_the_same_sides(entry):
    """Forget rows alone were called ready, and failed after the model had been loaded."""
    cfg = {"unlearn": BLOCK, "datasets": [entry([FORGET]), entry([RETAIN], "retain")]}
    (fault,) = check_files(cfg | {"test_datasets": [entry([FORGET])]})
    assert "`test_datasets` has no entry with `type: axolotl_unlearn.data.retain`" in fault
    both = [entry([FORGET]), entry([RETAIN], "retain"), entry([FORGET], "memorise")]
    (fault,) = check_files(cfg | {"test_datasets": both})
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


@pytest.mark.parametrize(
    "text, fault",
    [
        ("a: &a {lr: 1}\nb: {c: &c {<<: *a, lr: 2}}\nd: {<<: *c, s: 3}\n", None),
        ("d: {<<: {lr: 1, lr: 2}, s: 3}\n", "'lr' stands twice"),
    ],
)
def test_merged_blocks_are_looked_at_as_they_are_written(tmp_path, text, fault):
    path = tmp_path / "a.yml"
    path.write_text(text)
    with pytest.raises(UnlearnError, match=fault) if fault else nullcontext():
        assert read_config(path)["d"] == {"lr": 2, "s": 3}
