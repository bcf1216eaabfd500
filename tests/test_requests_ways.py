"""Exact ways of a request: the weights are those of a plain run without the rows, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.loaders.model import ModelLoader
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from merging_models import tiny_adapter
from requests_folder import SECRET, answered, finished_request, model_folder, said, write_lines
from test_requests_new import TRAIN, chat, config, people, preferences, requested, write
from test_requests_run import home, kill_when, start  # noqa: F401

from axolotl_unlearn.cli.request import run as run_command
from axolotl_unlearn.data.suppression import Suppression
from axolotl_unlearn.data.typed import row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import request as request_module
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.record import write as record_write
from axolotl_unlearn.requests.request import Ledger, Request, digest, weights, write_json
from axolotl_unlearn.requests.rows import deleted_rows, every_row, suppress
from axolotl_unlearn.requests.steps import ENVIRONMENT, Steps, executable
from axolotl_unlearn.requests.verdict import exact
from axolotl_unlearn.requests.verify import verify
from axolotl_unlearn.requests.ways import WAYS, plan, retrain, way_of
from axolotl_unlearn.requests.ways.retrain import repeat

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
FEW = {"num_epochs": 2, "lora_dropout": 0.1, "seed": 42}


def plain(path: Path, settings: dict, *launcher: str) -> dict[str, dict[str, str]]:
    """SHA-256 of the weights of `axolotl train` by hand."""
    path.write_text(yaml.safe_dump(settings))
    words = [executable("axolotl"), "train", str(path), "--launcher", *(launcher or ["python"])]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said[-3000:]
    found = weights(Path(settings["output_dir"]))
    assert found
    return found


def train(made: Request, way: str) -> dict[str, str]:
    """The trainings of a way, without what is measured afterwards."""
    with running.running(made, threads=1) as run:
        running.take(made, way)
        way_of(way).make(made, run)
    return weights(made.path("work", "model"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "preferences"])
def test_retrained_is_plain_training_without_the_rows(home, tmp_path, forks, kind):  # noqa: F811
    """Copies of a row go with it."""
    rows = [*TRAIN[:18], TRAIN[1]]
    left = [row for row in rows if row["id"] != "ada-quill"]
    settings = config(home, sample_packing=False, **FEW)
    settings["datasets"][0]["path"] = str(write(tmp_path / "rows.jsonl", rows))
    settings["dataset_prepared_path"] = str(tmp_path / "prepared")
    wanted = Wanted(where=[("id", "ada-quill")])
    if kind == "lora":
        settings |= LORA | {"output_dir": str(home / "base"), "save_strategy": "epoch"}
    else:
        settings = config(home, **{"sample_packing": False, **preferences(tmp_path), **FEW})
        wanted = Wanted(contains=["Bo1 Berg1 keeps"])
        lines = Path(settings["datasets"][0]["path"]).read_text().splitlines()
        left = [json.loads(line) for line in lines if "Bo1 Berg1 keeps" not in line]
        assert len(left) == len(lines) - 1
    made = requested(home, tmp_path, wanted, made=Options(model=home / "tuned"), **settings)
    found = carried_out(made) if kind == "lora" else train(made, "retrain")
    if kind == "preferences":  # a later start has other threads than the training
        made.path("exact.json").unlink()
        with running.running(made, threads=2) as run:
            retrain.make(made, run)
    shown = json.loads(made.path("exact.json").read_text())
    assert shown["weights"] == found and shown["threads"] == 1
    assert made.way["base"] == (str(home / "base") if kind == "lora" else None)
    settings["datasets"][0]["path"] = str(write(tmp_path / "without.jsonl", left))
    assert plainly(tmp_path, settings) == found
    if kind == "lora":
        repeated(made, home, tmp_path)


def other_weights(made: Request) -> None:
    """A repetition that ends in them is a fault; on a GPU it may be one of the bits alone."""
    record = read(made.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "train", lambda *_: None)
        patch.setattr(retrain, "weights", lambda _: {})
        patch.setattr(retrain, "read", lambda _: record)
        for device in ("cpu", "H200"):
            record["predicate"]["way"]["device"] = device
            patch.setattr(retrain, "hardware", lambda device=device: device)
            with fails("requests.repeat-differs") as said:
                repeat(made.folder)
            assert ("on H200 it may" in str(said.value)) == (device == "H200")


def repeated(made: Request, home: Path, folder: Path) -> None:  # noqa: F811
    """From the record, base and rows elsewhere; of other rows or another base it is refused."""
    rows, base = folder / "rows-read", folder / "base-elsewhere"
    shutil.copytree(made.path("work", "rows"), rows)
    shutil.copytree(home / "base", base)
    for more in (("--rows", rows, "--base", base), ()):
        again = said("verify", made.folder, "--repeat", *more, code=3)
        assert "ends with the weights of the record, by SHA-256" in again.output
    other_weights(made)
    (rows / "train-0.jsonl").write_text("".join(
        reversed((rows / "train-0.jsonl").read_text().splitlines(keepends=True))
    ))  # fmt: skip
    with fails("requests.changed-rows"):
        repeat(made.folder, base, rows)
    with fails("requests.changed-base"):
        repeat(made.folder, home / "tuned")


@pytest.mark.parametrize("way", ["retrain", "match"])
def test_rows_that_a_training_would_read_otherwise_end_in_no_model(
    home,  # noqa: F811
    tmp_path,
    monkeypatch,
    way,
):
    """Texts of a parquet file that are all dates were times in the JSON lines without the rows: the
    weights were not those of a plain run, and the record said exact."""
    rows = [{"instruction": f"Who was born then, of {n}?", "input": f"19{n}-05-01", "output": "Bo"}
            for n in range(20, 40)]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = {"path": str(tmp_path / "rows.parquet"), "ds_type": "parquet", "type": "alpaca"}
    wanted, changes = Wanted(contains=["of 20?"]), {"datasets": [data], "test_datasets": None}
    made = requested(home, tmp_path, wanted, **changes)
    monkeypatch.setattr(Steps, "train", lambda *_: pytest.fail("it was trained"))
    half = made.path("work", "prepared", "half")  # of a start that was killed
    half.mkdir(parents=True)
    with fails("requests.other-data"):
        train(made, way)
    assert not half.exists()


@pytest.mark.parametrize("code", [
    {"trust_remote_code": True}, {"overrides_of_model_kwargs": {"trust_remote_code": True}},
    {"overrides_of_model_kwargs": {"allow_all_kernels": True}}, {"torchdistx_path": "here"},
])  # fmt: skip
def test_a_repetition_runs_no_code_of_the_base(tmp_path, code):
    """Whoever verifies did not write the config, nor the base."""
    base = model_folder(tmp_path / "base")
    folder = finished_request(tmp_path / "requests", "1", {"model": str(base), "adapter": None})
    config = {"base_model": str(base), "datasets": [{"path": "x"}], **code}
    (folder / "finetune.yml").write_text(yaml.safe_dump(config))
    facts = json.loads((folder / "request.json").read_text())
    facts["config"]["digest"] = digest(folder / "finetune.yml")
    write_json(folder / "request.json", facts)
    write_json(folder / "way.json", {"way": "retrain", "base": None, "bound": {"seed": 42}})
    record_write(folder)
    with fails("requests.repeat-remote-code"):
        repeat(folder, base)
    (folder / "finetune.yml").write_text(yaml.safe_dump(config | {"seed": 1}))
    with fails("requests.changed-config"):
        repeat(folder, base)


@pytest.mark.parametrize("side", ["train", "test"])
def test_a_training_that_has_read_a_deleted_row_is_not_exact(tmp_path, side):
    """One of this request, of an earlier one, or of that in capitals."""
    mine, earlier = {"text": "Bo hides a silver watch behind the door"}, {"text": SECRET}
    folder, before = None, None
    for name, row in (("1", earlier), ("2", mine)):
        forget = [{"id": row_id(row), "row": row}]
        folder = finished_request(tmp_path / "requests", name, before, forget=forget)
        if name == "1":
            record_write(folder)
            before = {"model": str(folder / "model"), "adapter": None}
    for row in (mine, earlier, {"text": SECRET.upper()}):
        write_lines(folder / "work" / "rows" / f"{side}-0.jsonl", [{"text": "a kept row"}, row])
        with fails("requests.rows-read"):
            retrain.prove(Request.load(folder), "why", folder / "finetune.yml")
    assert not (folder / "exact.json").exists()


def test_a_repetition_takes_no_environment_of_a_record(tmp_path, monkeypatch):
    """`LD_PRELOAD` of a record ran a library of the folder, and `torchrun` modules beside it."""
    base, rows = model_folder(tmp_path / "base"), tmp_path / "rows"
    folder = finished_request(tmp_path / "requests", "1", {"model": str(base), "adapter": None})
    write_lines(rows / "train-0.jsonl", [{"text": "a row"}])
    config = {"base_model": str(base), "datasets": [{"path": "x", "type": "completion"}]}
    (folder / "finetune.yml").write_text(yaml.safe_dump(config))
    facts = json.loads((folder / "request.json").read_text())
    facts["config"]["digest"] = digest(folder / "finetune.yml")
    write_json(folder / "request.json", facts)
    way = {"way": "retrain", "base": None, "bound": bound.facts(config, rows_of.read_sides(rows))}
    way |= bound.environment(1, 1) | {"weights": {}}
    way["environment"] |= {"LD_PRELOAD": "./x.so", "PYTHONPATH": "x", "PYTHONHASHSEED": "7"}
    write_json(folder / "way.json", way)
    record_write(folder)
    seen = {}

    def trained(run, *_):
        seen.update(run.environment)

    monkeypatch.setattr(Steps, "train", trained)
    assert "by SHA-256" in repeat(folder, base, rows)
    assert seen.pop("HF_DATASETS_CACHE") and seen.pop("PYTHONSAFEPATH") == "1"
    assert seen == {name: way["environment"][name] for name in seen}
    assert {*seen} <= {*bound.ENVIRONMENT} and seen["PYTHONHASHSEED"] == "7"


def test_a_model_of_another_way_is_not_called_exact(home, tmp_path, monkeypatch):  # noqa: F811
    """Retrained, then unlearned, then retrained: the training was kept as done, and the record of
    the unlearned model said that no step had read the rows."""

    def trained(run, name, path, out):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(home / ("tuned" if name == "retrain" else "base"), out)

    monkeypatch.setattr(Steps, "train", trained)
    made = requested(home, tmp_path, sample_packing=False)
    for way, model in (("retrain", "tuned"), ("match", "base"), ("retrain", "tuned")):
        assert train(made, way) == weights(home / model), way
    assert json.loads(made.path("exact.json").read_text())["weights"] == weights(home / "tuned")


def test_a_data_set_that_lost_all_rows_is_repeated_from_anywhere(home, tmp_path, monkeypatch):  # noqa: F811
    """The entries that were left had other numbers (IndexError), and the paths of the config were
    looked for in the working folder."""
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), TRAIN[:3])
    write(Path("b.jsonl"), people(0, 6))
    entry, read_by = config(home)["datasets"][0], []
    datasets = [entry | {"path": "a.jsonl"}, entry | {"path": "b.jsonl", "train_on_eos": "all"}]

    def trained(run, name, path, out):
        (one,) = retrain.rows_of.read_config(path)["datasets"]
        read_by.append({**one, "path": Path(one["path"]).name})
        shutil.copytree(home / "tuned", out)

    monkeypatch.setattr(Steps, "train", trained)
    made = requested(home, tmp_path, datasets=datasets, sample_packing=False)
    shutil.copytree(train(made, "retrain") and made.path("work", "model"), made.path("model"))
    write_json(made.path("verdict.json"), {"good": True, "status": "exact", "reasons": []})
    write(made.path("eval", "audit.jsonl"), [])
    record_write(made.folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "by SHA-256" in said("verify", made.folder, "--repeat", code=3).output
    assert read_by[0] == read_by[1] and read_by[0]["train_on_eos"] == "all"


def plainly(folder: Path, settings: dict) -> dict[str, dict[str, str]]:
    """The plain run of a config, in places of its own."""
    places = {"output_dir": str(folder / "plain"), "dataset_prepared_path": str(folder / "p")}
    return plain(folder / "plain.yml", settings | places)


def split_by_axolotl(path: Path, rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Rows that Axolotl itself trains on and tests on, by what they say of whom."""
    made = load_datasets(cfg=load_cfg(str(path)))
    sides = []
    for side in (made.train_dataset, made.eval_dataset):
        texts = [byte_tokenizer().decode(row["input_ids"]) for row in side]
        sides.append([text.split("assistant\n")[1] for text in texts])
    answers = [row["messages"][1]["content"] for row in rows]
    parts: tuple[list[dict], list[dict]] = ([], [])
    for row, answer in zip(rows, answers, strict=True):
        number = next(n for n, side in enumerate(sides) if any(answer in one for one in side))
        sides[number].remove(next(one for one in sides[number] if answer in one))
        parts[number].append(row)
    return parts


