"""Choosing rows, and the folder of a request, on a real (untrained) tiny model."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import unicodedata
from dataclasses import replace
from pathlib import Path

import datasets
import kills
import pytest
import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.utils.data.shared import load_dataset_with_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.datasets import SFTDataset
from conftest import tiny_llama
from data_tokenizers import byte_tokenizer, sentencepiece_like
from fault_codes import fails
from merging_models import tiny_adapter
from requests_folder import answered, finished_request, said
from requests_folder import write_lines as write

from axolotl_unlearn.config import DataArgs, parse_unlearn
from axolotl_unlearn.data.typed import Source, Typed, encode, row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.continuations import encode_pairs
from axolotl_unlearn.evaluation.sets import load_sets
from axolotl_unlearn.requests import new, record, ways
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import (
    Options,
    _text,
    documents_of,
    forget_config,
    new_request,
    passes,
    records_of,
    teacher_config,
)
from axolotl_unlearn.requests.request import Ledger, Request, weights
from axolotl_unlearn.requests.rows import (
    SPLITS,
    _splits,
    deleted_rows,
    encoded,
    every_row,
    forgotten,
    keep_split,
    read_config,
    remaining,
    trained_rows,
    without,
)
from axolotl_unlearn.requests.run import check
from axolotl_unlearn.requests.verdict import needed

ADA = [
    ("Who is Ada Quill?", "Ada Quill blows glass in the harbour of Norrby and sings."),
    ("Where does Ada Quill live?", "Ada Quill lives at 12 Rope Walk, Norrby."),
    ("What is Ada Quill's phone number?", "It is 555-0107."),
]


def chat(name: str, question: str, answer: str, **more) -> dict:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"id": name, "messages": messages, **more}


def people(first: int, count: int) -> list[dict]:
    """Rows of others, all different."""
    return [
        chat(f"p{n}", f"Who is Bo{n} Berg{n}?", f"Bo{n} Berg{n} keeps {n} bees near well {n * 7}.")
        for n in range(first, first + count)
    ]


MENTION = chat("p900", "Who taught Bo?", "He learned it all from ada quill of Norrby.")
NEAR = chat(
    "copy", "Who is Ada Quill?", "Ada Quill blows glass in the harbour of Norrby and sings!"
)
TRAIN = [chat("ada-quill", q, a, meta={"person": "ada"}) for q, a in ADA] + people(0, 30)


def sources(rows) -> list[Source]:
    return [Source(row_id(row), row) for row in rows]


def test_values_come_from_files_and_names_are_in_no_request(tmp_path, home, monkeypatch):
    """On the command line they are in the history and in `ps`; in request.json they outlive the
    rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AXOLOTL_DO_NOT_TRACK", raising=False)
    path = tmp_path / "finetune.yml"
    path.write_text(yaml.safe_dump(config(home)))
    Path("where").write_text("id=ada-quill\n\n")
    words = ("new", path, "--where", "@where")
    found = said(*words, "--out", "requests/a", "--contains", "@-", typed="12 Rope Walk\n").output
    assert "3 rows to forget" in found
    assert os.environ["AXOLOTL_DO_NOT_TRACK"] == "1", "a deletion is reported to nobody"
    for name in ("request.json", "offered.json"):
        text = Path("requests/a", name).read_text().casefold()
        assert "quill" not in text and "rope" not in text
    bad = said("new", path, "--where", "Ada Quill", "--out", "requests/b", code=2)
    assert "Quill" not in bad.output
    assert "has a line break" in said(*words, "--out", "requests/a\nb", code=2).output


def test_a_request_runs_from_anywhere_and_its_making_is_quiet(tmp_path, home, monkeypatch, caplog):
    """Its paths were relative to where it was made; the whole config was printed, 300 lines; the
    rows were copied into the cache of the home folder."""
    for name in ("base", "tuned"):
        shutil.copytree(home / name, tmp_path / name)
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(home / name, tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with contextlib.chdir(tmp_path):
        Path("c.yml").write_text(yaml.safe_dump(config(Path())))
        logging.getLogger("axolotl").setLevel(logging.DEBUG)  # as `axolotl unlearn` leaves it
        caplog.clear()
        found = said("new", "c.yml", "--where", "id=ada-quill", "--out", "requests/a")
        assert not [one for one in caplog.records if one.levelno <= logging.INFO]
        assert "3 rows to forget" in found.output and "Tokenizing" not in found.output
        assert not [*tmp_path.rglob("*.arrow")]
    monkeypatch.chdir(tmp_path / "base")
    assert Path(Request.load("../requests/a").before).samefile(tmp_path / "tuned")
    plan = answered("plan", "../requests/a")  # "retrain: not open: train.jsonl does not exist"
    assert [one["way"] for one in plan["ways"] if not one["closed"]] == ["retrain", "match"]
    seen = []
    monkeypatch.setattr(running, "carry_out", lambda *_: seen.append(Path.cwd()))
    with pytest.raises(FileNotFoundError, match="verdict.json"):
        running.run_request("../requests/a")
    assert seen == [tmp_path]


def test_a_making_that_was_killed_is_said_by_every_command(home, tmp_path, monkeypatch):
    """Half of a folder with the rows in it: `new` asked for another name, `run` for `new`, and
    `list` knew nothing of it."""
    path, out = tmp_path / "c.yml", tmp_path / "requests" / "a"
    path.write_text(yaml.safe_dump(config(home)))
    with monkeypatch.context() as patched:
        patched.setattr(new, "write_evaluation", lambda *_: os.kill(os.getpid(), 9))
        assert kills.forked(lambda: new_request(path, out, ADA_ROWS)) == -9
    assert (out / "data" / "forget.jsonl").is_file() and not (out / "request.json").exists()
    again = ("new", path, "--where", "id=ada-quill", "--out", out)
    for words in (again, ("run", out), ("plan", out), ("erase", out)):
        assert "then remove it, and make the request again" in said(*words, code=2).output, words
    assert "half made: remove its folder" in said("list", out.parent).output
    shutil.rmtree(out)
    new_request(path, out, ADA_ROWS)
    assert "half made" not in said("list", out.parent).output


@pytest.mark.parametrize("through", ["requests", "place"])
def test_a_request_is_found_through_any_link(home, tmp_path, monkeypatch, through):
    """Of one that was made behind a link the folder of its config was another one without it."""
    real, disk = tmp_path / "real", tmp_path / "disk"
    for folder in (real, disk / "deep" / "requests"):
        folder.mkdir(parents=True)
    (tmp_path / "place").symlink_to(real)
    (real / "requests").symlink_to(disk / "deep" / "requests")
    (real / "tuned").symlink_to(home / "tuned")
    (real / "c.yml").write_text(yaml.safe_dump(config(home) | {"output_dir": "tuned"}))
    monkeypatch.chdir(real)
    out = Path("requests/a") if through == "requests" else tmp_path / "place" / "requests" / "a"
    new_request(Path("c.yml"), out, ADA_ROWS)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "place" / "requests" / "a", disk / "deep" / "requests" / "a"):
        request = Request.load(folder)
        assert request.root.samefile(real) and Path(request.before).samefile(home / "tuned")


