"""The dataset types through Axolotl's own loading, on CPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from axolotl.utils.dict import DictDefault
from data_tokenizers import EOS, LOADING, byte_tokenizer, model_folder
from fault_codes import fails

from axolotl_unlearn.columns import pair_number

FORGET = [
    {"id": "a1sc1", "input": "ab", "output": "c", "task": "Task1"},
    {"id": "a1qa0", "input": "q", "output": "d", "task": "Task2"},
]
RETAIN = [{"id": "b1qa0", "input": "0123456789", "output": "z", "task": "Task3"}]
BLOCK = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
X = -100


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    return model_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture
def config(tmp_path, base):
    """A function: datasets as (file, role) and settings -> an Axolotl config."""

    def make(*datasets, unlearn=BLOCK, **settings):
        entries = [
            {"path": str(path), "type": f"axolotl_unlearn.data.{role}", **extra}
            for path, role, *rest in datasets
            for extra in [rest[0] if rest else {}]
        ]
        own = {"base_model": base, "tokenizer_config": base, "datasets": entries}
        own |= {"dataset_prepared_path": str(tmp_path / "prepared"), "unlearn": unlearn}
        return DictDefault(LOADING | own | settings)

    return make


def load(cfg):
    from axolotl.common.datasets import load_datasets

    return load_datasets(cfg=cfg)


def by_role(dataset) -> dict[tuple[int, int], dict]:
    return {(row["role"], row["row"]): row for row in dataset}


def test_axolotl_loads_forget_and_retain(tmp_path, config):
    """ids are bytes: 'ab' 97 98, ' c' 32 99, 'q' 113, ' d' 32 100; stories are labelled whole."""
    cfg = config(
        (write(tmp_path / "f.jsonl", FORGET), "forget", {"ds_type": "json"}),
        (write(tmp_path / "r.jsonl", RETAIN), "retain", {"ds_type": "json"}),
    )
    dataset = load(cfg).train_dataset
    assert len(dataset) == 3
    rows = by_role(dataset)
    assert rows[0, 0] == {
        "reads": rows[0, 0]["reads"],  # hashes: test_data_overlap.py
        "file": pair_number(str(tmp_path / "f.jsonl")),
        "input_ids": [97, 98, 32, 99, EOS],
        "attention_mask": [1] * 5,
        "labels": [97, 98, 32, 99, EOS],
        "role": 0,
        "kind": 0,
        "task": 1,
        "row": 0,
        "length": 5,
        "pair": pair_number(FORGET[0]["id"]),
        "document": pair_number("a1"),
    }
    assert rows[0, 1]["labels"] == [X, 32, 100, EOS]
    assert (rows[0, 1]["kind"], rows[0, 1]["task"]) == (1, 2)
    assert rows[1, 0]["input_ids"] == [*b"0123456789 z", EOS]
    assert rows[1, 0]["task"] == 3
    # and again, from Axolotl's prepared copy
    assert by_role(load(cfg).train_dataset) == rows


def test_an_alternative_finds_its_row_and_has_labels_on_its_answer(tmp_path, config):
    """The forget row is a document, labelled whole; ' z' 32 122."""
    from axolotl_unlearn.data.pairing import PairedDataset

    other = [row | {"output": "z"} for row in FORGET]
    cfg = config(
        (write(tmp_path / "f.jsonl", FORGET), "forget"),
        (write(tmp_path / "a.jsonl", other[::-1]), "alternative"),
    )
    dataset = load(cfg).train_dataset
    rows = by_role(dataset)
    assert rows[2, 1]["input_ids"] == [97, 98, 32, 122, EOS]
    assert rows[2, 1]["labels"] == [X, X, 32, 122, EOS]
    pairs = PairedDataset(dataset, retain_per_forget=0, alternatives=True)
    for item in (pairs[0], pairs[1]):
        assert item["alternative"][0]["row"] == 1 - item["forget"][0]["row"]


def test_rows_take_the_memory_of_their_numbers(tmp_path, config, monkeypatch):
    """3 000 rows of 200 tokens are 1 800 bytes each in Arrow, which is not counted here; lists of
    Python's numbers took 8 bytes a token, four to five times at once."""
    import tracemalloc

    from axolotl_unlearn.data import encode
    from axolotl_unlearn.data import strategy as rows_of_roles

    for module, name in ((rows_of_roles, "_BATCH"), (encode, "_AT_ONCE")):
        monkeypatch.setattr(module, name, 100)
    rows = [{"id": f"{n}qa0", "input": "q", "output": f"{n:<198}"} for n in range(3000)]
    made = strategy(config((write(tmp_path / "f.jsonl", rows), "forget"), sequence_len=256))
    tracemalloc.start()
    wrapped = made.wrap_dataset(None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(wrapped) == 3000 and set(wrapped["length"][:]) == {201}
    assert [bytes(ids[2:-1]).decode() for ids in wrapped["input_ids"][-2:]] == [
        row["output"] for row in rows[-2:]
    ]
    assert peak / 3000 < 3000, "bytes of Python a row"


def test_memorise_needs_no_block_and_labels_everything(tmp_path, config):
    """The stream repeats a row on purpose: both copies stay."""
    path = write(tmp_path / "m.jsonl", [FORGET[1], FORGET[0], FORGET[1]])
    dataset = load(config((path, "memorise"), unlearn=None)).train_dataset
    assert dataset.column_names == ["input_ids", "attention_mask", "labels"]
    texts = [bytes(row["input_ids"][:-1]) for row in dataset]
    assert sorted(texts) == [b"ab c", b"q d", b"q d"]
    assert all(row["labels"] == row["input_ids"] for row in dataset)


def test_memorise_heeds_labels_that_are_given(tmp_path, config):
    """`labels: {question: answer}` was taken for its default, and prompts were learned too."""
    path = write(tmp_path / "m.jsonl", FORGET)
    cfg = config((path, "memorise"), unlearn={"data": {"labels": {"question": "answer"}}})
    labels = {bytes(r["input_ids"][:-1]): r["labels"] for r in load(cfg).train_dataset}
    assert labels == {b"ab c": [*b"ab c", EOS], b"q d": [X, *b" d", EOS]}


@pytest.mark.parametrize(("eos", "ends"), [(True, {0, 1, 2}), (False, set()), ("retain", {1, 2})])
def test_which_rows_end(tmp_path, config, eos, ends):
    """`eos: retain` forgets no end: forget rows (0) have none, retain (1) and memorise (2) do."""
    path = write(tmp_path / "f.jsonl", FORGET)
    for number, role in enumerate(("forget", "retain", "memorise")):
        dataset = load(config((path, role), unlearn=BLOCK | {"data": {"eos": eos}})).train_dataset
        assert len(dataset) == 2
        for row in dataset:
            assert (row["input_ids"][-1] == EOS) == (number in ends)
            assert row["labels"][-1] == row["input_ids"][-1]


def test_options_and_own_fields_come_from_the_block(tmp_path, config):
    rows = [{"key": "a1qa0", "q": "x", "a": "y", "part": "Task1"}]
    names = {"id": "key", "input": "q", "output": "a", "task": "part"}
    block = BLOCK | {"data": {"template": "{input}->{output}", "eos": False, "fields": names}}
    cfg = config((write(tmp_path / "f.jsonl", rows), "forget"), unlearn=block)
    (row,) = load(cfg).train_dataset
    assert bytes(row["input_ids"]) == b"x->y" and row["labels"] == [X, X, X, 121]


def test_long_prompts_are_cut_counted_and_kept(tmp_path, config, caplog):
    """'0123456789 z' + EOS = 13 tokens into 8: 5 prompt tokens go, no row goes, no text is told."""
    cfg = config(
        (write(tmp_path / "f.jsonl", FORGET), "forget"),
        (write(tmp_path / "r.jsonl", RETAIN), "retain"),
        sequence_len=8,
    )
    with caplog.at_level(logging.WARNING, "axolotl_unlearn"):
        dataset = load(cfg).train_dataset
    assert len(dataset) == 3
    assert bytes(by_role(dataset)[1, 0]["input_ids"][:-1]) == b"56789 z"
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("axolotl_unlearn")]
    assert "1 of 1 rows lost 5 tokens" in message and "sequence_len" in message
    assert "456789" not in message