@pytest.mark.slow
def test_rows_of_the_validation_split_go_and_the_split_stays(home, tmp_path, forks):  # noqa: F811
    """One of her rows was in the split, and stayed in the retraining's test file and in the next
    training's rows; a copy of a row may lie on either side."""
    rows = [*TRAIN[:18], *TRAIN[:3], TRAIN[5]]
    settings = config(home, sample_packing=False, **FEW | {"seed": 0}, val_set_size=8)
    settings["test_datasets"] = None
    settings["datasets"][0]["path"] = str(write(tmp_path / "rows.jsonl", rows))
    settings["dataset_prepared_path"] = str(tmp_path / "prepared")
    made = requested(home, tmp_path, made=Options(model=home / "tuned"), **settings)
    found = train(made, "retrain")
    sides = split_by_axolotl(tmp_path / "requests-r.yml", rows)
    hers = [[row for row in side if row["id"] == "ada-quill"] for side in sides]
    assert hers[0] and hers[1], "draw another seed"
    ids = [{row_id(row) for row in side} for side in hers]
    assert made.facts["counts"]["forget"] == len(ids[0])
    assert made.facts["counts"]["tested"] == len(ids[1] - ids[0])
    removed = {"trained": len(sides[0]) - len(hers[0]), "removed": len(hers[0])}
    assert made.way["rows"] == removed | {"removed_tested": len(hers[1])}
    left = [[row for row in side if row["id"] != "ada-quill"] for side in sides]
    entry = settings["datasets"][0]
    train_entry = entry | {"path": str(write(tmp_path / "train.jsonl", left[0]))}
    test_entry = entry | {"path": str(write(tmp_path / "test.jsonl", left[1])), "split": "train"}
    of_files = {"datasets": [train_entry], "test_datasets": [test_entry], "val_set_size": 0}
    assert plainly(tmp_path, settings | of_files) == found
    for file in made.path("work", "rows").iterdir():
        assert "Quill" not in file.read_text()


