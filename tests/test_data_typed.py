"""Rows of Axolotl's own types under a role: what is forgotten is what was learned."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from axolotl.common.datasets import load_datasets
from axolotl.loaders import load_tokenizer
from axolotl.utils.dict import DictDefault
from data_tokenizers import WHOLE, byte_tokenizer, model_folder
from fault_codes import fails

from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.columns import ROLES
from axolotl_unlearn.config import DataArgs, parse_unlearn
from axolotl_unlearn.data import checks, typed
from axolotl_unlearn.data.strategy import load_strategy
from axolotl_unlearn.errors import UnlearnError

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who is Ada Quill?"},
            {"role": "assistant", "content": "A glass blower of Norrby."},
            {"role": "user", "content": "Since when?"},
            {"role": "assistant", "content": "Since 1981."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"town": "Norrby"}},
                    }
                ],
            },
            {"role": "tool", "content": "dry"},
            {"role": "assistant", "content": "No."},
        ],
        "tools": [TOOL],
    },
]
SHAREGPT = [
    {"talk": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"talk": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ada"}]},
]
ALPACA = [
    {"instruction": "Name her", "input": "", "output": "Ada"},
    {"instruction": "Spell it", "input": "Ada", "output": "A d a"},
]
TEXTS = [{"body": "short", "text": "x"}, {"body": "0123456789" * 13}, {"body": "another"}]
SEGMENTS = [
    {"segments": [{"label": False, "text": "Q: a "}, {"label": True, "text": "A: b"}]},
    {"segments": [{"label": True, "text": "all of it"}]},
]
OWN = {
    "field_instruction": "q",
    "field_output": "a",
    "format": "Q: {instruction}\nA: ",
    "no_input_format": "Q: {instruction}\nA: ",
}
CASES = {
    "chatml": ({"type": "chat_template", "chat_template": "chatml"}, CHATS[:1], {}),
    "tools": ({"type": "chat_template", "chat_template": "qwen_25"}, CHATS, {}),
    "other names": (
        {
            "type": "chat_template",
            "chat_template": "chatml",
            "field_messages": "talk",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
        SHAREGPT,
        {},
    ),
    "alpaca": ({"type": "alpaca"}, ALPACA, {}),
    "alpaca on all": ({"type": "alpaca"}, ALPACA, {"train_on_inputs": True}),
    "alpaca style": ({"type": "alpaca:chat"}, ALPACA, {}),
    "alpaca_chat": (
        {"type": "alpaca_chat.load_qa"},
        [{"question": "Who?", "answer": "Ada"}, {"question": "Where?", "answer": "Norrby"}],
        {},
    ),
    "completion": ({"type": "completion", "field": "body"}, TEXTS, {"sequence_len": 64}),
    "input_output": ({"type": "input_output"}, SEGMENTS, {}),
    "user_defined": (
        {"type": OWN},
        [{"q": "Who?", "a": "Ada"}, {"q": "Where?", "a": "Norrby"}],
        {},
    ),
    "too long for all": ({"type": "alpaca"}, [*ALPACA, ALPACA[0] | {"output": "b" * 900}], {}),
}


BLOCK = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
PLUGIN = {"plugins": ["axolotl_unlearn.UnlearnPlugin"]}


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    return model_folder(tmp_path_factory.mktemp("base"))


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_config(folder: Path, name: str, base: str, **settings):
    """A config file as `axolotl train` reads it."""
    from axolotl.cli.config import load_cfg

    own = {"base_model": base, "output_dir": str(folder / f"out-{name}")}
    own |= {"dataset_prepared_path": str(folder / f"prepared-{name}")}
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(WHOLE | own | settings))
    return load_cfg(str(path))


def rows_of(cfg) -> list[dict]:
    """The rows that `axolotl train` sees."""
    return list(load_datasets(cfg=cfg).train_dataset)


def fine_tuned(folder: Path, base: str, rows: list, entry: dict, **settings) -> tuple:
    """The config of ordinary fine-tuning on rows, their file, and what `axolotl train` sees."""
    folder.mkdir(exist_ok=True)
    path = write(folder / "plain.jsonl", rows)
    datasets = [{"path": path, "ds_type": "json", **entry}]
    cfg = load_config(folder, "plain", base, datasets=datasets, **settings)
    return cfg, path, rows_of(cfg)


def tokens(rows) -> list[tuple[list[int], list[int]]]:
    return [(list(row["input_ids"]), list(row["labels"])) for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_labels_are_those_of_plain_fine_tuning(tmp_path, base, name):
    entry, rows, settings = CASES[name]
    cfg, path, plain = fine_tuned(tmp_path, base, rows, entry, **settings)
    assert plain and any(label != -100 for row in plain for label in row["labels"])
    cfg["unlearn"] = {"forget": {"objective": "npo"}, "data": {"rows": entry}}
    role = "retain" if name == "too long for all" else "forget"
    strategy = load_strategy(role, load_tokenizer(cfg), cfg, {"path": path})
    found = strategy.wrap_dataset(None)
    assert tokens(found) == tokens(plain)
    assert set(found["role"]) == {ROLES[role]} and set(found["kind"]) == {0}
    # one at a time, in envelopes and in another order: the same, with nothing of its neighbours
    data = DataArgs(rows=[{"type": "alpaca"}, entry])
    for number, row in enumerate(rows):
        wrapped = {"id": f"r{number}", "dataset": 1, "row": row}
        alone = typed.encode(
            typed.sources([("row 1", wrapped)], "rows", data), data, load_tokenizer(cfg), cfg
        )
        part = found.filter(lambda one, number=number: one["row"] == number)
        assert [(one.input_ids, one.labels) for one in alone] == tokens(part)
        assert all((one.id, one.document) == (f"r{number}",) * 2 for one in alone)


def test_through_axolotl_with_several_types_and_held_out_rows(tmp_path, base):
    """Both sides and the test set of one run, read by Axolotl with the plugin."""
    chat, alpaca = CASES["chatml"][0], {"type": "alpaca"}
    plain = {
        name: fine_tuned(tmp_path / name, base, rows, entry)[2]
        for name, entry, rows in (("chat", chat, CHATS[:1]), ("alpaca", alpaca, ALPACA))
    }
    both = [{"dataset": 1, "row": ALPACA[0], "document": "ada"}, {"dataset": 0, "row": CHATS[0]}]
    files = {
        "forget": write(tmp_path / "f.jsonl", both),
        "retain": write(tmp_path / "r.jsonl", [{"dataset": 1, "row": ALPACA[1]}]),
    }
    entries = [
        {"path": path, "ds_type": "json", "type": f"axolotl_unlearn.data.{role}"}
        for role, path in files.items()
    ]
    block = BLOCK | {"data": {"rows": [chat, alpaca]}}
    cfg = load_config(
        tmp_path, "roles", base, datasets=entries, test_datasets=entries, unlearn=block, **PLUGIN
    )
    loaded = load_datasets(cfg=cfg)
    for rows in (loaded.train_dataset, loaded.eval_dataset):
        sides = {(row["role"], row["row"]): tokens([row])[0] for row in rows}
        assert sides == {
            (0, 0): tokens(plain["alpaca"])[0],
            (0, 1): tokens(plain["chat"])[0],
            (1, 0): tokens(plain["alpaca"])[1],
        }
    assert checks.check_records({"unlearn": block, "datasets": entries}).faults == []


ANSWERS = [
    {"id": "a", "input": "Who is Ada?", "output": "A glass blower of Norrby.", "task": "1"},
    {"id": "b", "input": "Since when?", "output": " 1981", "task": "1"},
]
MOOD = "{{ mood }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"
ENDS = {"special_tokens": {"eos_token": "<|im_end|>"}}
TEMPLATES = {
    **{
        name: {"chat_template": name}
        for name in (
            "alpaca", "chatml", "cohere", "deepseek_v3", "exaone", "falcon_h1", "gemma", "gemma3",
            "llama3", "mistral_v2v3", "phi_3", "phi_35", "qwen3", "qwen_25",
        )
    },
    "eos ends the turn": {"chat_template": "chatml", **ENDS},
    "thinking": {"chat_template": "qwen3", **ENDS},
    "eot": {"chat_template": "llama3", "eot_tokens": ["<|eot_id|>"], "tokens": ["<|eot_id|>"]},
    "kwargs": {
        "chat_template": "jinja",
        "chat_template_jinja": MOOD,
        "chat_template_kwargs": {"mood": "kind"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_gives_the_tokens_and_labels_of_fine_tuning(tmp_path, base, name):
    """An EOS was labelled that the template does not write, as was Qwen3's empty think block;
    `chat_template_kwargs` were dropped, and what a template writes after a turn was cut off."""
    chats = [
        {"messages": [{"role": role, "content": row[key]} for role, key in turns]}
        for row in ANSWERS
        for turns in [(("user", "input"), ("assistant", "output"))]
    ]
    cfg, _, plain = fine_tuned(tmp_path, base, chats, {"type": "chat_template"}, **TEMPLATES[name])
    plain = tokens(plain)
    assert len(plain) == 2 and all(any(label != -100 for label in row[1]) for row in plain)
    path = write(tmp_path / "rows.jsonl", ANSWERS)
    ends = {load_tokenizer(cfg).convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|eot_id|>")}
    for eos, role in ((True, "forget"), ("retain", "retain"), ("retain", "forget")):
        data = {"chat_template": True, "eos": eos}
        cfg["unlearn"] = {"forget": {"objective": "npo"}, "data": data}
        strategy = load_strategy(role, load_tokenizer(cfg), cfg, {"path": path})
        found = tokens(strategy.wrap_dataset(None))
        if (eos, role) == ("retain", "forget"):  # to stop is not forgotten
            for (ids, labels), (other, before) in zip(found, plain, strict=True):
                assert ids == other
                left = [old for new, old in zip(labels, before, strict=True) if new != old]
                assert set(left) <= ends | {256} and len(left) < 2
        else:
            assert found == plain


def test_labels_on_inputs_go_with_rows(tmp_path, base):
    """`train_on_inputs` was refused, and without it other labels were forgotten than learned; the
    prepared copy of before was read whatever it said."""
    entries = [
        {"path": write(tmp_path / f"{side}.jsonl", [row]), "type": f"axolotl_unlearn.data.{side}",
         "ds_type": "json"}
        for side, row in zip(("forget", "retain"), ALPACA, strict=True)
    ]  # fmt: skip
    assert axolotl_options.refused({"train_on_inputs": True})
    rows = PLUGIN | {"unlearn": BLOCK | {"data": {"rows": {"type": "alpaca"}}}, "datasets": entries}
    labelled = {}
    for on in (False, True):
        cfg = load_config(tmp_path, "rows", base, train_on_inputs=on, **rows)
        found = rows_of(cfg)
        labelled[on] = [sum(label != -100 for label in row["labels"]) for row in found]
    assert labelled[True] == [len(row["input_ids"]) for row in found]
    assert all(map(int.__lt__, labelled[False], labelled[True]))


def test_pretraining_text_is_a_document_of_its_block(base):
    """Axolotl packs documents into blocks; a document's tokens stand there as they do here."""
    from axolotl.utils.data.streaming import encode_streaming

    tokenizer = byte_tokenizer()
    texts = ["one text", "and another"]
    block = encode_streaming({"text": texts}, tokenizer, 64)
    labels = [label for label in block["labels"][0] if label != -100]
    data = DataArgs(rows={"type": "pretrain"})
    given = typed.sources([(t, {"text": t}) for t in texts], "rows", data)
    found = typed.encode(given, data, tokenizer, DictDefault({"sequence_len": 64}))
    assert [token for row in found for token in row.labels] == labels
    assert all(row.labels == row.input_ids for row in found)