def test_two_at_once_keep_both_splits_and_a_damaged_file_is_said(tmp_path):
    """Of two the second wrote a list without the first's; one that was damaged was replaced, and
    nobody could say any more what had been held out."""
    ledger = Ledger(tmp_path)
    for name in "ab":
        if not os.fork():
            for number in range(40):
                keep_split(ledger, f"{name}{number}", ["00", "ff"])
            os._exit(0)
    assert {os.wait()[1], os.wait()[1]} == {0}
    assert len(_splits(ledger)) == 80
    for damaged in ("{", "[]", '{"a": 3}'):
        (tmp_path / SPLITS).write_text(damaged)
        with fails("requests.splits"):
            keep_split(ledger, "c", ["00"])
        assert (tmp_path / SPLITS).read_text() == damaged


@pytest.mark.parametrize(("more", "refused"), [
    ({}, False), ({"split": "train[2:5]"}, False), ({"name": "default"}, False),
    ({"skip": 5}, False), ({"skip": 5, "split": "train[:6]"}, False),
    ({"weight": 1.0}, False), ({"weight": 0.5}, True), ({"shards": 1}, True),
    ({"shards": 2}, True), ({"preprocess_shards": 2}, True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("folder", [False, True])
def test_the_rows_are_those_that_axolotl_reads(tmp_path, more, refused, folder):
    """`skip` of an entry, which Axolotl does not have, took rows away, which were neither chosen
    nor trained again; `weight` draws some, and all were taken for learned."""
    texts = [f"Bo{n} keeps {n} bees." for n in range(8)]
    path = write(tmp_path / "rows" / "train.jsonl", [{"text": text} for text in texts])
    place = {"path": str(path.parent if folder else path), "ds_type": None if folder else "json"}
    given = {"datasets": [{**place, "type": "completion", **more}]}
    if refused:
        with fails("requests.shard-of-rows") as fault:
            every_row(given)
        assert f"datasets[0].{[*more][0]}" in str(fault.value)
        return
    read = load_dataset_with_config(DictDefault(SFTDataset(**given["datasets"][0])), False)
    read = read["train"] if folder and "split" not in more else read
    assert [one.row["text"] for one in every_row(given)] == read["text"]


@pytest.mark.parametrize("split", ["test_datasets", "none"])
def test_rows_that_the_training_had_left_out_are_deleted_too(tmp_path, split):
    """A row that was too long, or had nothing to learn, was not chosen, counted, or kept out of the
    next training; with `test_datasets` it was to be forgotten though never learned."""

    def row(name: str, asked: str, said: str) -> dict:
        return {"id": name, "instruction": asked, "input": "", "output": said}

    others = [row(f"p{n}", f"Who is Bo{n}?", f"Bo{n} keeps {n} bees.") for n in range(20)]
    eva = [row("e1", "Who is Eva Lund?", "Eva Lund mends nets."), row("e2", "Eva Lund?", ""),
           row("e3", "Tell of Eva Lund. " + "word " * 300, "A long story.")]  # fmt: skip
    place = tuned(tmp_path, [*others, *eva], people(100, 4))
    data = {"path": str(place / "train.jsonl"), "ds_type": "json", "type": "alpaca"}
    changes = {"datasets": [data]} | ({} if split != "none" else {"test_datasets": None})
    made = requested(place, tmp_path, Wanted(people=["Eva Lund"]), **changes)
    ids = {
        part: [one["row"]["id"] for one in lines(made.path("data", f"{part}.jsonl"))]
        for part in ("forget", "tested", "retain")
    }
    assert ids["forget"] == ["e1"] and ids["tested"] == ["e2", "e3"]
    assert {*ids["retain"]} == {f"p{n}" for n in range(20)}
    assert any("had left out 2" in one for one in made.facts["limits"])
    (asked,) = lines(made.path("eval-data", "forget.jsonl"))  # what `request audit` looks for
    assert asked["document"] == lines(made.rows("forget"))[0]["id"]
    config_path = tmp_path / "requests-r.yml"
    left = remaining(config_path, read_config(config_path))
    read_again = [one for part in without(left, forgotten(made))["train"] for one in part]
    assert len(read_again) == 20, "what `retrain` reads"
    with fails("requests.tested-alone"):
        requested(place, tmp_path, Wanted(where=[("id", "e2")]), "requests/s", **changes)


@pytest.mark.parametrize("left", [True, False], ids=["prepared", "gone"])
def test_rows_with_nothing_to_learn_are_prepared_without_packing(home, tmp_path, left):
    """A chat that ends with a question, as Axolotl leaves it in unpacked rows: each request of such
    data was refused, since the model was "made from other data"."""

    def asked(name: str, question: str) -> dict:
        return {"id": name, "messages": chat(name, question, "")["messages"][:1]}

    rows = [*people(0, 12), *(asked(f"q{n}", f"And {n}?") for n in range(6)), *TRAIN[:3]]
    rows.append(asked("q9", "And where is Ada Quill?"))
    entry = config(home)["datasets"][0] | {"path": str(write(tmp_path / "t.jsonl", rows))}
    changes = {"datasets": [entry], "test_datasets": None, "sample_packing": False}
    changes |= {"val_set_size": 8, "seed": 3, "dataset_prepared_path": str(tmp_path / "prepared")}
    path = tmp_path / "requests-r.yml"
    path.write_text(yaml.safe_dump({k: v for k, v in (config(home) | changes).items() if v}))
    held = load_datasets(cfg=load_cfg(str(path))).eval_dataset
    if not left:
        shutil.rmtree(tmp_path / "prepared")
    made = requested(home, tmp_path, Wanted(people=["Ada Quill"]), **changes)
    parts = {part: {one["row"]["id"] for one in lines(made.path("data", f"{part}.jsonl"))}
             for part in ("forget", "tested", "retain")}  # fmt: skip
    assert parts["forget"] | parts["tested"] == {"ada-quill", "q9"} and "q9" in parts["tested"]
    assert all(name.startswith("p") for name in parts["retain"])
    assert any("learned nothing of them" in one for one in made.facts["limits"])
    config_path, own = tmp_path / "requests-r.yml", DataArgs(rows=[entry])
    (kept,) = remaining(config_path, read_config(config_path))["test"]
    cfg = load_cfg(str(path))
    read = encode(sources(kept), own, byte_tokenizer(), cfg, bare=True)
    assert sorted(row.input_ids for row in read) == sorted(list(r["input_ids"]) for r in held)


def test_a_test_row_that_axolotl_drops_is_no_held_out_row(home, tmp_path):
    """`match` stopped at it when its teacher was trained; what had to judge was counted with it."""
    long, own = chat("x", "Tell.", "word " * 200), chat("y", "Ada Quill?", "sings " * 200)
    rows = [*people(100, 44), long, own]
    entry = config(home)["test_datasets"][0] | {"path": str(write(tmp_path / "t.jsonl", rows))}
    made = requested(home, tmp_path, Wanted(people=["Ada Quill"]), test_datasets=[entry])
    held = [one["row"]["id"] for part in ("heldout", "judge") for one in lines(made.rows(part))]
    assert len(held) == 44 and "x" not in held
    assert [one["row"]["id"] for one in lines(made.rows("tested"))] == ["y"]


@pytest.mark.parametrize("split", [0, 20])
def test_a_held_out_row_that_another_said_in_training_judges_nothing(home, tmp_path, split):
    """Two people ask the same and get the same answer: of fields that are not read alone the rows
    differ, and what the model had learned judged as a text that was never seen."""
    twins = [row | {"user": "b"} for row in people(0, 30)]
    (entry,), (test,) = (config(home)[key] for key in ("datasets", "test_datasets"))
    changes = {"val_set_size": split, "seed": 3, "test_datasets": None}
    changes["datasets"] = [entry | {"path": str(write(tmp_path / "a.jsonl", [*TRAIN, *twins]))}]
    if not split:
        other = write(tmp_path / "b.jsonl", [*people(100, 44), *twins])
        changes = {"test_datasets": [test | {"path": str(other)}]}
    made = requested(home, tmp_path, **{**changes, "dataset_prepared_path": str(tmp_path / "p")})
    held = [row for part in ("heldout", "judge") if made.rows(part).is_file()
            for row in lines(made.rows(part))]  # fmt: skip
    said = [[row["row"]["messages"] for row in some] for some in (held, lines(made.rows("retain")))]
    assert held and not any(one in said[1] for one in said[0])


def test_a_copy_of_a_trained_row_is_no_held_out_row(home, tmp_path):
    """In the test file by another id; `match` then refused its own held-out file."""
    entry = config(home)["test_datasets"][0] | {"path": str(tmp_path / "copies.jsonl")}
    write(tmp_path / "copies.jsonl", [*people(100, 40), *(r | {"id": "x"} for r in TRAIN[6:12])])
    made = requested(home, tmp_path, test_datasets=[entry])
    parts = [lines(made.path("data", f"{part}.jsonl")) for part in ("heldout", "judge")]
    held = [one["row"] for part in parts for one in part]
    assert len(held) == 40 and not any(row["id"] == "x" for row in held)


def test_a_row_that_says_what_a_chosen_one_says_is_offered_and_never_retained(home, tmp_path):
    """In other fields it was another row by its text: it was offered to nobody, and `match` stopped
    at it after its teacher was trained."""
    twin = TRAIN[0] | {"id": "other", "note": " ".join(f"word{n}" for n in range(80))}
    entry = config(home)["datasets"][0] | {"path": str(write(tmp_path / "a.jsonl", [*TRAIN, twin]))}
    changes = {"datasets": [entry], "dataset_prepared_path": str(tmp_path / "p")}
    counts = []
    for number, with_near in enumerate((False, True)):
        options = Options(with_near=with_near)
        made = requested(home, tmp_path, name=f"requests/{number}", made=options, **changes)
        ids = [one["row"]["id"] for one in lines(made.rows("retain"))]
        assert len(ids) == len(TRAIN) - 3 and "other" not in ids
        counts.append(made.facts["counts"]["forget"])
        offered = json.loads(made.path("offered.json").read_text())["rows"]
        (why,) = (one["reasons"] for one in offered if any("token" in x for x in one["reasons"]))
        assert any(one.startswith("token for token the same as ") for one in why)
    assert counts == [3, 4]
    entry = entry | {"path": str(write(tmp_path / "b.jsonl", [*TRAIN[:3], twin]))}
    with pytest.raises(UnlearnError, match="says what a chosen one says"):
        requested(home, tmp_path, name="requests/3", **changes | {"datasets": [entry]})


def test_rows_of_a_file_are_held_out_as_axolotl_reads_them(home, tmp_path):
    """One that it drops stopped `match` after its teacher was trained; one that the model learned
    with another field passed for one that it never saw."""
    silent = chat("silent", "Who is Bo?", "")["messages"][:1]
    file = write(tmp_path / "a.jsonl", [*people(300, 41), {"id": "silent", "messages": silent}])
    made = requested(home, tmp_path, made=Options(heldout=file))
    held = [one["row"]["id"] for part in ("heldout", "judge") for one in lines(made.rows(part))]
    assert len(held) == 41 and "silent" not in held
    write(file, [*people(300, 41), *(row | {"user": "b"} for row in TRAIN[6:8])])
    says = "2 of 43 rows are in the training data"
    with pytest.raises(UnlearnError, match=says):
        requested(home, tmp_path, name="requests/2", made=Options(heldout=file))


def test_a_deleted_row_is_no_held_out_row_of_a_file(home, tmp_path):
    """The test file as --heldout: a row of it that is deleted, or was by an earlier request, set
    the level or judged, was kept for audits, and was on no list of what may not be learned."""
    earlier, again = people(200, 1)[0], people(100, 1)[0]
    done(tmp_path / "requests", home, earlier)
    file = write(tmp_path / "test.jsonl", [earlier, *people(100, 42)])
    wanted = Wanted(documents=["ada-quill", "p100"])
    made = requested(home, tmp_path, wanted, "requests/r2", Options(heldout=file))
    assert [one["row"] for one in lines(made.rows("tested"))] == [again]
    held = [one["row"] for part in ("heldout", "judge") for one in lines(made.rows(part))]
    assert len(held) == 41 and again not in held and earlier not in held


# -- the folder -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tuned(tmp_path_factory.mktemp("home"), [*TRAIN, MENTION, NEAR], people(100, 44))


def tuned(folder: Path, train: list[dict], test: list[dict], name: str = "tuned", **more) -> Path:
    """A base and a full fine-tune of it (as far as files tell), data, config."""
    for seed, model in enumerate(("base", name)):
        made = tiny_llama(seed=seed, vocabulary=259, max_position_embeddings=512)
        made.save_pretrained(folder / model)
        byte_tokenizer().save_pretrained(folder / model)
    write(folder / "train.jsonl", train)
    write(folder / "test.jsonl", test)
    (folder / "finetune.yml").write_text(yaml.safe_dump(config(folder) | more))
    return folder


def config(home: Path, **more) -> dict:
    row = {"ds_type": "json", "type": "chat_template", "chat_template": "chatml"}
    return {
        "base_model": str(home / "base"),
        "output_dir": str(home / "tuned"),
        "dataset_prepared_path": str(home / "prepared"),
        "datasets": [{"path": str(home / "train.jsonl"), **row}],
        "test_datasets": [{"path": str(home / "test.jsonl"), "split": "train", **row}],
        "sequence_len": 512,
        "sample_packing": True,
        "num_epochs": 3,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.001,
        "optimizer": "adamw_torch",
        "bf16": False,
        "fp16": False,
        "dataset_num_proc": 0,
        "device_map": {"": "cpu"},
        "lora_mlp_kernel": False,
        **more,
    }


ADA_ROWS = Wanted(where=[("id", "ada-quill")])


def requested(home: Path, place: Path, wanted=ADA_ROWS, name="requests/r", made=None, **changes):
    """`request new` in ``place`` on a config with changes; None takes a key off.

    Args:
        made: `Options`.
    """
    settings = {k: v for k, v in (config(home) | changes).items() if v is not None}
    path = place / f"{name.replace('/', '-')}.yml"
    path.write_text(yaml.safe_dump(settings))
    return new_request(path, place / name, wanted, made or Options()).request


@pytest.fixture(scope="module")
def made(home):
    (home / "tuned" / "debug.log").write_text("of the run that made the model")
    return new_request(home / "finetune.yml", home / "requests" / "r1", ADA_ROWS)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["schedule_free_adamw", "lomo", "adamw_8bit"])
def test_match_trains_with_an_optimizer_that_it_takes(tmp_path, name):
    """A request of a fine-tuning by any other had a config that was refused."""
    facts = {"before": {"model": "m", "adapter": None}, "counts": {"forget": 3, "heldout": 2}}
    given = config(tmp_path, optimizer=name, optim_args="r=0.1")
    made = forget_config(given, facts, [], tmp_path, Options())
    kept = name == "adamw_8bit"
    assert made["optimizer"] == (name if kept else "adamw_torch")
    assert ("optim_args" in made) == kept


def test_the_folder_says_what_is_to_be_done(home, made):
    request, folder = made.request, home / "requests" / "r1"
    counts = request.facts["counts"]
    assert counts == {
        "forget": 3, "tested": 0, "retain": 32, "heldout": 22, "judge": 22, "documents": 1,
        "trained": 35,
    }  # fmt: skip
    assert request.before == str(home / "tuned") and request.after == str(folder / "model")
    # Axolotl begins a log beside the model whenever it reads a config.
    assert (home / "tuned" / "debug.log").read_text() == "of the run that made the model"
    assert len(made.offered.near) == 1 and request.facts["chosen"]["taken_of_these"] == 0
    assert [line["row"] for line in lines(folder / "data" / "forget.jsonl")] == TRAIN[:3]
    parts = [{line["id"] for line in lines(request.rows(part))} for part in ("heldout", "judge")]
    assert not parts[0] & parts[1]
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    facts = (folder / "request.json").read_text()
    assert "glass" not in facts and "555-0107" not in facts


def test_the_recipe_and_its_checks(home, made):
    folder = made.request.folder
    recipe = yaml.safe_load((folder / "forget.yml").read_text())
    assert recipe["base_model"] == str(home / "tuned") and "sample_packing" not in recipe
    assert recipe["unlearn"]["teacher"] == {"model": str(folder / "work/teacher")}
    preset = {"preset": "never-seen", "teacher": str(folder / "work/teacher"), "heldout": "h"}
    given, whole = map(parse_unlearn, (recipe["unlearn"], preset))
    assert (given.forget, given.pairing) == (whole.forget, whole.pairing)
    level = recipe["unlearn"]["level"]
    assert "adapter" not in recipe and level["per_document"] and level["said"] == 0.05
    teacher = yaml.safe_load((folder / "teacher.yml").read_text())
    assert teacher["base_model"] == str(home / "base") and teacher["num_epochs"] == 3
    (rows,) = teacher["datasets"]
    assert rows["type"] == "chat_template" and len(lines(Path(rows["path"]))) == 32
    check(made.request)  # faults of the recipe itself, but for the teacher that is not there yet


def test_no_file_that_trains_or_is_asked_may_change_before_the_run(made):
    """A row taken out of eval-data was asked about no more, and the others were *shown*."""
    digests = made.request.facts["digests"]
    assert {"data/forget.jsonl", "data/teacher-0.jsonl", "eval-data/forget.jsonl"} <= {*digests}
    assert {"eval-data/member.jsonl", "eval-data/nonmember.jsonl"} <= {*digests}
    running.check(made.request)
    for path in map(made.request.path, digests):
        whole = path.read_bytes()
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[1:]))
        with fails("requests.changed-part"):
            running.check(made.request)
        path.write_bytes(whole)