def strategy(cfg, role="forget", tokenizer=None):
    import importlib

    module = importlib.import_module(f"axolotl_unlearn.data.{role}")
    return module.load(tokenizer or byte_tokenizer(), cfg, ds_cfg=cfg["datasets"][0])


DOCUMENT = {"id": "1sc1", "input": "0123456789", "output": "z", "task": "Task1"}


@pytest.mark.parametrize("role", ["forget", "retain", "memorise"])
def test_a_chat_has_labels_on_the_answer_alone(tmp_path, config, role):
    """Whatever the id: the system prompt "be kind" and the headers <u>, <a> are not forgotten."""
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = "be kind" + tokenizer.chat_template
    rows = [{"id": name, "input": "q", "output": "yes", "task": "1"} for name in ("x7", "x7sc1")]
    block = BLOCK | {"data": {"chat_template": True}}
    cfg = config((write(tmp_path / "f.jsonl", rows), role), unlearn=block)
    wrapped = strategy(cfg, role, tokenizer).wrap_dataset(None)
    for row in wrapped:
        labelled = [token for token in row["labels"] if token != X]
        assert labelled == [*b"yes", EOS]
        assert bytes(row["input_ids"][:-5]) == b"be kind<u>q<a>"
    if role != "memorise":
        assert wrapped["kind"][:] == [1, 0]


