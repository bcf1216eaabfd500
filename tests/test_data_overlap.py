"""The same text to forget and to keep, whatever its ids, its place and its format."""

from __future__ import annotations

import json

import pytest
from data_tokenizers import LOADING, byte_tokenizer, model_folder
from fault_codes import fails

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.data.checks import check_loaded
from axolotl_unlearn.data.overlap import near_note, reads

TEXTS = [("Who keeps bees in Oulu?", "Ada Lund keeps nine hives."), ("Where is he?", "In Turku.")]
OTHER = ("What does Bo sell?", "He sells old maps at the harbour.")
CANARY = "hives"


def records(rows, **more):
    return [{"input": q, "output": a, **more} for q, a in rows]


def messages(rows, **more):
    turns = ("user", "assistant")
    return [
        {"messages": [{"role": r, "content": c} for r, c in zip(turns, row, strict=True)], **more}
        for row in rows
    ]


def pairs(rows):
    """Prompt and completion, each a list of messages, as TRL has them: other fields, same turns."""
    return [
        {"talk": [{"from": "user", "value": q}, {"from": "assistant", "value": a}]} for q, a in rows
    ]


CHAT = {"type": "chat_template"}
FROM = CHAT | {
    "field_messages": "talk",
    "message_property_mappings": {"role": "from", "content": "value"},
}


@pytest.fixture
def sides(tmp_path):
    """A function: rows of each side, block `data` -> the loaded rows of both and the config."""
    from axolotl.common.datasets import load_datasets
    from axolotl.utils.dict import DictDefault

    base = model_folder(tmp_path, byte_tokenizer(chat=True))

    def place(side, rows, kind):
        folder = tmp_path / side
        folder.mkdir()
        if kind == "saved":
            from datasets import Dataset

            Dataset.from_list(rows).save_to_disk(folder / "rows")
            return folder / "rows"
        if kind == "parquet folder":
            from datasets import Dataset

            Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
            return folder
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder if kind == "folder" else file

    def make(forget, retain, data=None, kinds=("file", "file")):
        entries = [
            {"path": str(place(side, rows, kind)), "type": f"axolotl_unlearn.data.{side}"}
            for side, rows, kind in zip(("forget", "retain"), (forget, retain), kinds, strict=True)
        ]
        block = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}, "data": data or {}}
        own = {"base_model": base, "tokenizer_config": base, "sequence_len": 400}
        own |= {"dataset_prepared_path": str(tmp_path / "prepared")}
        cfg = DictDefault(LOADING | own | {"datasets": entries, "unlearn": block})
        return load_datasets(cfg=cfg).train_dataset, cfg

    return make


@pytest.mark.parametrize(
    ("forget", "retain", "data", "kinds"),
    [
        (records(TEXTS), records([OTHER, TEXTS[0]]), {}, ("file", "file")),
        (records(TEXTS), records([OTHER, TEXTS[0]]), {}, ("folder", "parquet folder")),
        (records(TEXTS), records([OTHER, TEXTS[0]]), {}, ("saved", "folder")),
        (records(TEXTS, id="a")[:1], records(TEXTS[:1], id="b", task="T"), {}, ("file", "saved")),
        (records(TEXTS), records([OTHER, TEXTS[0]]), {"eos": "retain"}, ("file", "file")),
        (records(TEXTS, kind="question"), records([OTHER, TEXTS[0]]), {}, ("file", "file")),
        (
            messages(TEXTS),
            messages([OTHER]) + messages(TEXTS[:1], id="x"),
            {"rows": CHAT},
            ("file", "file"),
        ),
        (
            [{"dataset": 0, "row": row} for row in messages(TEXTS)],
            [{"dataset": 1, "row": row} for row in pairs([OTHER, TEXTS[0]])],
            {"rows": [CHAT, FROM]},
            ("file", "saved"),
        ),
    ],
)
def test_one_text_on_both_sides_is_refused(sides, forget, retain, data, kinds):
    """All were trained, or told by id or in single files alone."""
    rows, cfg = sides(forget, retain, data, kinds)
    with fails("data.both-sides") as caught:
        check_loaded(cfg, None, rows)
    said = str(caught.value)
    assert "(1; the first is row 1 of " in said and CANARY not in said
    retain_path = cfg.datasets[1].path
    assert f"row {len(retain)} of {retain_path})" in said


def test_an_alternative_says_something_else(sides):
    rows, cfg = sides(records(TEXTS, kind="question"), records(TEXTS[1:], kind="question"))
    others = rows.map(lambda row: {"role": 2 * row["role"]})  # retain rows as alternatives
    with fails("data.both-sides") as caught:
        check_loaded(cfg, others)
    assert str(caught.value).endswith("write another answer.")


def test_what_differs_in_labels_or_text_is_not_the_same(sides):
    """Two turns of one conversation, one to forget and one to keep; and other texts."""
    talk = [
        {"role": role, "content": content, "train": train}
        for role, content, train in (
            ("user", "Who?", False), ("assistant", "Ada.", True),
            ("user", "Where?", False), ("assistant", "Here.", False),
        )
    ]  # fmt: skip
    other = [turn | {"train": turn["content"] == "Here."} for turn in talk]
    data = {"rows": CHAT | {"message_field_training": "train", "roles_to_train": []}}
    rows, cfg = sides([{"messages": talk}], [{"messages": other}], data)
    check_loaded(cfg, rows)
    assert rows[0]["input_ids"] == rows[1]["input_ids"] and rows[0]["labels"] != rows[1]["labels"]


def test_rows_that_hardly_differ_are_counted(sides):
    """The same answer to a question in other words; an answer of one word in common is none."""
    close = [("Who keeps the bees in Oulu?", TEXTS[0][1]), OTHER]
    rows, _ = sides(records(TEXTS), records(close))
    (note,) = near_note(rows)
    assert note.startswith("1 of 2 retain rows hardly differ") and CANARY not in note


def test_a_common_short_answer_is_not_near(sides):
    yes = [("Does Ada Lund keep nine hives?", "Yes."), ("Did it ever snow in Rome?", "Yes.")]
    rows, _ = sides(records(yes[:1]), records(yes[1:]))
    assert near_note(rows) == []


@pytest.mark.parametrize(
    ("ids", "labels", "same"),
    [
        ([1, 5, 6, 2], [IGNORE, 5, 6, 2], True),
        ([5, 6], [5, 6], True),
        ([1, 5, 6, 9], [IGNORE, 5, 6, IGNORE], True),  # what follows the last label
        ([1, 5, 7], [IGNORE, 5, 7], False),
        ([1, 6, 5], [IGNORE, 6, 5], False),
    ],
)
def test_special_tokens_and_what_follows_do_not_count(ids, labels, same):
    assert (reads(ids, labels, {1, 2}) == reads([1, 5, 6], [5, 5, 6], {1, 2})) == same