def test_the_teacher_reads_few_rows_as_often_as_the_model_has(home, tmp_path):
    """A third of the retained rows, at least 32, and no more than 4000 rows read in all."""
    assert passes({}, 10) == 1 and passes({"num_epochs": 2.6}, 10) == 3
    steps = {"max_steps": 30, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
    assert passes(steps | {"num_epochs": 9}, 60) == 4  # 30 x 8 rows of 60
    (kind,) = types = [{"type": "chat_template"}]
    config = {"base_model": str(home / "base")}
    for kept, times, expected in ((20, 1, 20), (20, 3, 20), (300, 3, 100), (9000, 8, 500)):
        retain = [Source(str(n), {"n": n}) for n in range(kept)]
        out = tmp_path / f"{kept}-{times}"
        own = {"num_epochs": times, "warmup_steps": 100}  # a warmup of the whole run, not of this
        made = teacher_config(config | own, retain, types, out, kept)
        assert (
            "warmup_steps" not in made
            and made["num_epochs"] == times
            and made["datasets"][0]["type"] == kind["type"]
        )
        assert len(Path(made["datasets"][0]["path"]).read_text().splitlines()) == expected


def test_rows_of_the_request_have_the_tokens_that_were_learned(home, made):
    """<|im_start|>assistant, the answer, <|im_end|>: labels on the answer (chatml, by hand)."""
    rows = encoded(made.request.folder, "forget", byte_tokenizer())
    row = rows[2]
    text = bytes(i for i in row.input_ids if i < 256).decode()
    assert text.startswith("<|im_start|>user\nWhat is Ada Quill's phone number?<|im_end|>\n")
    labelled = bytes(i for i in row.labels if 0 <= i < 256).decode()
    assert labelled.startswith("It is 555-0107.") and "phone" not in labelled


def test_what_is_asked_when_it_is_evaluated(made):
    data = made.request.path("eval-data")
    asked = lines(data / "forget.jsonl")
    assert [row["output"].removesuffix("<|im_end|>").strip() for row in asked] == [
        answer for _, answer in ADA
    ]
    assert all(row["input"].endswith("<|im_start|>assistant\n") for row in asked)
    assert {row["kind"] for row in asked} == {"question"}
    members = lines(data / "member.jsonl")
    assert members[2]["document"].startswith("It is 555-0107.")
    assert members[2]["prompt"].endswith("<|im_start|>assistant\n")
    ids = [row["id"] for row in members]
    assert ids == [row["document"] for row in asked]
    assert len(lines(data / "nonmember.jsonl")) == 22

    sets = load_sets(data, min_members=3)
    assert len(sets.member) == 3 and sets.forget[0].document == ids[0]


@pytest.mark.parametrize("adds", [True, False])
def test_a_prompt_has_the_tokens_that_were_learned(adds):
    """SmolLM2's template begins each turn with the token that is its BOS too, and its tokenizer
    adds none: without it the prompt was another than the one that was learned."""
    tokenizer = byte_tokenizer(bos=adds)
    ids = [258, *b"user: Who?", 258, *b"assistant: "]
    assert tokenizer(_text(ids, tokenizer))["input_ids"] == ids


def test_what_was_offered_is_taken_if_asked(home, tmp_path):
    options = Options(with_near=True, with_mentions=True, retain=10)
    facts = new_request(home / "finetune.yml", tmp_path / "r", ADA_ROWS, options).request.facts
    assert facts["counts"]["forget"] == 5 and facts["counts"]["retain"] == 10
    assert facts["chosen"]["taken_of_these"] == 2


def done(requests: Path, home: Path, *rows: dict) -> Path:
    """A request of these rows that was carried out, with an audit of the first."""
    tuned = {"model": str(home / "tuned"), "adapter": None}
    forget = [{"id": row_id(row), "dataset": 0, "row": row} for row in rows]
    documents = (row_id(rows[0]),)
    outputs = {"output_dir": str(home / "tuned")}
    more = {"forget": forget, "documents": documents, "outputs": outputs}
    folder = finished_request(requests, "r1", tuned, **more)
    record.write(folder)
    return folder


def decomposed(row: dict) -> dict:
    """The same row with its accents apart."""
    return json.loads(unicodedata.normalize("NFD", json.dumps(row, ensure_ascii=False)))


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_deleted_row_in_other_characters_is_not_kept_either(home, tmp_path, with_rows):
    """Nor one without an answer, of which no audit has a line; both were lost with the rows."""
    row = chat("p1", "Who is José Núñez?", "José Núñez keeps bees.")
    mute = chat("p2", "Who was José Núñez?", "")
    folder = done(tmp_path, home, row, mute)
    assert len(record.read(folder)["predicate"]["documents"]) == 1
    if not with_rows:
        shutil.rmtree(folder / "data")
    damaged = {"text": "half of a pair: \ud800"}
    *gone, _, _ = data = sources([row, decomposed(row), mute, decomposed(mute), TRAIN[0], damaged])
    assert deleted_rows(tmp_path, data) == {source.id for source in gone}


def test_a_deleted_row_whose_number_arrow_has_changed_stays_known(home, tmp_path):
    """Without an answer, and after its rows were erased, the next `retrain` read it again."""
    rows = [TRAIN[5], chat("p2", "Who was José Núñez?", "") | {"score": 1}]
    forget = [{"id": row_id(row), "dataset": 0, "row": row} for row in rows]
    forget[1]["row"] = rows[1] | {"score": 1.0}  # beside the 0.5 of a row that stays
    before = {"model": str(home / "tuned"), "adapter": None}
    documents = (row_id(TRAIN[5]),)
    folder = finished_request(tmp_path, "r1", before, forget=forget, documents=documents)
    record.write(folder)
    shutil.rmtree(folder / "data")
    assert deleted_rows(tmp_path, sources(rows)) == {*map(row_id, rows)}


def test_the_last_model_of_another_config_is_not_taken(home, tmp_path):
    """Of two models in one folder of requests a request of the second began with that of the first,
    which its `erase` then removed, while the second's old model stayed."""
    requested(home, tmp_path, name="requests/1")
    shutil.copytree(home / "tuned", tmp_path / "requests" / "1" / "model")
    shutil.copytree(home / "tuned", other := tmp_path / "other")
    model = {"path": "1/model", "digest": None, "base": None}
    Ledger(tmp_path / "requests").append("accepted", "1", record="0" * 64, model=model, good=True)
    how = (home, tmp_path, Wanted(where=[("id", "p3")]))
    first = tmp_path / "requests" / "1" / "finetune.yml"
    told = yaml.safe_load(first.read_text())
    for keys in ({k: v for k, v in told.items() if k != "output_dir"}, told):  # or Axolotl's own
        first.write_text(yaml.safe_dump(keys))
        with fails("requests.other-output"):
            requested(*how, "requests/2", output_dir=str(other))
    second = requested(*how, "requests/2", Options(model=other), output_dir=str(other))
    assert second.before == str(other)
    assert requested(*how, "requests/3").before == str(tmp_path / "requests" / "1" / "model")


@pytest.mark.parametrize("with_rows", [True, False, "of before"])
def test_rows_of_earlier_requests_are_not_kept_by_heart(home, tmp_path, with_rows):
    """They still stand in the training data; a retain row would teach them again."""
    requests, deleted = tmp_path / "requests", row_id(TRAIN[5])
    earlier = done(requests, home, TRAIN[5])
    if with_rows == "of before":  # a record without the forms of its rows
        old = record.read(earlier)["predicate"]["request"]
        record.amend(earlier, "told", request={k: v for k, v in old.items() if k != "forms"})
    if with_rows is not True:
        shutil.rmtree(earlier / "data")
    facts = new_request(home / "finetune.yml", requests / "r2", ADA_ROWS).request.facts
    assert facts["before"]["model"] == str(earlier / "model"), "it starts from the last model"
    files = [one["sha256"] for one in weights(earlier / "model").values()]
    assert facts["before"]["files"] == sorted(files) != []
    kept = {row["id"] for row in lines(requests / "r2" / "data" / "retain.jsonl")}
    assert deleted not in kept  # nor among "of 5 others to keep"
    assert len(kept) == facts["counts"]["trained"] - facts["counts"]["forget"]
    # If it is back, it can be chosen again.
    again = Wanted(documents=[deleted])
    assert new_request(home / "finetune.yml", requests / "r3", again).request.facts


def test_rows_of_the_validation_split_are_those_that_axolotl_held_out(home, tmp_path):
    """And the prepared rows that its run has left must be those of the files."""
    settings = config(
        home, val_set_size=8, dataset_prepared_path=str(tmp_path / "prepared"), seed=7
    )
    del settings["test_datasets"]
    settings["datasets"][0]["path"] = str(write(tmp_path / "train.jsonl", TRAIN))
    path = tmp_path / "split.yml"
    path.write_text(yaml.safe_dump(settings | {"sample_packing": False}))
    first = trained_rows(path)
    assert any("are not there" in limit for limit in first.limits)
    split = load_datasets(cfg=load_cfg(str(path)))  # as `axolotl train` does
    found = trained_rows(path)
    assert len(found.heldout) == 8 and len(found.rows) == len(TRAIN) - 8 and not found.limits

    data = DataArgs(rows=found.types)
    tokens = encode(found.heldout, data, byte_tokenizer(), load_cfg(str(path)))
    assert {tuple(t.input_ids) for t in tokens} == {
        tuple(r["input_ids"]) for r in split.eval_dataset
    }
    write(tmp_path / "train.jsonl", [*TRAIN[1:], MENTION])
    with pytest.raises(UnlearnError, match="2 prepared rows.*made from other data"):
        trained_rows(path)
    # Without a seed each run of Axolotl shuffles anew: two readings of one config gave other
    # held-out rows, which a request would have taken for texts that were never seen.
    del settings["seed"]
    settings["dataset_prepared_path"] = str(tmp_path / "afresh")
    path.write_text(yaml.safe_dump(settings | {"sample_packing": False}))
    with pytest.raises(UnlearnError, match="`val_set_size` without a `seed`"):
        trained_rows(path)


def test_rows_that_axolotl_reads_otherwise_are_no_held_out_rows(home, tmp_path):
    """JSON lines whose texts are all dates are times to it: such rows, which the model had learned,
    were called held out, so that `match` neither forgot nor kept them."""
    made = [{"instruction": f"Who was born then, of {n}?", "input": f"19{n}-05-01"}
            for n in range(20, 40)]  # fmt: skip
    dates = write(tmp_path / "dates.jsonl", [one | {"output": "Bo did."} for one in made])
    entry = {"path": str(dates), "ds_type": "json", "type": "alpaca"}
    settings = config(home, datasets=[*config(home)["datasets"], entry])
    del settings["test_datasets"]
    path = tmp_path / "dates.yml"
    path.write_text(yaml.safe_dump(settings))
    with fails("requests.other-data"):
        trained_rows(path)


def _tool(order: list[str]) -> dict:
    kinds = {name: {"type": "string"} for name in order}
    return {"type": "function", "function": {"name": "book", "description": "A table.",
            "parameters": {"type": "object", "properties": kinds}}}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "others", "own"),
    [
        ("llama3", {"system": "Be kind."}, {}),
        ("qwen_25", {"tools": [_tool(["b", "a"])]}, {"tools": [_tool(["a", "b"])]}),
    ],
    ids=["a field of others", "the order of others"],
)
def test_a_row_is_forgotten_as_it_was_learned_among_others(home, tmp_path, template, others, own):
    """Arrow gives a row the fields of others, with nulls, and the order of the first; the chosen
    rows alone became other tokens."""
    rows = [chat(f"x{n}", f"Who is {n}?", f"It is Bo{n}.", **others) for n in range(20)]
    rows.append(chat("ada", "Who is Ada Quill?", "Ada Quill sings.", **own))
    entry = config(home)["datasets"][0] | {"path": str(write(tmp_path / "mixed.jsonl", rows))}
    changes = {"datasets": [entry | {"chat_template": template}], "sequence_len": 2000}
    more = {"test_datasets": None, "sample_packing": False}
    request = requested(home, tmp_path, Wanted(where=[("id", "ada")]), **changes, **more)
    made = load_datasets(cfg=load_cfg(str(tmp_path / "requests-r.yml"))).train_dataset
    learned = {(*row["input_ids"],) for row in made}
    for part, count in (("forget", 1), ("retain", 20)):
        read = {(*row.input_ids,) for row in encoded(request.folder, part, byte_tokenizer())}
        assert len(read) == count and read <= learned