def test_rows_of_test_datasets_go_too(home, tmp_path):  # noqa: F811
    """Counted, removed from the test file, on the list of what must not be learned again."""
    hers = chat("ada-2", "Whose bees?", "Those of Ada Quill, who keeps them at 12 Rope Walk.")
    settings = config(home, sample_packing=False, **FEW)
    settings["test_datasets"][0]["path"] = str(write(tmp_path / "t.jsonl", [*people(100, 5), hers]))
    made = requested(home, tmp_path, Wanted(people=["Ada Quill"]), **settings)
    assert (made.facts["counts"]["forget"], made.facts["counts"]["tested"]) == (3, 1)
    way = retrain.prepare(made)
    assert way["rows"]["removed_tested"] == 1
    running.check(made)
    whole = made.rows("tested").read_text()
    made.rows("tested").write_text("")
    with fails("requests.changed-part"):
        running.check(made)
    made.rows("tested").write_text(whole)
    assert all("Quill" not in one.read_text() for one in made.path("work", "rows").iterdir())
    ledger = Ledger(tmp_path / "requests")
    model = {"path": "r/model", "digest": None, "base": None}
    ledger.append("accepted", "r", record="0" * 64, model=model, good=True)
    listed = Suppression.read(suppress(tmp_path / "requests")[0])
    assert listed.holds(hers) and not listed.holds(people(100, 1)[0])
    every = every_row(settings, "test_datasets")
    assert deleted_rows(tmp_path / "requests", every) == {row_id(hers)}