@pytest.mark.parametrize(
    ("data", "row", "kind"),
    [
        ({}, {}, 0),
        ({"template": "{input}={output}"}, {}, 1),
        ({"template": "{input}={output}"}, {"kind": "completion"}, 0),
        ({"chat_template": True}, {"kind": "completion"}, 0),
    ],
)
def test_what_kind_a_row_is_if_its_id_does_not_tell(tmp_path, config, data, row, kind):
    rows = [{"id": "x7", "input": "q", "output": "yes", "task": "1"} | row]
    cfg = config((write(tmp_path / "f.jsonl", rows), "forget"), unlearn=BLOCK | {"data": data})
    assert strategy(cfg, tokenizer=byte_tokenizer(chat=True)).wrap_dataset(None)["kind"][:] == [
        kind
    ]


SINGLE = {"id": "1qa0", "input": "", "output": "b", "task": "Task1"}
#: Role, rows and settings -> code, and what is said.
FAULTS = [
    # 13 tokens, all labelled, into 8: five would not be forgotten.
    *((role, DOCUMENT, {"sequence_len": 8}, "data.rows-too-long", "`sequence_len: 13`")
      for role in ("forget", "memorise")),
    *((role, FORGET[0], {"sequence_len": 8, "unlearn": BLOCK | {"data": {"chat_template": True}}},
       "data.rows-too-long", "as whole chats") for role in ("forget", "retain")),
    *((role, FORGET[0], {"unlearn": None}, "data.no-block", "") for role in ("forget", "retain")),
    ("forget", SINGLE, {"unlearn": BLOCK | {"data": {"eos": False}}}, "data.single-token", ""),
    # Settings of Axolotl that would drop rows.
    ("forget", FORGET[0], {"unlearn": BLOCK | {"data": {"max_length": 65}}}, "data.max-length", ""),
    ("forget", FORGET[0], {"eval_sequence_len": 32, "test_datasets": [{}]}, "data.max-length", ""),
    ("forget", FORGET[0], {"min_sample_len": 5}, "data.drops-rows", ""),
    ("forget", FORGET[0], {"dataset_exact_deduplication": True}, "data.drops-rows", ""),
]  # fmt: skip


@pytest.mark.parametrize(("role", "row", "settings", "code", "says"), FAULTS)
def test_rows_that_would_not_be_forgotten_are_refused(
    tmp_path, config, role, row, settings, code, says
):
    cfg = config((write(tmp_path / "f.jsonl", [row]), role), **settings)
    with fails(code) as told:
        strategy(cfg, role, byte_tokenizer(chat=True)).wrap_dataset(None)
    assert "456789" not in str(told.value) and says in str(told.value)


def test_rows_that_are_not_a_local_file(config):
    """A hub or saved dataset arrives as rows; they are checked alike."""
    from datasets import Dataset

    cfg = config(("someone/dataset", "retain"))
    wrapped = strategy(cfg, "retain").wrap_dataset(Dataset.from_list(FORGET))
    assert wrapped["row"][:] == [0, 1] and wrapped["role"][:] == [1, 1]
    with fails("data.field-missing"):
        strategy(cfg, "retain").wrap_dataset(Dataset.from_list([{"id": "1", "input": "a"}]))