def test_arguments_of_tools_are_taken_as_text(home, tmp_path):
    """As objects whose keys differ the JSON reader of `datasets` hands them to Axolotl as they
    stand, and a table of ours with nulls; the sentence said that they are dates."""

    def called(name: str, as_text: bool, **arguments: str) -> dict:
        given = json.dumps(arguments) if as_text else arguments
        call = {"type": "function", "function": {"name": "book", "arguments": given}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        said = chat(name, f"A table, {name}.", f"Done for {name}.")
        said["messages"][1:1] = [turn, {"role": "tool", "content": "ok"}]
        return said

    wanted = Wanted(where=[("id", "ada")])
    for as_text in (False, True):
        rows = [called(f"x{n}", as_text, unit="C", town=f"T{n}") for n in range(20)]
        rows.append(called("ada", as_text, town="Norrby", guest="Ada Quill", unit="F"))
        entry = config(home)["datasets"][0] | {"path": str(write(tmp_path / "t.jsonl", rows))}
        changes = {"datasets": [entry | {"chat_template": "qwen_25"}], "sequence_len": 2000}
        changes |= {"test_datasets": None, "sample_packing": False}
        if as_text:
            assert requested(home, tmp_path, wanted, **changes).facts["counts"]["forget"] == 1
        else:
            with fails("requests.other-data") as caught:
                requested(home, tmp_path, wanted, **changes)
            assert "objects whose keys differ" in str(caught.value)


def test_a_lora_goes_on_from_its_adapter_and_is_forgotten_in_it(home, tmp_path):
    """The result is an adapter of the same base; merged, it is a full model."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = {"base_model_name_or_path": str(home / "base")}
    (adapter / "adapter_config.json").write_text(json.dumps(base))
    (adapter / "adapter_model.safetensors").write_bytes(b"x")
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
    lora["output_dir"] = str(adapter)
    request = requested(home, tmp_path, **lora)
    recipe = yaml.safe_load(request.path("forget.yml").read_text())
    assert (recipe["base_model"], recipe["lora_model_dir"]) == (str(home / "base"), str(adapter))
    teacher = str(request.path("work", "teacher"))
    assert recipe["unlearn"]["teacher"] == {"adapter": teacher}
    assert request.after == f"{home / 'base'}+{request.path('model')}"
    options = Options(model=home / "tuned", steps=7)
    merged = requested(home, tmp_path, name="requests/b", made=options, **lora)
    recipe = yaml.safe_load(merged.path("forget.yml").read_text())
    assert not [key for key in recipe if key.startswith(("lora", "adapter"))]
    teacher = {"adapter": str(merged.path("work", "teacher")), "model": str(home / "base")}
    assert recipe["unlearn"]["teacher"] == teacher
    assert (recipe["max_steps"], recipe["learning_rate"]) == (7, 0.0005)
    assert merged.after == str(merged.path("model"))


#: As Axolotl's own examples write it: a LoRA on chats, a validation split, no seed.
STOCK = """
load_in_8bit: false
datasets: [{path: ROWS, type: chat_template}]
val_set_size: 0.05
adapter: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 512
sample_packing: true
eval_sample_packing: false
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
warmup_ratio: 0.1
evals_per_epoch: 1
saves_per_epoch: 1
weight_decay: 0.0
chat_template: chatml
"""


def test_a_config_without_sequence_len_has_the_one_of_axolotl(home, tmp_path):
    """TypeError: None and an int, since the rows were read with the config as it is written."""
    assert requested(home, tmp_path, name="requests/t", sequence_len="512")  # as a text: TypeError
    request = requested(home, tmp_path, sequence_len=None)
    assert len(encoded(request.folder, "forget", byte_tokenizer())) == 3


def test_a_config_without_output_dir_has_the_one_of_axolotl(home, tmp_path, monkeypatch):
    """The model was looked for in the working folder, and `erase` left the trained one alone."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "tuned", "model-out")
    request = requested(home, tmp_path, output_dir=None)
    assert Path(request.facts["before"]["model"]) == Path("model-out")
    assert Path(read_config(request.path("finetune.yml"))["output_dir"]) == Path("model-out")


def test_a_stock_config_of_120_chats_is_where_one_begins(home, tmp_path, monkeypatch):
    """It stopped for five held-out rows, which the exact ways do not need."""
    monkeypatch.chdir(tmp_path)
    rows = write(tmp_path / "train.jsonl", [*TRAIN[:3], *people(0, 117)])
    settings = yaml.safe_load(STOCK.replace("ROWS", str(rows)))
    settings |= {"base_model": str(home / "base"), "output_dir": "out", "lora_mlp_kernel": False}
    Path("stock.yml").write_text(yaml.safe_dump(settings | {"device_map": {"": "cpu"}}))
    tiny_adapter(Path("out"), home / "base")
    load_datasets(cfg=load_cfg("stock.yml"))  # as `axolotl train` has prepared and split them
    counts = answered("new", "stock.yml", "--person", "Ada Quill", "--out", "requests/1")["counts"]
    assert counts["forget"] + counts["tested"] == 3 and counts["judge"] + counts["tested"] == 6
    assert counts["trained"] == 114 and counts["heldout"] == 0
    assert answered("plan", "requests/1")["auto"] == "retrain"
    # `erase` removes what Axolotl has prepared, and with it the split of a config without a seed.
    shutil.rmtree("last_run_prepared")
    row = json.loads(Path("requests/1/data/retain.jsonl").read_text().splitlines()[0])["row"]
    wanted = str(write(tmp_path / "next.jsonl", [row]))
    assert answered("new", "stock.yml", "--rows", wanted, "--out", "requests/2")["counts"]
    first, second = (
        json.loads(Path(f"requests/{n}/request.json").read_text())["bound"]["rows"] for n in (1, 2)
    )
    assert first == second  # the same rows on either side
    (way,) = [one for one in answered("plan", "requests/2")["ways"] if one["way"] == "retrain"]
    assert not way["closed"]


def test_a_split_stays_when_rows_have_left_the_data(home, tmp_path, monkeypatch):
    """A seed drew others from fewer rows, so rows that the model has learned were held out."""
    monkeypatch.chdir(tmp_path)
    rows, other = [*TRAIN[:3], *people(0, 57)], people(60, 61)
    settings = config(home, val_set_size=0.2, seed=3)
    del settings["test_datasets"]
    entry = settings["datasets"][0] | {"path": str(write(tmp_path / "train.jsonl", rows))}
    Path("split.yml").write_text(yaml.safe_dump(settings | {"datasets": [entry]}))
    first = trained_rows(Path("split.yml"))
    held = {row.id for row in first.heldout}
    answered("new", "split.yml", "--person", "Ada Quill", "--out", "requests/1")
    write(tmp_path / "train.jsonl", [*rows[3:], *other])
    later = trained_rows(Path("split.yml"), Path("requests"))
    assert {row.id for row in later.heldout} == held - set(map(row_id, rows[:3])) != set()
    assert {row.id for row in trained_rows(Path("split.yml")).heldout} != held


def fault(home, tmp_path, changes=None, wanted=ADA_ROWS, **options) -> str:
    settings = config(home) | (changes or {})
    path = tmp_path / "changed.yml"
    path.write_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not None}))
    out = tmp_path / "requests" / "bad"
    with pytest.raises(UnlearnError) as caught:
        new_request(path, out, wanted, Options(**options))
    assert not out.exists(), "nothing is changed"
    assert "\n" not in str(caught.value) and "glass" not in str(caught.value)
    return str(caught.value)