@pytest.mark.parametrize("kind", ["chatml", "chat_template.default", "passthrough", "user"])
def test_preference_rows_are_the_chosen_answer_as_trl_reads_it(tmp_path, base, kind):
    from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
    from axolotl.utils.data.rl import prepare_preference_datasets

    rows = {
        "chatml": [{"prompt": "Who?", "chosen": "Ada", "rejected": "Bo", "system": "Brief."}],
        "passthrough": [{"prompt": "Who? ", "chosen": "Ada", "rejected": "Bo"}],
        "user": [{"q": "Who?", "good": "Ada", "bad": "Bo"}],
        "chat_template.default": [
            {
                "messages": [{"role": "user", "content": "Who?"}],
                "chosen": {"role": "assistant", "content": "Ada"},
                "rejected": {"role": "assistant", "content": "Bo"},
            }
        ],
    }[kind]
    own = {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"}
    own |= {
        "prompt_format": "{prompt}=",
        "chosen_format": "{chosen}",
        "rejected_format": "{rejected}",
    }
    entry = {"type": own if kind == "user" else kind}
    path = write(tmp_path / "rows.jsonl", rows)
    settings = {"rl": "dpo", "chat_template": "chatml"}
    datasets = [{"path": path, "split": "train", "ds_type": "json", **entry}]
    cfg = load_config(tmp_path, "plain", base, datasets=datasets, **settings)
    tokenizer = byte_tokenizer()
    plain, _ = prepare_preference_datasets(cfg, tokenizer)
    trainer = object.__new__(AxolotlDPOTrainer)  # its reading alone, without a model
    trainer._tokenizer = trainer.processing_class = tokenizer
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_end")
    (learned,) = list(trainer._prepare_dataset(plain, tokenizer, arguments, "train"))
    data = DataArgs(rows=entry | {"rl": "dpo"})
    (found,) = typed.encode(typed.read_sources(path, data), data, tokenizer, cfg)
    assert found.input_ids == learned["prompt_ids"] + learned["chosen_ids"]
    assert found.labels == [-100] * len(learned["prompt_ids"]) + learned["chosen_ids"]


PREFERRED = {"prompt": "Who?", "chosen": "Ada", "rejected": "Bo"}


@pytest.mark.parametrize(("entry", "change"), [
    ({"rl": "dpo"}, {"chosen": None}), ({"rl": "dpo"}, {"prompt": None}),
    ({"rl": "dpo", "type": "chatml"}, {"chosen": None}),
    ({"rl": "dpo", "type": "llama3"}, {"prompt": None, "instruction": "Who?"}),
    ({"rl": "ipo"}, {"chosen": [{"role": "assistant", "content": "Ada"}]}),
    ({"rl": "dpo", "type": "chatml.intel"}, {}),
    ({"rl": "dpo", "type": "chat_template.default"}, {}),
    ({"rl": "dpo", "type": {"field_chosen": "good", "chosen_format": "{chosen}"}}, {}),
    ({"type": "chat_template", "chat_template": "chatml"}, {"messages": []}),
    ({"type": "chat_template", "chat_template": "chatml"}, {"messages": None}),
])  # fmt: skip
def test_rows_that_their_type_cannot_read_are_said(entry, change):
    """It ended with an unexpected AttributeError, KeyError or IndexError."""
    data, row = DataArgs(rows=entry), PREFERRED | change
    given = typed.sources([("line 1", row)], "rows.jsonl", data)
    cfg = DictDefault({"sequence_len": 64, "chat_template": "chatml"})
    with fails("data.type-cannot-read") as told:
        typed.encode(given, data, byte_tokenizer(), cfg, "rows.jsonl")
    assert "rows.jsonl: " in str(told.value) and "Ada" not in str(told.value)


def test_a_null_that_is_not_of_the_chosen_text_is_no_fault():
    """That of a rejected answer was one, where the config gives its field another name."""
    kind = {"field_rejected": "worse", "prompt_format": "{system} {prompt}"}
    data = DataArgs(rows={"rl": "dpo", "type": kind})
    given = typed.sources([("line 1", PREFERRED | {"worse": None, "system": None})], "r", data)
    (found,) = typed.encode(given, data, byte_tokenizer(), DictDefault({"sequence_len": 64}), "r")
    assert bytes(found.input_ids[:-1]) == b" Who?Ada"


@pytest.mark.parametrize(
    ("settings", "role", "says"),
    [
        ({}, "forget", "raise `sequence_len`, or remove them"),
        ({}, "alternative", "remove them"),
        ({}, "retain", None),
        ({"excess_length_strategy": "raise"}, "retain", "set `excess_length_strategy: drop`"),
        ({"excess_length_strategy": "truncate"}, "forget", None),
    ],
)
def test_a_row_that_would_not_be_forgotten_is_an_error(
    tmp_path, base, caplog, settings, role, says
):
    """It was left out with a warning, whatever its side."""
    rows = [*ALPACA, ALPACA[0] | {"output": "b" * 900, "id": "long"}]
    path = write(tmp_path / "rows.jsonl", rows)
    entry = {"path": path, "ds_type": "json", "type": "alpaca"}
    data = {"rows": {"type": "alpaca"}}
    cfg = load_config(tmp_path, "plain", base, datasets=[entry], **settings)
    cfg["unlearn"] = {"forget": {"objective": "npo"}, "data": data}
    strategy = load_strategy(role, load_tokenizer(cfg), cfg, {"path": path})
    if says:
        with fails("data.rows-dropped") as told:
            strategy.wrap_dataset(None)
        assert says in str(told.value)
        return
    cut = "excess_length_strategy" in settings
    assert len(strategy.wrap_dataset(None)) == 2 + cut
    assert ("1 rows were " + ("cut" if cut else "never learned")) in caplog.text


def test_ids_follow_the_content():
    """Nulls of Arrow and the order of keys say nothing; any text does."""
    row = {"messages": [{"role": "user", "content": "Hi"}]}
    same = {"tools": None, "messages": [{"content": "Hi", "role": "user", "tool_calls": None}]}
    assert typed.row_id(row) == typed.row_id(same)
    assert len(typed.row_id(row)) == 16
    other = {"messages": [{"role": "user", "content": "Ho"}]}
    assert typed.row_id(other) != typed.row_id(row)


def faults(tmp_path, rows, retain=None, **data) -> str:
    block = BLOCK | {"data": {"rows": {"type": "alpaca"}} | data}
    sides = {"forget": rows, "retain": retain or [{"instruction": "x", "output": "y"}]}
    datasets = [
        {"path": write(tmp_path / f"{side}.jsonl", part), "type": f"axolotl_unlearn.data.{side}"}
        for side, part in sides.items()
    ]
    return " ".join(checks.check_records({"unlearn": block, "datasets": datasets}).faults)


def test_envelopes_of_parquet_may_lack_what_others_have(tmp_path):
    """Parquet holds a null there, which was refused as no entry and no kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"row": ALPACA[0]}, {"dataset": 1, "kind": "question", "task": "2", "row": ALPACA[1]}]
    pq.write_table(pa.Table.from_pylist([rows[1], rows[0]]), tmp_path / "a.parquet")
    data = DataArgs.model_validate({"rows": [{"type": "alpaca"}] * 2})
    second, first = typed.read_sources(tmp_path / "a.parquet", data)
    assert (first.entry, first.kind, first.task) == (0, "completion", "")
    assert (second.entry, second.kind, second.task) == (1, "question", "2")
    with fails("data.no-such-entry"):
        typed.sources([("line 1", {"dataset": "", "row": ALPACA[0]})], "x", data)


def test_faults_of_the_rows(tmp_path):
    twice = faults(tmp_path, [ALPACA[0], dict(reversed(ALPACA[0].items()))])
    assert "line 2: the id" in twice and "Ada" not in twice
    assert "cannot be forgotten and kept" in faults(tmp_path, ALPACA[:1], ALPACA)
    named = {"rows": {"type": "alpaca"}, "fields": {"document": "person"}}
    with fails("data.no-such-field"):
        typed.sources([("line 1", ALPACA[0])], "x", DataArgs.model_validate(named))
    assert "`dataset: 3` is no entry" in faults(tmp_path, [{"dataset": 3, "row": ALPACA[0]}])
    assert "`kind` must be" in faults(tmp_path, [{"kind": "poem", "row": ALPACA[0]}])
    for way in ({"rows": {"type": "alpaca"}}, {"template": "{input} {output}"}):  # it has a `join`
        assert parse_unlearn({"preset": "zjuklab-paper", "data": way}).data.join == " "


def test_an_entry_that_does_not_read_the_rows(base):
    cfg, tokenizer = DictDefault({"sequence_len": 64}), byte_tokenizer()

    def said(entry, row) -> str:
        data = DataArgs(rows=entry)
        with pytest.raises(UnlearnError) as caught:
            typed.encode(typed.sources([("line 1", row)], "f", data), data, tokenizer, cfg, "f")
        return str(caught.value)

    wrong = said({"type": "completion"}, ALPACA[0])
    assert "'completion' cannot read these rows (KeyError: field 'text' is missing)" in wrong
    assert "Name her" not in wrong
    assert "'alpakka'" in said({"type": "alpakka"}, ALPACA[0])
    assert "did you mean 'field_messages'?" in said(
        {"type": "chat_template", "field_mesages": "m"}, CHATS[0]
    )
    assert "`rl: kto`" in said({"type": "chatml.argilla", "rl": "kto"}, ALPACA[0])


@pytest.mark.parametrize("given", ["long", "1.5", "-3", ""])
def test_a_length_that_is_no_number_is_a_sentence(given):
    assert typed.with_length({"sequence_len": " 64 "}).sequence_len == 64
    with pytest.raises(UnlearnError, match="is no whole number; write one"):
        typed.with_length({"sequence_len": given})
