"""Conversations: `data.rows` and `chat_template: true` give the tokens and labels of Axolotl's SFT.

Templates are those that Axolotl and TRL ship, and some of our own; rows and options are drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

import pytest
from axolotl.loaders import load_tokenizer
from data_tokenizers import byte_tokenizer, model_folder
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_data_typed import load_config, write

from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data import typed
from axolotl_unlearn.errors import UnlearnError


def shipped() -> dict[str, str]:
    """Name -> template, of Axolotl and TRL."""
    import trl
    from axolotl.utils.chat_templates.base import _CHAT_TEMPLATES

    ours = {f"axolotl {name}": text for name, text in _CHAT_TEMPLATES.items()}
    theirs = Path(trl.__file__).parent.rglob("*.jinja")
    return ours | {f"trl {path.stem}": path.read_text("utf-8") for path in theirs}


TEMPLATES = shipped()
WORDS = st.sampled_from(["Ada", "keeps", "bees.", "In 1981", "ö", "\n", "<b>", "Norrby?"])
TEXT = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"town": "Norrby"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "rain", "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}  # fmt: skip


@st.composite
def conversations(draw):
    """A list of rows of one shape, as a file has them."""
    tools, thinking, masks = (draw(st.booleans()) for _ in range(3))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        messages = []
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(TEXT)})
        for _ in range(draw(st.integers(1, 3))):
            messages.append({"role": "user", "content": draw(TEXT)})
            if tools and draw(st.booleans()):
                messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
                messages.append({"role": "tool", "content": draw(TEXT)})
            answer = {"role": "assistant", "content": draw(TEXT)}
            if thinking and draw(st.booleans()):
                answer["content"] = f"<think>\n{draw(TEXT)}\n</think>\n\n{answer['content']}"
            elif thinking:
                answer["reasoning_content"] = draw(TEXT)
            if masks:
                answer["train"] = draw(st.booleans())
            messages.append(answer)
        rows.append({"messages": messages} | ({"tools": [TOOL]} if tools else {}))
    return rows


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "roles_to_train": st.sampled_from([["assistant"], ["user"], ["assistant", "user"]]),
        "train_on_eos": st.sampled_from(["all", "turn", "last", "none"]),
        "train_on_eot": st.sampled_from(["all", "turn", "last", "none"]),
        "message_field_training": st.just("train"),
        "split_thinking": st.booleans(),
        "drop_system_message": st.booleans(),
        "eot_tokens": st.just(["<|im_end|>"]),
    },
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A tokenizer that itself puts a BOS before a text, as templates do, too."""
    made = byte_tokenizer(bos=True)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return model_folder(tmp_path_factory.mktemp("base"), made)


def plain(folder: Path, base: str, rows: list[dict], entry: dict, top: dict):
    """(config, token rows) of ordinary fine-tuning by Axolotl, or the error."""
    from axolotl.common.datasets import load_datasets

    entry = {"path": write(folder / "rows.jsonl", rows), "ds_type": "json", **entry}
    cfg = load_config(
        folder, "my", base, sequence_len=4000, val_set_size=0, datasets=[entry], **top
    )
    try:
        found = load_datasets(cfg=cfg).train_dataset
    except Exception as error:  # of the template, the strategy, or of rows that are all dropped
        return cfg, error
    rows = [(list(row["input_ids"]), list(row["labels"])) for row in found]
    # Without a label nothing is learned, and so nothing to be forgotten.
    return cfg, [row for row in rows if any(label != -100 for label in row[1][1:])]


def placed(folder: Path, text: str, where: str) -> tuple[dict, dict]:
    """(entry, top level) for a template: inline or in a file, of the entry or of the config."""
    if "file" in where:
        (folder / "my.jinja").write_text(text, "utf-8")
        text = str(folder / "my.jinja")
    given = {"chat_template": "jinja", "chat_template_jinja": text}
    return (given, {}) if "entry" in where else ({}, given)


def drawn(count: int):
    """So many draws, always the same; with TEMPLATE_DRAWS so many others. None is made smaller,
    which takes minutes."""
    more = int(os.environ.get("TEMPLATE_DRAWS", 0))
    return settings(
        max_examples=more or count, derandomize=not more, deadline=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=[*HealthCheck],
    )  # fmt: skip


PLACES = ["entry, inline", "entry, file", "top, inline", "top, file"]


@drawn(40)
@given(
    st.sampled_from(sorted(TEMPLATES)), st.sampled_from(PLACES), conversations(), OPTIONS
)  # fmt: skip
def test_rows_are_those_of_fine_tuning(base, name, where, rows, options):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        entry, top = placed(folder, TEMPLATES[name], where)
        entry |= {"type": "chat_template", **options}
        if "eot_tokens" in entry:
            top["eot_tokens"] = entry.pop("eot_tokens")
        cfg, wanted = plain(folder, base, rows, entry, top)
        data = DataArgs(rows=[entry])
        given = [{"dataset": 0, "id": str(n), "row": row} for n, row in enumerate(rows)]
        sources = typed.sources(((f"row {n}", row) for n, row in enumerate(given)), "rows", data)
        try:
            found = typed.encode(sources, data, load_tokenizer(cfg), cfg)
            found = [(one.input_ids, one.labels) for one in found]
        except UnlearnError as error:
            assert isinstance(wanted, Exception), error
            return
        if isinstance(wanted, Exception):  # Axolotl's of an empty set
            assert found == [], wanted
        else:
            assert found == wanted


@drawn(15)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.sampled_from(["top, inline", "top, file"]),
    TEXT,
    TEXT.filter(str.strip),  # an answer of blanks is refused
)
def test_records_are_those_of_fine_tuning(base, name, where, question, answer):
    from axolotl_unlearn.data.strategy import load_strategy

    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _, top = placed(folder, TEMPLATES[name], where)
        cfg, wanted = plain(folder, base, [{"messages": turns}], {"type": "chat_template"}, top)
        cfg["unlearn"] = {"forget": {"objective": "npo"}, "data": {"chat_template": True}}
        file = folder / "records.jsonl"
        file.write_text(json.dumps({"input": question, "output": answer}) + "\n")
        with contextlib.suppress(UnlearnError):
            strategy = load_strategy("forget", load_tokenizer(cfg), cfg, {"path": str(file)})
            found = strategy.wrap_dataset(None)
            found = [(list(row["input_ids"]), list(row["labels"])) for row in found]
            assert found == wanted
            return
        assert isinstance(wanted, Exception)