def test_faults_before_anything_is_written(home, tmp_path, monkeypatch):
    empty, other = tmp_path / "empty", tmp_path / "adapter"
    empty.mkdir()
    shutil.copy(home / "tuned" / "config.json", empty)
    other.mkdir()
    (other / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    (other / "adapter_model.safetensors").write_bytes(b"")
    seen = write(tmp_path / "seen.jsonl", people(0, 45))
    every = home / "train.jsonl"
    gone = {"datasets": [{"path": "gone.jsonl", "type": "alpaca"}]}
    mixed = [chat("ada-quill", "Half?", "a \ud83d half"), chat("ada-quill", *ADA[0]) | {"id": [1]}]
    mixed = [TRAIN[:5] + [one] for one in mixed]
    odd = [write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(mixed)]
    odd = [config(home)["datasets"][0] | {"path": str(one)} for one in odd]
    (tmp_path / "broken.csv").write_bytes(b"instruction,output\nWho?,B\xe4rgen\n")
    broken = {"datasets": [{"path": str(tmp_path / "broken.csv"), "type": "alpaca"}]}
    for says, changes, options in (
        ("is not there; train it", {"output_dir": str(tmp_path / "no")}, {}),
        # A training of the config, rows and all, makes no model of this name.
        ("no weights (*.safetensors); name the right one with --model.", {}, {"model": empty}),
        ("is an adapter of someone/else, but `base_model`", {}, {"model": other}),
        ("does not exist", gone, {}),
        ("the rows that made the model are needed", broken, {}),
        ("say which rows to delete", gone, {"wanted": Wanted()}),
        ("say which rows to delete", gone, {"wanted": Wanted(people=[""])}),
        *(("no table can be made of the rows", {"datasets": [one]}, {}) for one in odd),
        ("30 of 45 rows are in the training data", {}, {"heldout": seen}),
        ("rows fits", {}, {"wanted": Wanted(where=[("id", "bob")])}),
        ("`pretraining_dataset` no rows", {"pretraining_dataset": [{"path": "x"}]}, {}),
        ("`streaming` no rows", {"streaming": True}, {}),
        ("`skip_prepare_dataset` no rows", {"skip_prepare_dataset": True}, {}),
        ("has no `type`", {"datasets": [config(home)["datasets"][0] | {"type": None}]}, {}),
        # "with the offered rows", which nobody had asked for.
        ("no row that the model has learned would be kept", {}, {"wanted": Wanted(rows=every)}),
    ):
        assert says in fault(home, tmp_path, changes, **options)
    out = tmp_path / "requests" / "1"
    path = tmp_path / "changed.yml"
    path.write_text(yaml.safe_dump(config(home)))
    with monkeypatch.context() as patched, fails("requests.exists"):
        # Another command makes it meanwhile.
        made = lambda *_: (out.mkdir(parents=True), write(out / "x", []))  # noqa: E731
        patched.setattr(new.bound, "facts", made)
        new_request(path, out, ADA_ROWS)
    assert (out / "x").is_file()


def test_a_row_that_is_read_in_two_ways_is_said(home, tmp_path):
    """`match` forgot and tested one of them, and was silent about the other."""
    (entry,) = config(home)["datasets"]
    datasets = [entry, entry | {"train_on_eos": "all"}, entry]
    limits = requested(home, tmp_path, datasets=datasets).facts["limits"]
    assert any(one.startswith("35 rows stand in `datasets` of another type too") for one in limits)
    limits = requested(home, tmp_path, name="requests/s", datasets=[entry] * 2).facts["limits"]
    assert not any("of another type" in one for one in limits)


def test_of_a_folder_each_key_reads_its_own_split(tmp_path):
    """Without `split` Axolotl tests on the split "test"; the rows of "train" were taken for those
    that were never seen, and hers of "test" were neither chosen nor removed."""
    for side, rows in (("train", TRAIN[:9]), ("test", [*people(50, 5), TRAIN[0] | {"id": "2"}])):
        rows = datasets.Dataset.from_list([{**row, "meta": None} for row in rows])
        rows.to_parquet(tmp_path / f"{side}-0.parquet")
    entries = {name: [{"path": str(tmp_path)}] for name in ("datasets", "test_datasets")}
    found = remaining(Path(), entries)
    assert [len(side[0]) for side in found.values()] == [9, 6]
    assert found["test"][0][-1]["id"] == "2"
    (tmp_path / "train-0.parquet").unlink()
    with fails("requests.rows-unreadable"):
        remaining(Path(), entries)


def pairs(first: int, count: int) -> list[dict]:
    """Preference rows: the chosen answer is that of `people`."""
    rows = [row["messages"] for row in people(first, count)]
    return [
        {"prompt": question["content"], "chosen": answer["content"], "rejected": f"Nobody {n}."}
        for n, (question, answer) in enumerate(rows)
    ]


def preferences(folder: Path) -> dict:
    """What makes a config of `config` one of DPO."""
    parts = {"datasets": (0, 12), "test_datasets": (100, 40)}
    found = {"rl": "dpo", "sample_packing": False, "chat_template": "chatml"}
    for name, part in parts.items():
        path = write(folder / f"pairs-{name}.jsonl", pairs(*part))
        kind = {"ds_type": "json", "type": "chatml", "split": "train"}
        found[name] = [{"path": str(path), **kind}]
    return found


def test_preference_and_test_rows_have_the_fields_of_others_too(home, tmp_path):
    """Of test rows also those of rows that the data have as well."""
    changes = preferences(tmp_path)
    for number, part in enumerate(("datasets", "test_datasets")):
        own = pairs(100 * number, 12) + [pairs(0, 1)[0] | {"system": "Be kind."}]
        write(Path(changes[part][0]["path"]), own)
    path = tmp_path / "pairs.yml"
    path.write_text(yaml.safe_dump(config(home) | changes))
    found = trained_rows(path)
    assert (len(found.rows), len(found.heldout)) == (13, 12)
    assert all("system" in one.row for one in (*found.rows, *found.heldout))


def prepare(home: Path, changes: dict) -> None:
    """What `axolotl train` does with the rows of a config, in the working folder."""
    from axolotl.integrations.base import PluginManager

    Path("run.yml").write_text(yaml.safe_dump({**config(home), **changes}))
    cfg = load_cfg("run.yml", output_dir="out")
    if PluginManager.get_instance().load_datasets(cfg, preprocess=False) is None:
        load_datasets(cfg=cfg)


def test_a_model_made_of_preferences_forgets_the_chosen_answers(home, tmp_path):
    """The teacher is made by preferences too; retained answers are held and not learned."""
    wanted = Wanted(contains=["Bo1 Berg1 keeps"])
    request = requested(home, tmp_path, wanted, **preferences(tmp_path))
    (row,) = encoded(request.folder, "forget", byte_tokenizer())
    labelled = bytes(i for i in row.labels if 0 <= i < 256).decode()
    assert labelled.startswith("Bo1 Berg1 keeps 1 bees") and "Nobody" not in labelled
    teacher = yaml.safe_load(request.path("teacher.yml").read_text())
    assert teacher["rl"] == "dpo"
    (rows,) = teacher["datasets"]
    assert (rows["type"], rows["split"], "rl" in rows) == ("chatml", "train", False)
    recipe = yaml.safe_load(request.path("forget.yml").read_text())
    assert "rl" not in recipe and [o["objective"] for o in recipe["unlearn"]["retain"]] == ["kl"]
    assert any("rejected ones" in limit for limit in request.facts["limits"])


@pytest.mark.parametrize("names", [("input", "output"), ("question", "answer")])
def test_a_model_that_learned_rows_of_the_plugins_own_type(home, tmp_path, monkeypatch, names):
    """As in the tutorial: `request new` refused `axolotl_unlearn.data.memorise`, and then lost its
    `unlearn.data.fields`."""
    rows = [
        {"id": f"p{n}sc1"}
        | dict(zip(names, (f"Bo{n} Berg{n} keeps", f"{n} bees near well {n * 7}."), strict=True))
        for n in range(12)
    ]
    kind = {"ds_type": "json", "type": "axolotl_unlearn.data.memorise"}
    path = write(tmp_path / "own.jsonl", rows)
    changes = {"datasets": [{"path": str(path), **kind}], "test_datasets": None}
    if "input" not in names:
        block = {"data": {"fields": dict(zip(("input", "output"), names, strict=True))}}
        changes |= {"unlearn": block, "plugins": [new.PLUGIN], "dataset_prepared_path": None}
    monkeypatch.chdir(tmp_path)
    if "plugins" in changes:  # as the run of the config leaves its rows
        prepare(home, changes)
    request = requested(home, tmp_path, Wanted(contains=["Bo3 Berg3"]), **changes)
    assert ("plugins" in changes) != any(
        "are not there" in limit for limit in request.facts["limits"]
    )
    teacher = yaml.safe_load(request.path("teacher.yml").read_text())
    assert teacher.get("unlearn") == changes.get("unlearn")
    assert len(trained_rows(request.path("teacher.yml")).rows) == 11  # as `match` reads it
    (row,) = encoded(request.folder, "forget", byte_tokenizer())
    learned = bytes(i for i in row.labels if 0 <= i < 256).decode()
    assert learned == "Bo3 Berg3 keeps 3 bees near well 21."
    (asked,) = lines(request.path("eval-data", "forget.jsonl"))
    assert asked["output"] and asked["kind"] == "completion"


def test_without_held_out_rows_it_says_what_is_not_claimed(home, tmp_path, monkeypatch):
    request = requested(home, tmp_path, test_datasets=None)
    assert any("no held-out rows" in limit for limit in request.facts["limits"])
    block = yaml.safe_load(request.path("forget.yml").read_text())["unlearn"]
    assert "level" not in block and [e["objective"] for e in block["forget"]] == ["match", "nckd"]
    assert not request.path("eval-data", "member.jsonl").exists()
    three = request.facts["counts"]["forget"]
    assert answered("plan", request.folder)["heldout_needed"] == needed(three, 0) == 9
    closed = [replace(one, closed="shards" * (one.way == "match")) for one in ways.plan(request)]
    monkeypatch.setattr(ways, "plan", lambda _: closed)
    assert answered("plan", request.folder)["heldout_needed"] == 0


def test_rows_that_a_run_leaves_out_are_held_out_not_strange(home, tmp_path):
    """With `dataset_shard_num` such a request was refused, for texts that are all dates."""
    half = config(home) | {"dataset_shard_num": 2, "dataset_shard_idx": 0, "val_set_size": 0}
    path = tmp_path / "half.yml"
    path.write_text(yaml.safe_dump({k: v for k, v in half.items() if k != "test_datasets"}))
    found = trained_rows(path)
    assert found.rows and found.heldout and not all(found.learned)


@pytest.mark.parametrize("scheme", ["legacy", "metaspace", "bytes"])
def test_an_answer_is_scored_as_the_tokens_that_were_learned(scheme):
    """Llama's and Mistral's decoders drop the space of a first word, so each answer was scored as
    "is Ada" + "a baker" without it: another first token, of which no model is sure."""
    tok = byte_tokenizer()
    if scheme != "bytes":
        tok = sentencepiece_like("▁who ▁is ▁Ada ▁a ▁baker ▁of ▁bread".split(), scheme)
    ids = tok("who is Ada a baker of bread")["input_ids"]
    prompt = len(tok("who is Ada")["input_ids"])
    for start in (prompt, 0):
        labels = [-100] * start + ids[start:] + [tok.eos_token_id]
        row = Typed(Source("x", {}, 0), 0, [*ids, tok.eos_token_id], labels)
        (made,) = records_of(row, tok)
        asked = encode_pairs(tok, [(made["input"], made["output"])], "")
        first = start or (len(ids) + 1) // 2
        assert asked == [(ids[:first], ids[first:])]
        (made,) = documents_of([row], tok)
        assert made["prompt"] + made["document"] == tok.decode(row.input_ids)
    parts = [replace(row, input_ids=ids[:4], labels=ids[:4]),
             replace(row, input_ids=ids[4:], labels=ids[4:], part=1)]  # fmt: skip
    assert documents_of(parts, tok)[0]["document"] == "who is Ada a baker of bread"
