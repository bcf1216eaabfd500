"""`unlearn.data.retain_rows`: a retain side that does not fit is drawn from, not read whole."""

from __future__ import annotations

import builtins
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import yaml

from axolotl_unlearn.checks.config import PLUGIN, prepare, prepare_data
from axolotl_unlearn.checks.report import check
from axolotl_unlearn.data.drawn import draw_retain
from axolotl_unlearn.errors import UnlearnError

KIND = "axolotl_unlearn.data."


def rows_file(path: Path, side: str, count: int) -> dict[str, str]:
    rows = (
        {"id": f"{side}{n}-qa0", "input": f"{side} {n}?", "output": f"{n}"} for n in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return {"path": str(path), "type": KIND + side}


def config(folder: Path, retain: list[dict], **data) -> dict:
    return {
        "base_model": "someone/model",
        "plugins": [PLUGIN],
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        "adapter": "lora",
        "learning_rate": 1e-4,
        "datasets": [rows_file(folder / "forget.jsonl", "forget", 3), *retain],
        "unlearn": {
            "forget": {"objective": "npo"}, "retain": {"objective": "nll"}, "data": data,
        },
    }  # fmt: skip


def drawn_ids(cfg: dict) -> list[str]:
    paths = [one["path"] for one in cfg["datasets"] if one["type"] == KIND + "retain"]
    return [json.loads(line)["id"] for path in paths for line in Path(path).open(encoding="utf-8")]


def test_every_row_of_all_files_is_drawn_equally_often(tmp_path):
    """20 rows in two files of 15 and 5, 4 drawn, 2000 seeds: 400 each (standard error 17.9)."""
    entries = [rows_file(tmp_path / f"{n}.jsonl", f"retain{n}", n) for n in (15, 5)]
    entries = [one | {"type": KIND + "retain"} for one in entries]
    found: Counter[str] = Counter()
    for seed in range(1, 2001):
        cfg = {"seed": seed, "datasets": [dict(one) for one in entries]}
        draw_retain(cfg, tmp_path / "drawn", 4)
        ids = drawn_ids(cfg)
        assert len(set(ids)) == len(ids) == 4
        found.update(ids)
    assert len(found) == 20 and all(abs(count - 400) < 90 for count in found.values())


def test_a_run_and_check_see_the_drawn_rows_alone(tmp_path, monkeypatch):
    """The same rows in each run, and the list of what `clean` removes has them."""
    entry = rows_file(tmp_path / "retain.jsonl", "retain", 5000)
    cfg = config(tmp_path, [entry], retain_rows=40)
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(cfg), "utf-8")
    opened, before = [], builtins.open
    monkeypatch.setattr(Path, "open", lambda self, *how, **more: (
        opened.append(self.name), before(self, *how, **more))[1])  # fmt: skip
    faults, lines, facts = check(file, full=True)
    monkeypatch.undo()
    assert opened.count("retain.jsonl") == 1, "the file that does not fit was read twice"
    assert faults == [] and any("40" in line for line in lines) and facts["plan"]
    assert not (tmp_path / "prepared").exists()
    prepare(cfg)
    prepare_data(cfg)
    first = drawn_ids(cfg)
    assert len(first) == 40
    manifest = json.loads((tmp_path / "out" / "run_manifest.json").read_text("utf-8"))
    assert any("retain-" in one["path"] for one in manifest["entries"])
    again = config(tmp_path, [entry], retain_rows=40)
    prepare(again)
    prepare_data(again)
    assert drawn_ids(again) == first
    assert again["dataset_prepared_path"] == cfg["dataset_prepared_path"]


def test_a_seed_of_zero_and_a_byte_order_mark(tmp_path, caplog):
    """Zero was taken for none, and a mark that is drawn into the middle of a file for JSON."""
    entry = rows_file(tmp_path / "retain.jsonl", "retain", 30)
    marked = b"\xef\xbb\xbf" + (tmp_path / "retain.jsonl").read_bytes()
    (tmp_path / "retain.jsonl").write_bytes(marked)
    found = []
    for seed in (0, 42, None):
        cfg = {"seed": seed, "datasets": [dict(entry)]}
        with caplog.at_level("INFO"):
            draw_retain(cfg, tmp_path / "drawn", 12)
        found.append(drawn_ids(cfg))
    assert found[0] != found[1] == found[2]
    assert "12 of 30 retain rows are drawn" in caplog.text


def test_memory_is_that_of_the_drawn_rows(tmp_path):
    entry = rows_file(tmp_path / "retain.jsonl", "retain", 100_000)
    cfg = {"datasets": [entry]}
    tracemalloc.start()
    draw_retain(cfg, tmp_path / "drawn", 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6 < Path(tmp_path / "retain.jsonl").stat().st_size


def test_what_cannot_be_drawn_from_is_said(tmp_path):
    entry = rows_file(tmp_path / "retain.jsonl", "retain", 20) | {"path": "someone/rows"}
    with pytest.raises(UnlearnError, match="draws from files of JSON lines"):
        draw_retain({"datasets": [entry]}, tmp_path, 5)


def test_a_faulty_row_is_named_by_its_source(tmp_path):
    entry = rows_file(tmp_path / "retain.jsonl", "retain", 0)
    (tmp_path / "retain.jsonl").write_text('{"id": "a", "input": "b"}\n', "utf-8")
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(config(tmp_path, [entry], retain_rows=4)), "utf-8")
    (fault,) = check(file)[0]
    assert f"the rows drawn from {tmp_path / 'retain.jsonl'}" in fault


def test_streams_of_axolotl_are_the_retain_side(tmp_path):
    """`streaming` and `pretraining_dataset` were refused. 3 forget rows, 2 epochs, 2 beside each:
    12 retain rows are read, so 12 are drawn."""
    corpus = tmp_path / "corpus.jsonl"
    rows = ({"text": f"Text number {n} of a corpus."} for n in range(200))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    entry = rows_file(tmp_path / "retain.jsonl", "retain", 200)
    for given in (
        {"streaming": True, "datasets": [rows_file(tmp_path / "f.jsonl", "forget", 3), entry]},
        {"pretraining_dataset": [{"path": "json", "data_files": str(corpus)}]},
    ):
        cfg = config(tmp_path, []) | {"num_epochs": 2} | given
        cfg["unlearn"]["pairing"] = {"retain_per_forget": 2}
        file = tmp_path / "config.yml"
        file.write_text(yaml.safe_dump(cfg), "utf-8")
        faults, lines, _ = check(file, full=False)
        assert faults == [] and any("12 rows" in line for line in lines), lines
        prepare(cfg)
        prepare_data(cfg)
        assert not {"streaming", "pretraining_dataset"} & set(cfg)
        (own,) = (one for one in cfg["datasets"] if one["type"] == KIND + "retain")
        assert len(Path(own["path"]).read_text("utf-8").splitlines()) == 12


def test_a_corpus_beside_typed_rows_needs_a_type_of_its_own(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a"}\n', "utf-8")
    cfg = config(tmp_path, []) | {"pretraining_dataset": [{"path": str(corpus)}]}
    cfg["unlearn"]["data"] = {"rows": {"type": "alpaca"}}
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(cfg), "utf-8")
    says = "add `{type: pretrain}` there"
    assert any(says in fault for fault in check(file, full=False)[0])