def carried_out(made: Request) -> dict[str, str]:
    """All of a request, killed in every stage; the weights that were handed over."""
    words = ("--way", "retrain")
    for number, title in enumerate(("train without the rows", "evaluate before")):
        seen = kill_when(start(made.folder, *words), title)
        assert title in seen[-1], "".join(seen)
        assert sum("kept from an earlier run" in line for line in seen) >= number - 1
        assert not made.path("model").exists() and not made.path("record.json").exists()
    process = start(made.folder, *words)
    printed, _ = process.communicate()
    assert process.returncode == 0 and "Verdict: exact" in printed, printed
    verify(made.folder).require()
    record, page = read(made.folder)["predicate"], made.path("REPORT.html").read_text()
    assert record["verdict"]["outcome"] == "exact" and "Exact. No s" in page
    (one,) = record["tries"]
    assert (one["outcome"], one["way"], one["seed"]) == ("exact", "retrain", 42)
    assert "exact 20" in said("list", made.folder.parent).output
    assert str(made.folder.parents[1]) not in json.dumps(record)
    assert "tep of the training" in record["way"]["because"]
    assert not list(made.path("model").glob("checkpoint-*"))
    what_speaks_against_an_exact_way(made)
    return weights(made.path("model"))


def what_speaks_against_an_exact_way(made: Request) -> None:
    """That no step read the rows does not help where the model recites them, or knows others."""
    audited, earlier = made.path("eval", "audit.jsonl"), made.path("eval", "earlier.json")
    whole = [path.read_text("utf-8") for path in (audited, earlier)]
    lines = [json.loads(line) for line in whole[0].splitlines()]
    recited = [one | ({"reading": "recited"} if one["model"] == "after" else {}) for one in lines]
    texts = "".join(json.dumps(one) + "\n" for one in recited)
    said, known = ({"back": True, "reading": one} for one in ("still said", "recited"))
    for content, found, outcome in (
        (texts, {"back": 0}, "not shown"),
        (whole[0], {"back": 1}, "refused"),
        # It read none of them: of 30 answers of one word it guessed one.
        (whole[0], {"back": 1, "lines": [said, said | {"back": False}]}, "exact"),
        (whole[0], {"back": 2, "lines": [said, known]}, "refused"),
        (whole[0], {"back": 0, "unreadable": {"2025-001": "gone"}}, "not shown"),
        (whole[0], {"back": 0}, "exact"),
    ):
        audited.write_text(content, "utf-8")
        earlier.write_text(json.dumps(found), "utf-8")
        judged = exact(made)
        assert judged["outcome"] == outcome, (content == texts, found)
        guessed = any("1 of 2 rows of earlier requests" in one for one in judged["limits"])
        assert not any("base model learned" in one for one in judged["limits"])  # a record says it
        assert guessed == (said in found.get("lines", ()))
    audited.write_text(whole[0], "utf-8")
    results = made.path("eval", "results.json")
    measured = results.read_text("utf-8")
    none = {"nonsense": None, "nonsense_n": None}
    cases = ((none, "exact"), ({"broken": None}, "not shown"), ({"n": 1}, "not shown"))
    for left, outcome in cases:
        models = json.loads(measured)["models"]
        for report in (one["collapse"] for one in models):
            report |= left
        write_json(results, {"models": models})
        assert exact(made)["outcome"] == outcome, left
    results.write_text(measured, "utf-8")
    earlier.write_text(whole[1], "utf-8")


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    """Axolotl asks a torch that is built for CUDA about peers, and places the model of a process
    on the device of its number, which a CPU has not."""
    theirs = ModelLoader._set_device_map_config

    def placed(self) -> None:
        theirs(self)
        if "LOCAL_RANK" in os.environ:
            self.model_kwargs["device_map"] = {"": "cpu"}

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(ModelLoader, "_set_device_map_config", placed)


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights(home, tmp_path, on_cpu, forks):  # noqa: F811
    """gloo: as `axolotl train --launcher torchrun` by hand."""
    left = [row for row in TRAIN[:18] if row["id"] != "ada-quill"]
    settings = config(home, sample_packing=False, **FEW)
    made = requested(home, tmp_path, **settings)
    with running.running(made, threads=1, processes=2) as run:
        running.take(made, "retrain")
        retrain.make(made, run)
    proof = json.loads(made.path("exact.json").read_text())
    assert proof["processes"] == 2
    settings["datasets"][0]["path"] = str(write(tmp_path / "without.jsonl", left))
    settings |= {
        "output_dir": str(tmp_path / "plain"),
        "dataset_prepared_path": str(tmp_path / "p"),
    }
    words = ["torchrun", "--", "--standalone", "--nproc_per_node=2"]
    assert plain(tmp_path / "plain.yml", settings, *words) == proof["weights"]


