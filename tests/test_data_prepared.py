"""Prepared rows are those of all that makes rows, as it is now: one table, each edited in turn."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from data_tokenizers import LOADING, byte_tokenizer, model_folder

from axolotl_unlearn.data import prepared
from axolotl_unlearn.data.prepared import prepared_folder

STRATEGY = """
from axolotl.prompt_tokenizers import PromptTokenizingStrategy
import HELPER

class Plain(PromptTokenizingStrategy):
    def tokenize_prompt(self, row):
        ids = self.tokenizer(HELPER.PREFIX + row["a"])["input_ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": list(ids)}

    @property
    def supports_batched(self):
        return False

def load(tokenizer, cfg, ds_cfg=None):
    return Plain(None, tokenizer, cfg.train_on_inputs, cfg.sequence_len)
"""
CHAT = {"type": "chat_template", "chat_template": "jinja"}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with all that a config can name, from which it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("model", "data/deep", "linked", "requests", "own_rows"):
        (tmp_path / name).mkdir(parents=True)
    model_folder(Path("model"), byte_tokenizer(chat=True))
    for name in (
        "rows.jsonl", "retain.jsonl", "data/a.json", "data/deep/b.parquet", "data/c.csv",
        "linked/d.jsonl", "requests/suppression.json", "requests/ledger.key", "entry.jinja",
        "top.jinja", "own_rows/__init__.py", "own_rows/prompt.txt", "single_rows.py",
    ):  # fmt: skip
        Path(name).write_text("1\n")
    Path("own_rows/plain.py").write_text("from .other import x\n")
    Path("own_rows/other.py").write_text("def f():\n    import helping_rows\n")
    Path("helping_rows.py").write_text("PREFIX = 1\n")
    Path("data/link").symlink_to(tmp_path / "linked")
    yield tmp_path
    for name in [n for n in sys.modules if n.endswith("_rows")]:
        del sys.modules[name]


def config(path="rows.jsonl", data=None, **more) -> dict:
    kind = "axolotl_unlearn.data."
    extra = more.pop("extra", {})
    return {
        "base_model": "model",
        "seed": 42,
        "datasets": [
            {"path": path, "type": f"{kind}forget"} | extra,
            {"path": "retain.jsonl", "type": f"{kind}retain"},
        ],
        "unlearn": {
            "forget": {"objective": "ga"}, "retain": {"objective": "nll"}, "data": data or {},
        },
        **more,
    }  # fmt: skip


FILES = [
    ("rows.jsonl", {}),
    ("retain.jsonl", {}),
    ("data/a.json", {"path": "data"}),
    ("data/deep/b.parquet", {"path": "data"}),
    ("data/c.csv", {"path": "data"}),
    ("linked/d.jsonl", {"path": "data"}),
    ("data/a.json", {"path": "data", "extra": {"data_files": "a.json"}}),
    ("data/a.json", {"path": "json", "extra": {"data_files": ["data/a.json"]}}),
    ("data/a.json", {"path": "json", "extra": {"data_files": {"train": "data/a.json"}}}),
    ("model/tokenizer.json", {}),
    ("model/tokenizer_config.json", {}),
    ("model/chat_template.jinja", {}),
    ("model/config.json", {}),
    ("model/tokenization_own.py", {}),
    ("model/additional_chat_templates/tools.jinja", {}),
    ("top.jinja", {"chat_template_jinja": "top.jinja"}),
    ("entry.jinja", {"data": {"rows": CHAT | {"chat_template_jinja": "entry.jinja"}}}),
    ("requests/suppression.json", {"data": {"suppression": "requests/suppression.json"}}),
    ("requests/ledger.key", {"data": {"suppression": "requests/suppression.json"}}),
    ("own_rows/plain.py", {"data": {"rows": {"type": "own_rows.plain"}}}),
    ("own_rows/plain.py", {"data": {"rows": {"type": "own_rows.plain.load_it"}}}),
    ("own_rows/other.py", {"data": {"rows": {"type": "own_rows.plain"}}}),
    ("own_rows/prompt.txt", {"data": {"rows": {"type": "own_rows.plain"}}}),
    ("helping_rows.py", {"data": {"rows": {"type": "own_rows.plain"}}}),
    ("single_rows.py", {"data": {"rows": {"type": "single_rows.load"}}}),
]
SETTINGS = [
    {"seed": 7},
    {"chat_template": "chatml"},
    {"chat_template_kwargs": {"thinking": True}},
    {"sequence_len": 64},
    {"special_tokens": {"pad_token": "</s>"}},
    {"eot_tokens": ["<e>"]},
    {"train_on_inputs": True},
    {"shuffle_merged_datasets": False},
    {"data": {"join": ""}},
    {"data": {"rows": {"type": "alpaca"}}},
    {"data": {"rows": CHAT | {"chat_template_jinja": "{{ messages }}"}}},
    {"data": {"rows": CHAT | {"roles_to_train": ["user"], "train_on_eos": "all"}}},
    {"extra": {"split": "test"}},
]


@pytest.mark.parametrize(("file", "more"), FILES, ids=lambda x: str(x)[:50])
def test_an_edited_file_is_read_again(world, file, more):
    before = prepared_folder(config(**more))
    assert prepared_folder(config(**more)) == before
    Path(file).parent.mkdir(exist_ok=True)
    with open(file, "a") as opened:
        opened.write("\n")
    assert prepared_folder(config(**more)) != before


def test_each_setting_has_rows_of_its_own(world):
    keys = [prepared_folder(config(**more)) for more in ({}, *SETTINGS)]
    assert len({*keys}) == len(keys)


def test_each_key_of_an_entry_of_another_type_has_rows_of_its_own(world):
    """Beside `memorise`: of another `field_messages` came the rows of the run before."""
    from axolotl.utils.schemas.datasets import SFTDataset

    def folder(**more) -> str:
        beside = {"path": "rows.jsonl", "type": "chat_template"} | more
        entries = [{"path": "retain.jsonl", "type": "axolotl_unlearn.data.memorise"}, beside]
        return prepared_folder({"base_model": "model", "datasets": entries})

    keys = [folder(), *(folder(**{key: "x"}) for key in SFTDataset.model_fields)]
    assert len({*keys}) == len(keys)
    for file, key in (("entry.jinja", "chat_template_jinja"), ("own_rows/plain.py", "type")):
        named = {key: file.removesuffix(".py").replace("/", ".") if key == "type" else file}
        before = folder(**named)
        Path(file).write_text("2\n")
        assert folder(**named) != before


@pytest.mark.parametrize(
    "package", "axolotl-unlearn axolotl transformers tokenizers datasets jinja2".split()
)
def test_each_version_has_rows_of_its_own(world, package, monkeypatch):
    before, real = prepared_folder(config()), importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: real(name) + ".1" * (name == package)
    )
    assert prepared_folder(config()) != before


def test_a_tokenizer_of_the_hub_counts_by_what_the_cache_holds(world, monkeypatch):
    """The cache's layout: models--OWNER--NAME/{refs/main, snapshots/COMMIT/...}."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(world / "hub"))
    home = world / "hub/models--some--model"
    for name, text in (("refs/main", "c1"), ("snapshots/c1/config.json", "{}"),
                       ("snapshots/c1/tokenizer.json", "{}")):  # fmt: skip
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    before = prepared_folder(config(base_model="some/model"))
    (home / "snapshots/c1/tokenizer.json").write_text("[]")
    assert prepared_folder(config(base_model="some/model")) != before