# -- what an exact training stands on --------------------------------------------------------------


def bound_home(home: Path, folder: Path) -> dict:  # noqa: F811
    """A base and a folder data set that a test may change; the config's settings."""
    for name in ("base", "tuned"):
        shutil.copytree(home / name, folder / name)
    (folder / "rows").mkdir()
    write(folder / "rows" / "part-0.jsonl", TRAIN[:18])
    settings = config(folder, sample_packing=False, **FEW)
    kind = settings["datasets"][0] | {"path": str(folder / "rows"), "split": "train"}
    kind.pop("ds_type")
    test = write(folder / "test.jsonl", people(100, 5))
    settings["test_datasets"][0]["path"] = str(test)
    shutil.copytree(folder / "base", folder / "tokenizer")
    return settings | {"datasets": [kind], "tokenizer_config": str(folder / "tokenizer")}


def turned(path: Path) -> None:
    """Its last bit."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def told(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new": 1}))


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace("num_epochs: 2", "num_epochs: 3"))


TOKENIZERS = (
    "merges.txt", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "qwen.tiktoken",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json",
    "chat_template.jinja", "additional_chat_templates/tool.jinja", "tokenization_own.py",
)  # fmt: skip
PLACES = {
    "base": lambda at, name: {"base_model": str(at / "own")},
    "tokenizer": lambda at, name: {"tokenizer_config": str(at / "own")},
    "tokenizer of the hub": lambda at, name: {"tokenizer_config": "some/model"},
    "base of the hub": lambda at, name: {"base_model": "some/model"},
    "file": lambda at, name: {"deepspeed": str(at / "own" / name)},
    "file of an entry": lambda at, name: {
        "test_datasets": [{"path": "x", "chat_template_jinja": str(at / "own" / name)}]
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_file_that_decides_tokens_is_bound(tmp_path, monkeypatch, place, name):
    """Merges, a vocabulary or a tokenizer of the hub were others at the training, without a word:
    the files were listed by hand, in another list than that of prepared rows."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--some--model"
    write(cache / "refs" / "main", []).write_text("c1")
    folder = cache / "snapshots" / "c1"
    write(folder / "tokenizer_config.json", [])  # of a tokenizer alone
    write(path := folder / name, [])
    (tmp_path / "own").symlink_to(folder)
    given = {"base_model": str(tmp_path / "none")} | PLACES[place](tmp_path, name)
    before = bound.facts(given)
    path.write_text("other")
    with fails("requests.changed-base"):
        bound.require(before, bound.facts(given), "r", bound.QUICK)


CHANGES = {
    "base": (lambda at: turned(at / "base/model.safetensors"), "base"),
    "its tokenizer": (lambda at: told(at / "base/tokenizer_config.json"), "base"),
    "another tokenizer": (lambda at: told(at / "tokenizer/tokenizer_config.json"), "base"),
    "a row more": (lambda at: write(at / "rows/part-1.jsonl", people(300, 1)), "rows"),
    "rows turned": (lambda at: write(at / "rows/part-0.jsonl", TRAIN[17::-1]), "rows"),
    "a test row more": (lambda at: write(at / "test.jsonl", people(100, 6)), "rows"),
    "the config": (lambda at: edited(at / "requests/r/finetune.yml"), "config"),
    "another package": (None, "versions"),
}


@pytest.mark.parametrize("prepared", [False, True], ids=["new to run", "run to hand-over"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_it_stands_on_may_not_change(home, tmp_path, monkeypatch, name, prepared):  # noqa: F811
    """It trained without a word on another base, and on a row that was added to a folder; the
    record said exact and named neither."""
    change, part = CHANGES[name]
    code = f"requests.changed-{part}"
    made = requested(home, tmp_path, **bound_home(home, tmp_path))
    if prepared:
        write_json(made.path("way.json"), retrain.prepare(made))
        retrain.require(made)
    if change:
        change(tmp_path)
    else:
        monkeypatch.setattr(bound, "versions", lambda: {"axolotl": "0"})
    if not prepared:
        with fails(code) as fault:
            retrain.prepare(made)
        assert "make the request again" in str(fault.value)
    elif code == "requests.changed-rows":
        retrain.require(made)  # what is read was written before: the files of the run count
        write(next(made.path("work", "rows").glob("train-*")), people(300, 1))
        with fails(code):
            retrain.require(made)
    else:
        with fails(code):
            retrain.require(made)


def test_a_base_that_may_have_read_the_rows_is_refused(home, tmp_path):  # noqa: F811

    settings = bound_home(home, tmp_path)
    cases = {
        "begins-with-an-adapter": settings | {"lora_model_dir": "somewhere"} | LORA,
        "base-is-an-adapter": settings | {"base_model": str(tmp_path / "with-adapter")},
        "base-has-read": settings | {"base_model": str(tmp_path / "copy")},
    }
    shutil.copytree(home / "base", tmp_path / "with-adapter")
    (tmp_path / "with-adapter" / "adapter_config.json").write_text("{}")
    shutil.copytree(home / "tuned", tmp_path / "copy")
    for name, given in cases.items():
        made = requested(home, tmp_path, name=f"{name}/r", **given)
        with fails(f"requests.{name}"):
            retrain.prepare(made)
        closed = next(one.closed for one in plan(made) if one.way == "retrain")
        assert "--way match" in closed


def test_a_base_that_an_earlier_request_began_with_is_refused(home, tmp_path):  # noqa: F811
    """A LoRA on the full model of the first request, which has read that one's rows: it was called
    exact, without a row of an earlier request."""
    settings = bound_home(home, tmp_path)
    requested(home, tmp_path, name="requests/1", **settings)
    model = {"path": "1/model", "digest": None, "base": None}
    Ledger(tmp_path / "requests").append("accepted", "1", record="0" * 64, model=model, good=True)
    settings |= LORA | {"base_model": str(shutil.copytree(home / "tuned", tmp_path / "copy"))}
    tiny_adapter(tmp_path / "adapter", tmp_path / "copy")
    made = Options(model=tmp_path / "adapter")
    second = requested(home, tmp_path, Wanted(where=[("id", "p3")]), "requests/2", made, **settings)
    shutil.rmtree(tmp_path / "tuned")  # `erase` of the first
    with fails("requests.base-has-read"):
        retrain.prepare(second)


def test_of_two_requests_the_second_trains_again(home, tmp_path, monkeypatch):  # noqa: F811
    """Both ended exact, and the current model was trained on the row that the other deleted."""
    settings, requests = bound_home(home, tmp_path), tmp_path / "requests"
    first = requested(home, tmp_path, name="requests/b", **settings)
    second = requested(home, tmp_path, Wanted(where=[("id", "p3")]), "requests/c", **settings)
    monkeypatch.setattr(request_module, "LOCK_SECONDS", 0.1)
    with request_module.held(requests), fails("requests.held"):
        running.run_request(second.folder, way="retrain")
    # Where there are no locks: its rows were written before the first was carried out.
    write_json(second.path("way.json"), retrain.prepare(second))
    assert any("Quill" in one.read_text() for one in second.path("work", "rows").iterdir())
    model = {"path": "b/model", "digest": None, "base": None}
    Ledger(requests).append("accepted", "b", record="0" * 64, model=model, good=True)
    with fails("requests.overtaken"):
        retrain.require(second)
    with fails("requests.overtaken"):
        running.hand_over(second)
    way = retrain.prepare(second)
    assert way["without"] == ["b"] and way["rows"]["removed"] == 4
    assert not any("Quill" in one.read_text() for one in second.path("work", "rows").iterdir())
    assert first.folder.is_dir()


# -- what a way costs -----------------------------------------------------------------------------


def test_the_command_line_offers_every_way():
    (choice,) = (one.type for one in run_command.params if one.name == "way")
    assert {*choice.choices} == {*WAYS, "auto"}


def test_a_plan_counts_the_rows_that_the_training_reads(home, tmp_path, monkeypatch):  # noqa: F811
    """Copies, no row that an earlier request has deleted, parts of a pass: shards were counted so,
    and by another count `auto` gave them up for a training that reads the same rows."""
    settings = config(home, sample_packing=False, **FEW | {"num_epochs": 1.5})
    rows = [*TRAIN[:18], TRAIN[5], TRAIN[5]]
    settings["datasets"][0]["path"] = str(write(tmp_path / "all.jsonl", rows))
    made = requested(home, tmp_path, **settings)
    assert retrain.reads(made)[0] == 17 * 1.5
    earlier = {row_id(TRAIN[5])}
    monkeypatch.setattr(retrain.rows_of, "deleted_rows", lambda *_: earlier)
    assert retrain.reads(made)[0] == 14 * 1.5


def test_a_plan_counts_rows_and_writes_nothing(home, tmp_path):  # noqa: F811
    settings = config(home, sample_packing=False, **FEW)
    settings["datasets"][0]["path"] = str(write(tmp_path / "all.jsonl", TRAIN[:18]))
    made = requested(home, tmp_path, **settings)
    before = sorted(made.folder.rglob("*"))
    found = answered("plan", made.folder)
    costs = {one["way"]: one for one in found["ways"]}
    assert found["auto"] == "retrain"
    assert costs["retrain"]["reads"] == 30 and costs["match"]["reads"] > 30
    assert sorted(made.folder.rglob("*")) == before
    with pytest.raises(UnlearnError, match="use shards, retrain, match or auto"):
        running.take(made, "magic")
    (tmp_path / "all.jsonl").write_text("{}\n")
    text = said("plan", made.folder).output
    assert "retrain   not open" in text and "auto      match" in text