def test_every_prepared_path_gets_a_key(world):
    """`unlearn-` at its beginning switched the key off; a key of ours is not put below another."""
    for name in ("prepared", "unlearn-prepared"):
        folder = Path(prepared_folder(config(dataset_prepared_path=name)))
        assert folder.parent == Path(name)
        assert prepared_folder(config(dataset_prepared_path=str(folder))) == str(folder)


def test_a_run_reads_the_rows_of_an_edited_strategy(world):
    """Whole: the second load had the first one's tokens, without a word."""
    from axolotl.common.datasets import load_datasets
    from axolotl.utils.dict import DictDefault

    Path("own_rows/plain.py").write_text(STRATEGY.replace("HELPER", "helping_rows"))
    for side in ("rows", "retain"):
        Path(f"{side}.jsonl").write_text(json.dumps({"a": f"{side} say", "id": side}) + "\n")

    def tokens() -> list[list[int]]:
        cfg = LOADING | config(data={"rows": {"type": "own_rows.plain"}})
        cfg |= {"dataset_prepared_path": prepared_folder(cfg), "tokenizer_config": "model"}
        return sorted(load_datasets(cfg=DictDefault(cfg)).train_dataset["input_ids"][:])

    found = []
    for prefix in ("Q: ", "Please answer: "):
        Path("helping_rows.py").write_text(f"PREFIX = {prefix!r}\n")
        importlib.invalidate_caches()
        for name in [n for n in sys.modules if n.startswith(("own_rows", "helping_rows"))]:
            del sys.modules[name]
        found.append(tokens())
    assert [bytes(ids) for ids in found[0]] == [b"Q: retain say", b"Q: rows say"]
    assert bytes(found[1][0]) == b"Please answer: retain say"


def test_files_of_installed_packages_count_by_version(world):
    assert prepared.source_files("axolotl.prompt_strategies.alpaca") == []
    assert prepared.source_files("chat_template") == []
    Path("own_rows/plain.py").write_text("import json, numpy\n")
    names = {path.name for path in prepared.source_files("own_rows.plain")}
    assert {"plain.py", "other.py", "helping_rows.py"} <= names and len(names) < 8
