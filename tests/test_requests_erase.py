"""Erasing: what is listed, what goes, what stays, and what is found elsewhere."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from decimal import Decimal
from pathlib import Path

import kills
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from data_tokenizers import byte_tokenizer
from datasets import Dataset
from fault_codes import fails
from requests_folder import (
    SECRET,
    adapter_folder,
    answered,
    finished_request,
    model_folder,
    no_caches,
    said,
    write_json,
    write_lines,
)
from safetensors.torch import save_file

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import MANIFEST, declare, strip
from axolotl_unlearn.requests import erase as erasing
from axolotl_unlearn.requests import search as searching
from axolotl_unlearn.requests.erase import Item, Plan, erase, plan
from axolotl_unlearn.requests.record import read, write
from axolotl_unlearn.requests.request import Ledger
from axolotl_unlearn.requests.search import Texts, row_texts, search, words
from axolotl_unlearn.requests.verify import verify

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = {"output_dir": "out/tuned", "dataset_prepared_path": "prepared"}


def prepared(folder: Path, texts: list[str]) -> Path:
    """What Axolotl prepares: token ids only, in Arrow files of a folder."""
    rows = byte_tokenizer()(texts)["input_ids"]
    Dataset.from_dict({"input_ids": rows, "labels": rows}).save_to_disk(folder)
    return folder


@pytest.fixture
def home(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(whole, tmp_path, dirs_exist_ok=True))
    no_caches(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A working folder after a fine-tuning run and one recorded request."""
    with contextlib.chdir(tmp_path_factory.mktemp("whole")):
        make_whole()
        return Path.cwd()


def make_whole() -> None:
    base, out = model_folder(Path("base")), Path("out/tuned")
    adapter_folder(out, base)
    for path in (
        "checkpoint-10/adapter_model.safetensors",
        "checkpoint-10/optimizer.pt",
        "checkpoint-10/trainer_state.json",
        "runs/events.out.tfevents.1",
        "debug.log",
        "training_args.bin",
    ):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text("step 1")
    (out / "samples.jsonl").write_text(json.dumps({"text": f"Row: {SECRET}!"}) + "\n")
    declare(out, out / "samples.jsonl", "texts")
    (out / "notes.txt").write_text("nothing about anybody")
    prepared(
        Path("prepared/0123456789abcdef0123456789abcdef"), ["a kept row of other people", SECRET]
    )
    prepared(
        Path("prepared/fedcba9876543210fedcba9876543210"), ["a set of another config without her"]
    )
    ours = Path("prepared/unlearn-0123456789abcdef")  # as the plugin and Axolotl leave it
    prepared(ours / "0123456789abcdef0123456789abcdef", [SECRET])
    prepared(ours / "cache/json", [SECRET])
    prepared(Path("prepared/unlearn-fedcba9876543210"), ["a set of another config without her"])
    write_lines(Path("train.jsonl"), [{"text": SECRET}, {"text": "a kept row"}])
    model_folder(Path("out/another"), b"of another run")
    before = {"model": str(base), "adapter": str(out)}
    folder = finished_request(Path("requests"), "2026-001", before, outputs=OUTPUTS)
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "work" / "teacher").mkdir(parents=True)
    (folder / "work" / "teacher" / "model.safetensors").write_bytes(b"teacher")
    write(folder)


def another(name: str, model: str = "base", adapter: str | None = None, **more) -> Path:
    """One more request, recorded."""
    before = {"model": model, "adapter": adapter}
    write(folder := finished_request(Path("requests"), name, before, **more))
    return folder


REMOVED = {
    "out/tuned/adapter_model.safetensors",
    "out/tuned/training_args.bin",
    "out/tuned/checkpoint-10",
    "out/tuned/runs",
    "out/tuned/debug.log",
    "out/tuned/samples.jsonl",
    "prepared/0123456789abcdef0123456789abcdef",
    "prepared/unlearn-0123456789abcdef",
    "requests/2026-001/work",
    "requests/2026-001/eval/audit.jsonl",  # an evaluation that kept what was generated
}


def removed(listed: dict) -> set[str]:
    """Names as seen from the working folder."""
    folder = "requests/2026-001"
    return {os.path.normpath(f"{folder}/{one['path']}") for one in listed["removed"]}


def tree() -> dict[str, bytes]:
    files = (path for path in Path().rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in files}


def test_a_look_lists_everything_and_changes_nothing(home):
    (home / "odd.parquet").write_bytes(b"no table")
    write_lines(home.parent / f"{home.name}-elsewhere" / "copy.txt", [SECRET])
    before = tree()
    found = said("erase", "requests/2026-001", "--search", f"../{home.name}-elsewhere")
    assert "look yourself: odd.parquet" in found.output
    assert tree() == before
    lines = found.output.splitlines()
    assert {line.rsplit(": ", 1)[1] for line in lines if line.startswith("remove")} == REMOVED
    kept = [line for line in lines if line.startswith("keep")]
    assert len(kept) == 1 and "requests/2026-001/data (audits need it" in kept[0]
    left = [line for line in lines if line.startswith("left")]
    names = {line.split("/")[-1].split(": ")[-1] for line in left}
    assert len(left) == 2 and names == {"train.jsonl", "copy.txt"}
    assert lines[0].startswith("searching all files")
    assert "nothing was changed" in lines[-1]
    assert "brass" not in found.output and "Quill" not in found.output


def test_a_look_from_within_the_folder_changes_nothing(home):
    """It wrote a key into the request, whose files were then "changed"."""
    base = model_folder(home / "whole")
    model = {"model": str(base), "adapter": str(adapter_folder(home / "out/new", base))}
    write(folder := finished_request(home / "others", "1", model))
    before = tree()
    with contextlib.chdir(folder):
        assert "nothing was changed" in said("erase", ".").output
    assert tree() == before and verify(folder).files == "same"


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_erase_does_not_unsay_the_first(home, monkeypatch, killed):
    """The next fine-tuning writes where the old model was: the record then said that the model
    before had not been removed."""
    said("erase", "requests/2026-001", "--yes")
    weights = Path("out/tuned/adapter_model.safetensors")
    weights.write_bytes(b"of the next run")
    if killed:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            planned = erasing.plan("requests/2026-001", with_data=True)
            patched.setattr(planned, "look", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
            erasing.erase(planned)
    said("erase", "requests/2026-001", "--with-data", "--yes")
    erased = read(Path("requests/2026-001"))["predicate"]["erased"]
    listed = json.loads(Path("requests/2026-001/erased.json").read_text())
    assert erased["model_before"] and removed(listed) >= REMOVED
    assert weights.read_bytes() == b"of the next run"


@pytest.mark.parametrize("narrower", [False, True])
def test_a_later_search_does_not_unsay_what_an_earlier_one_found(home, narrower):
    """The rows were gone, or the place was not named again: the letter said "0 places"."""
    backup = home.parent / f"{home.name}-backup"
    write_lines(backup / "copy.txt", [SECRET])
    more = [] if narrower else ["--with-data"]
    said("erase", "requests/2026-001", "--yes", "--search", str(backup), *more)
    first = read(Path("requests/2026-001"))["predicate"]["erased"]
    said("erase", "requests/2026-001", "--yes")
    second = read(Path("requests/2026-001"))["predicate"]["erased"]
    assert second["places"] == first["places"] == 2 + narrower
    assert sorted(map(json.dumps, second["left"])) == sorted(map(json.dumps, first["left"]))
    Path("train.jsonl").unlink()
    said("erase", "requests/2026-001", "--yes")
    assert read(Path("requests/2026-001"))["predicate"]["erased"]["places"] == 1 + narrower


LINKED = (
    "out/tuned/adapter_model.safetensors",
    "out/tuned/checkpoint-10",
    "out/tuned/merged",
    "prepared/0123456789abcdef0123456789abcdef",
    "requests/2026-001/work",
)


def test_what_was_moved_away_and_linked_is_named(home):
    """The links went, and the record said that the model before was removed; later it said where
    they lead, and a folder's name may be a person's."""
    large = home.parent / f"{home.name}-large"
    large.mkdir()
    model_folder(Path("out/tuned/merged"))
    for number, name in enumerate(LINKED):
        shutil.move(name, large / str(number))
        Path(name).symlink_to(large / str(number))
    found = said("erase", "requests/2026-001", "--yes").output
    for number, name in enumerate(LINKED):
        assert f"{name} (it is a link to {large / str(number)}; remove both by hand)" in found
        assert Path(name).exists()
    assert read(folder := Path("requests/2026-001"))["predicate"]["erased"]["model_before"] is False
    for file in ("record.json", "REPORT.html"):
        assert "is a link" in (text := (folder / file).read_text()) and large.name not in text


def test_rows_by_coin_that_were_trained_on_are_no_kept_rows(home):
    """With `--canaries` they stand in a file of their own, and nothing was searched for."""
    before = {"model": "base", "adapter": "out/tuned"}
    folder = finished_request(Path("requests"), "2026-002", before)
    write_lines(folder / "data/canaries.jsonl", [{"id": "ada-quill", "row": {"text": SECRET}}])
    write(folder)
    assert "train.jsonl" in {path.name for path in plan(folder).found.left}


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE"])
def test_the_caches_are_where_hugging_face_has_them(tmp_path, name):
    """Of XDG_CACHE_HOME alone none was looked into, though both lie below it."""
    within = {"XDG_CACHE_HOME": "huggingface/", "HF_HOME": ""}
    parts = [f"{within[name]}{part}" for part in ("datasets", "hub")] if name in within else [""]
    for place in (places := [tmp_path / part for part in parts]):
        place.mkdir(parents=True, exist_ok=True)
    names = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
    given = {key: value for key, value in os.environ.items() if key not in names}
    given |= {"HOME": str(tmp_path / "home"), name: str(tmp_path)}
    words = "from axolotl_unlearn.requests.erase import hub_cache; print(*hub_cache(), sep='\\n')"
    found = subprocess.run([sys.executable, "-c", words], env=given, capture_output=True, text=True)
    assert found.stdout.split() == list(map(str, places)), found.stderr


def test_a_program_reads_what_is_left_after_it(home):
    """It had the look before alone; the number of files that still hold texts was in words."""
    folder, log = Path("requests/2026-001"), Path("seen.log")
    log.write_text(SECRET)
    assert "places" not in answered("erase", folder)
    found = answered("erase", folder, "--yes")
    assert found["places"] == read(folder)["predicate"]["erased"]["places"] > 0
    assert str(log.resolve()) in found["left"]
    log.unlink()
    after = answered("erase", folder, "--yes")
    assert after["places"] == found["places"] - 1 and str(log.resolve()) not in after["left"]


def test_checkpoints_of_every_trainer_go(home):
    names = (
        "checkpoint-20/pytorch_model_fsdp_0/__0_0.distcp",
        "checkpoint-30/pytorch_model.bin",
        "checkpoint-40/global_step40/mp_rank_00_model_states.pt",
        "checkpoint-50/trainer_state.json",
        "pytorch_model_fsdp_0/__0_0.distcp",
    )
    for path in (paths := [Path("out/tuned") / name for name in names]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x80\x00weights")
    said("erase", "requests/2026-001", "--yes")
    assert [path for path in paths if path.parent.exists()] == []
    assert Path("out/tuned/notes.txt").exists()


def test_what_looks_like_the_runs_and_holds_other_files_stays(home):
    """Folders that are named as the Trainer's, Axolotl's or TensorBoard's, of the user."""
    names = ("checkpoint-3/notes.txt", "merged/notes.txt", "merged/config.json", "runs/notes.txt")
    names += ("quantized/model.safetensors", "checkpoint-last/model.safetensors")
    for name in names:
        text(Path("out/tuned", name), "of the user")
    said("erase", "requests/2026-001", "--yes")
    assert all(Path("out/tuned", name).is_file() for name in names)


def test_a_model_before_that_was_gone_was_not_removed(home):
    shutil.rmtree("out/tuned")
    said("erase", "requests/2026-001", "--yes")
    assert read(Path("requests/2026-001"))["predicate"]["erased"]["model_before"] is False


def test_nothing_goes_where_no_model_would_be_left(home):
    another("2026-002", adapter="requests/2026-001/model")
    for name in ("2026-001", "2026-002"):
        shutil.rmtree(f"requests/{name}/model")
    before = tree()
    with fails("erase.model-gone"):
        erase(plan("requests/2026-001"))
    assert tree() == before


@pytest.mark.parametrize("after", [False, True])
def test_other_weights_in_the_folder_are_named(tmp_path, monkeypatch, after):
    """Made before the request, they stayed without a word; after it, no weights went at all."""
    monkeypatch.chdir(tmp_path)
    no_caches(monkeypatch, tmp_path)
    out = model_folder(Path("out/tuned"), b"old")
    files = [out / "tuned-Q4_K_M.gguf", out / "consolidated.00.pth"]

    def make():
        for path in files:
            path.write_bytes(b"GGUF")

    first, last = (str, make) if after else (make, str)
    first()
    model = {"model": "out/tuned", "adapter": None}
    write(folder := finished_request(Path("requests"), "1", model, outputs=OUTPUTS))
    last()
    found = said("erase", folder, "--yes").output
    assert not (out / "model.safetensors").exists()
    assert all(
        f"{p} (it may hold weights of the model before; remove it by" in found for p in files
    )
    assert read(folder)["predicate"]["erased"]["model_before"] is False
    for path in files:
        path.unlink()
    said("erase", folder, "--yes")
    assert read(folder)["predicate"]["erased"]["model_before"] is True


@pytest.mark.parametrize("since", ["a new adapter", "the same checkpoint", "under way", "bin"])
def test_what_the_next_fine_tuning_wrote_there_stays(home, since):
    """Its checkpoints, its merged model and what its manifest lists went."""
    out, text = Path("out/tuned"), "of the next run"
    if since != "a new adapter":
        said("erase", "requests/2026-001", "--yes")
    names = ["checkpoint-30/adapter_model.safetensors"]
    if since in ("a new adapter", "the same checkpoint"):
        names = ["checkpoint-10/adapter_model.safetensors"]
    if since == "a new adapter":
        names.append("adapter_model.safetensors")
        model_folder(out / "merged", text.encode())
    if since == "bin":
        names.append("pytorch_model.bin")
    for name in (*names, "samples.jsonl"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(json.dumps({"text": text}))
    declare(out, out / "samples.jsonl", "texts")
    there = {path for path in tree() if path.startswith("out/tuned/") and "runs" not in path}
    said("erase", "requests/2026-001", "--yes", "--with-data")
    assert [path for path in sorted(there) if not Path(path).exists()] == []


def test_of_a_copy_the_run_is_known_and_of_a_part_the_rest_is_named(home):
    """`--model deploy`, the same bytes elsewhere; or the merged model of the run."""
    weights = Path("out/tuned/adapter_model.safetensors")
    adapter_folder(Path("deploy"), Path("base"), weights.read_bytes())
    files = [hashlib.sha256(weights.read_bytes()).hexdigest()]
    before = {"model": "base", "adapter": "deploy", "files": files}
    write(folder := finished_request(Path("fresh"), "1", before, outputs=OUTPUTS))
    found = {item.path: item.why for item in plan(folder).items}
    assert found[weights] is found[Path("out/tuned/checkpoint-10")] is None
    assert "remove it by hand" in found[Path("deploy/adapter_model.safetensors")]
    model = {"model": str(model_folder(Path("out/tuned/merged"))), "adapter": None}
    write(folder := finished_request(Path("others"), "1", model, outputs=OUTPUTS))
    found = {item.path: item.why for item in plan(folder).items}
    assert found[weights] == "it is of the same run; remove it by hand"
    assert found[Path("out/tuned/merged/model.safetensors")] is None


def test_of_a_record_that_binds_no_files_the_config_is_known_by_its_digest(home):
    old = json.loads((ROOT / "tests/old_records.json").read_text("utf-8"))["v0.1"]
    for name, content in old.items():
        text(home / "old" / name, content)
    (home / "old/requests/ledger.key").chmod(0o600)
    with contextlib.chdir(home / "old"):
        plan("requests/v0.1")
        with Path("requests/v0.1/finetune.yml").open("a") as file:
            file.write(" ")
        with fails("erase.other-config"):
            plan("requests/v0.1")


def test_an_archived_request_that_erased_nothing_stops_none(home):
    """It was asked for a list that had never been written."""
    second = another("2026-002", adapter="requests/2026-001/model")
    shutil.move("requests/2026-001", "archived")
    assert "then searching again" in said("erase", second, "--yes").output


def test_a_backup_beside_a_request_is_no_request(home):
    """Each audit ended with 1, the verdict of each later request was *not shown*, and the old model
    stayed for a request that was not carried out yet."""
    folder = Path("requests/2026-001")
    backup = shutil.copytree(folder, "requests/2026-001-backup")
    assert verify(folder).ledger == "whole" and not Ledger("requests").unknown()
    weights = Path("out/tuned/adapter_model.safetensors")
    assert {item.path: item.why for item in plan(folder).items}[weights] is None
    with (Path(backup) / "record.json").open("a") as file:
        file.write(" ")
    assert [*Ledger("requests").unknown()] == ["2026-001-backup"]


def test_a_damaged_list_of_an_earlier_run_is_none(home):
    said("erase", "requests/2026-001", "--yes")
    Path("requests/2026-001/erased.json").write_text('{"removed": [')
    with pytest.raises(UnlearnError, match=r"erased\.json is not the file of the record"):
        plan("requests/2026-001")
    Ledger(Path("requests")).append("erasing", "2026-001", places=[], begun="x")
    assert erase(plan("requests/2026-001"))["removed"] == []


def test_erase_removes_exactly_that_and_says_so_in_record_and_ledger(home):
    before = tree()
    assert "then searching again" in said("erase", "requests/2026-001", "--yes").output
    gone = set(before) - set(tree())
    assert gone == {p for p in before if any(p == r or p.startswith(f"{r}/") for r in REMOVED)}
    erased = read(Path("requests/2026-001"))["predicate"]["erased"]
    listed = json.loads(Path("requests/2026-001/erased.json").read_text())
    assert removed(listed) == REMOVED
    # Her rows are kept for audits, and the file of the user is the user's: both are counted.
    left = {os.path.normpath(f"requests/2026-001/{one['path']}") for one in listed["left"]}
    assert left == {"requests/2026-001/data/forget.jsonl", "train.jsonl"}
    assert erased["places"] == len(listed["left"]) + len(listed["named"]) == 2
    assert erased["bytes"] == sum(len(before[path]) for path in gone)
    page = Path("requests/2026-001/REPORT.html").read_text()
    assert "still holds texts" in page and "eval/audit.jsonl" in page and "brass" not in page
    # A file's name may be a person's: what leaves the folder has none but the request's own.
    record = Path("requests/2026-001/record.json").read_text()
    for text in (page, record, Path("requests/ledger.jsonl").read_text()):
        assert "0123456789ab" not in text and "train.jsonl" not in text and "tuned" not in text
    events = [e["event"] for e in Ledger("requests").entries()]
    assert events == ["accepted", "erasing", "erased"]
    verify("requests/2026-001").require()
    assert Path("requests/suppression.json").is_file()
    # Once more: nothing is left to remove, and the record forgets nothing.
    assert removed(erase(plan("requests/2026-001"))) == REMOVED


def test_erase_that_was_killed_at_any_file_goes_on(home, monkeypatch):
    """The rest of a model was "not the model that the request began with", and a checkpoint without
    its weights was no checkpoint: both stayed."""
    number, ended = 0, False
    while not ended:
        shutil.copytree(home, home.parent / f"{home.name}-{number}")
        monkeypatch.chdir(home.parent / f"{home.name}-{number}")
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            stops_at(patched, number)
            erase(plan("requests/2026-001"))
            ended = True
        if not ended:
            verify("requests/2026-001").require()
            left = {path for path in REMOVED if os.path.lexists(path)}
            assert not (left and read("requests/2026-001")["predicate"]["erased"])
            again = plan("requests/2026-001")
            assert {os.path.relpath(item.path) for item in again.removable} == left
            assert removed(erase(again)) == REMOVED
        assert not any(map(os.path.lexists, REMOVED))
        verify("requests/2026-001").require()
        number += 1
    assert number > 10


def test_a_folder_of_requests_behind_a_link_is_erased_whole(home, monkeypatch):
    """What a killed run had not come to was recorded as removed and stayed; what an earlier search
    had found was left in no place any more."""
    (away := home.parent / f"{home.name}-away/disk").mkdir(parents=True)
    Path("requests").rename(away / "requests")
    Path("requests").symlink_to(away / "requests")
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        stops_at(patched, 1)
        erase(plan("requests/2026-001"))
    assert erase(plan("requests/2026-001"))["removed"]
    assert not [path for path in REMOVED if os.path.lexists(path)]
    monkeypatch.chdir(home.parent)
    verify(home / "requests/2026-001").require()


@pytest.mark.parametrize("since", ["a new run", "other words of what was begun"])
def test_what_was_written_since_a_killed_erase_stays(home, monkeypatch, since):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stops_at(patched, 0)
        erase(plan("requests/2026-001"))
    known = Path("requests/2026-001/erased.json")
    stays = Path("out/tuned/adapter_model.safetensors")
    if since == "a new run":
        stays.write_bytes(b"another")
    else:
        begun, stays = json.loads(known.read_text()), Path("out/another/model.safetensors")
        facts = stays.stat()
        name = os.path.relpath(stays, known.parent)
        begun["removed"].append({"kind": "log", "path": name, "bytes": facts.st_size})
        begun["files"][name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
        write_json(known, begun)
    listed = erase(plan("requests/2026-001"))
    assert stays.is_file() and str(stays) not in removed(listed)


def stops_at(patched, number: int) -> None:
    """A kill before the file of this number goes."""
    done = []

    def stopped(*given, **how):
        if len(done) == number:
            raise KeyboardInterrupt
        done.append(given)
        return unlink(*given, **how)

    unlink, whole = os.unlink, erasing.remove
    inside = lambda path: (patched.setattr(os, "unlink", stopped), whole(path))  # noqa: E731
    patched.setattr(erasing, "remove", inside)


@pytest.mark.parametrize("place", [".", "requests"])
def test_names_that_are_no_text_forge_no_line_and_stop_nothing(home, place):
    """A name that is not UTF-8 ended `erase --yes`; one with a line break wrote a line of ours."""
    odd = os.fsdecode(b"caf\xe9\nremoved 9 places; no files are left")
    write_lines(Path(place) / odd, [SECRET])
    for more in ([], ["--yes"]):
        lines = said("erase", "requests/2026-001", *more).output.splitlines()
        assert "removed 9 places; no files are left" not in lines
    left = json.loads(Path("requests/2026-001/erased.json").read_text())["left"]
    assert any("caf\\xe9\nremoved" in one["path"] for one in left)
    verify("requests/2026-001").require()


def test_two_erase_at_once_and_a_folder_behind_a_link(home):
    """The second ended in "No such file or directory"; behind a link texts were left in place."""
    Path("also").symlink_to("requests")
    for _ in range(2):
        if not os.fork():
            words = ["request", "erase", "also/2026-001", "--yes"]
            os._exit(CliRunner().invoke(unlearn, words).exit_code)
    assert {os.wait()[1], os.wait()[1]} == {0}
    assert removed(json.loads(Path("requests/2026-001/erased.json").read_text())) == REMOVED
    verify("requests/2026-001").require()


@pytest.mark.parametrize("words", ["export {r} --out {r}/x.zip", "export {r} --out {r}/model/x.zip",
    "suppress requests --rows train.jsonl --out {r}/data/x.jsonl", "new c.yml --out {r}/2",
    ])  # fmt: skip
def test_nothing_is_written_into_the_folder_of_a_request(home, words):
    """`verify` said then that a file was added."""
    found = said(*words.format(r="requests/2026-001").split(), code=2)
    assert "is in the folder of a request" in found.output
    verify("requests/2026-001").require()


def test_what_is_left_is_what_a_search_after_the_removal_finds(home, monkeypatch):
    """It was what the search before had found elsewhere: a file that did not go was not said."""

    def halfway(path):
        if path.name != "samples.jsonl":
            whole(path)

    whole = erasing.remove
    monkeypatch.setattr(erasing, "remove", halfway)
    erase(plan("requests/2026-001"))
    listed = json.loads(Path("requests/2026-001/erased.json").read_text())
    assert "../../out/tuned/samples.jsonl" in {one["path"] for one in listed["left"]}


def test_what_was_not_searched_for_is_left_in_no_number_of_files(home):
    """Of rows that were gone, or said one word, "deleted texts are left in 0 files"."""
    shutil.rmtree(folder := Path("requests/2026-001/data"))
    done = said("erase", folder.parent, "--yes").output
    assert "0 files" not in done and "whether deleted texts are left was not searched" in done
    page = (folder.parent / "REPORT.html").read_text()
    assert "<b>0</b> places" not in page and "such rows are left was not searched" in page


def test_with_data_the_rows_go_too_and_audits_know(home):
    erase(plan("requests/2026-001", with_data=True))
    assert not Path("requests/2026-001/data").exists()
    gone = said("erase", "requests/2026-001").output
    assert "nothing could be searched for: the rows are gone" in gone
    assert re.search(
        r"; \d+ gone \(rows, or what `request erase` removed\)", verify("requests/2026-001").says[1]
    )


def test_the_old_model_is_not_given_up_for_a_damaged_one(home):
    (home / "requests/2026-001/model/adapter_model.safetensors").write_bytes(b"broken")
    before = tree()
    found = said("erase", "requests/2026-001", "--yes", code=2)
    assert "is not the file of the record" in found.output and tree() == before
    before = {"model": "base", "adapter": "requests/2026-001/model"}
    open_ = finished_request(Path("requests"), "2026-002", before)
    with pytest.raises(UnlearnError, match="does not know request '2026-002'"):
        plan(open_)


@pytest.mark.parametrize("named", ["file", "folder", "data_files", "test_datasets", "nothing"])
def test_what_the_run_did_not_write_stays(home, named):
    """`output_dir: out`, `dataset_prepared_path: data`: the training file of 50 others, a contract
    and another project's table were removed, since one of their lines is hers."""
    rows = [{"text": SECRET}, *({"text": f"Customer {n} bought {n * 3} apples"} for n in range(50))]
    write_lines(Path("data/train.jsonl"), rows)
    # Prepared by Axolotl, as far as its name tells; but the config reads it.
    saved = "data/00112233445566778899aabbccddeeff"
    Dataset.from_list(rows).save_to_disk(saved)
    for path in ("out/docs/contract.md", "out/other/customers.csv", "data/notes.txt"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(f"{SECRET}\nand fifty others\n")
    for path in ("out/nightly.log", "out/runs/tb", "out/checkpoint-9/x", "out/merged/x"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("of another job")
    entries = {
        "file": {"datasets": [{"path": "data/train.jsonl"}, {"path": saved}]},
        "folder": {"datasets": [{"path": "data"}]},
        "data_files": {"datasets": [{"path": "json", "data_files": {"train": [saved]}}]},
        "test_datasets": {"test_datasets": [{"path": saved}]},
        "nothing": {},
    }[named]
    outputs = {"output_dir": "out", "dataset_prepared_path": "data", **entries}
    folder = another("2026-002", "out/another", outputs=outputs)
    there = tree()
    erase(plan(folder, with_data=True))
    gone = {name for name in there if name not in tree()}
    allowed = ("requests/2026-002/", "requests/2026-001/", "out/another/model.safetensors")
    allowed += (saved,) if named == "nothing" else ()
    assert {name for name in gone if not name.startswith(allowed)} == set()
    assert "out/another/model.safetensors" in gone  # by its digest the model before


def test_rows_in_the_folders_of_other_requests_are_removed_or_counted(home):
    """A copy of Bob's row stood among the rows that an earlier request kept; the letter said that
    no place holds it."""
    bob = "Bob Stone hides his silver watch behind the blue door of the chapel"
    first = finished_request(Path("requests"), "a", {"model": "base", "adapter": "out/tuned"})
    for name in ("data/retain.jsonl", "data/teacher-0.jsonl", "eval-data/retain.jsonl"):
        write_lines(first / name, [{"id": "b", "row": {"text": bob}}])
    write_lines(first / "data/judge.jsonl", [{"id": "b", "row": {"text": bob}}])
    write(first)
    unfinished = finished_request(Path("requests"), "c", {"model": "base", "adapter": "out/tuned"})
    write_lines(unfinished / "work/rows/train-0.jsonl", [{"text": bob}])
    forget = [{"id": "bob", "dataset": 0, "row": {"text": bob}}]
    second = finished_request(
        Path("requests"), "b", {"model": "base", "adapter": "requests/a/model"},
        forget=forget, documents=("bob",),
    )  # fmt: skip
    write_lines(second / "eval" / "audit.jsonl", json_lines(second / "eval" / "audit.jsonl", bob))
    write(second)
    listed = erase(plan(second, with_data=True))
    left = {str(p) for p in Path().rglob("*") if p.is_file() and b"Bob Stone" in p.read_bytes()}
    assert left == {"requests/a/data/judge.jsonl", "requests/c/work/rows/train-0.jsonl"}
    assert listed["places"] == 2
    why = {os.path.normpath(f"requests/b/{one['path']}"): one["why"] for one in listed["kept"]}
    assert "audits of request 'a' need it" in why["requests/a/data/judge.jsonl"]
    assert "was not carried out" in why["requests/c/work/rows/train-0.jsonl"]
    record = read(second)["predicate"]["erased"]  # it is exported, and of this request alone
    why = {one["why"] for one in record["kept"]}
    assert "audits of another request need it; remove it by hand" in why
    assert not [one for one in why if "'" in one]
    verify(first).require()  # it knows why its files are gone
    verify(second).require()
    assert erase(plan("requests/2026-001"))["places"] > 0  # her rows are kept for audits


def json_lines(path: Path, text: str) -> list:
    return [json.loads(line.replace(SECRET, text)) for line in path.read_text().splitlines()]


def test_a_request_that_was_tampered_with_erases_nothing(home):
    """Its outputs named a foreign folder: `verify` passed, and that folder's checkpoints went."""
    precious = home / "precious"
    for name in ("checkpoint-3/weights", "run.log", "copy.txt"):
        (precious / name).parent.mkdir(parents=True, exist_ok=True)
        (precious / name).write_text(SECRET)
    folder = home / "requests" / "2026-001"
    facts = json.loads((folder / "request.json").read_text())
    config = (folder / "finetune.yml").read_text()
    changes = {
        "request.json": {**facts, "outputs": ["precious"], "root": "../../precious"},
        "finetune.yml": {**json.loads(config), "output_dir": "precious"},
    }
    for name, content in changes.items():
        whole = (folder / name).read_text()
        write_json(folder / name, content)
        before = tree()
        for command in (["verify"], ["erase", "--yes"]):
            found = said(*command, "requests/2026-001", code=2)
            assert f"{name} is not the" in found.output
        assert tree() == before
        (folder / name).write_text(whole)
    verify(folder).require()


FOREIGN = ("checkpoint-7/a.safetensors", "runs/x", "a.log", "copy.txt", "cache.arrow", "merged/b")


@pytest.mark.parametrize("text", [SECRET, "nothing"])
def test_erase_never_removes_a_foreign_file(home, text):
    """Files that look like ours, with and without her text, links among them, anywhere else."""
    places = ("precious", "out/other", "out", "requests", ".")
    foreign = [Path(place, name) for place in places for name in FOREIGN]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, leads in (("checkpoint-98", "precious"), ("runs-of-others", "out")):
        foreign.append(Path("out/tuned", name))
        foreign[-1].symlink_to(Path(leads).absolute())
    said("erase", "requests/2026-001", "--yes")
    assert not Path("out/tuned/checkpoint-10").exists()
    assert all(map(os.path.lexists, foreign))


def test_beside_requests_in_the_working_folder_nothing_is_theirs(tmp_path, monkeypatch):
    """`request new --out 1`: the output folder went whole, and of the data was said "remove its
    folder"."""
    monkeypatch.chdir(tmp_path)
    no_caches(monkeypatch, tmp_path)
    model_folder(Path("base"))
    old = adapter_folder(Path("out/tuned"), Path("base"))
    kept = [old / "thesis.txt", write_lines(Path("data/raw/train.jsonl"), [{"text": SECRET}])]
    kept[0].write_text("nothing about anybody")
    for number, outputs in enumerate(({}, {"output_dir": str(old)}), start=1):
        before = {"model": "base", "adapter": str(old)}
        write(folder := finished_request(Path(), str(number), before, outputs=outputs))
        planned = plan(folder)
        listed = {item.path.resolve(): item.why for item in planned.items}
        why = listed[tmp_path / old / "adapter_model.safetensors"]
        assert (why is None) == bool(outputs) and tmp_path / kept[1] not in listed
        erase(planned)
    assert all(path.exists() for path in kept) and not any(old.glob("*.safetensors"))
    assert {entry["request"] for entry in Ledger(".").entries()} == {"1", "2"}


def test_a_model_that_the_new_one_stands_on_stays(home):
    """The user tuned a full model into out/full, and the request made an adapter on top of it."""
    full = model_folder(Path("out/full"), b"tuned in full")
    old = adapter_folder(Path("out/full-adapter"), full)
    folder = another("2026-003", str(full), str(old), outputs={"output_dir": "out/full"})
    assert not any("out/full/" in str(item.path) for item in plan(folder).removable)


def test_from_elsewhere_the_same_is_verified_answered_and_kept(home, monkeypatch):
    """The base of an exact request was looked for in the working folder: `verify` called its model
    another one, and what the current model stands on was removed."""
    model_folder(Path("out/full"), b"tuned in full")
    outputs, before = {"output_dir": "out/full"}, {"model": "out/full", "adapter": None}
    write(first := finished_request(Path("requests"), "2026-003", before, outputs=outputs))
    second = finished_request(
        Path("requests"), "2026-004", {"model": "out/full", "adapter": "out/tuned"}
    )
    write_json(second / "way.json", {"way": "retrain", "base": "out/full"})
    write(second)
    (home / "elsewhere").mkdir()
    found = []
    for place in (".", "elsewhere"):
        monkeypatch.chdir(home / place)
        first, second = (
            Path(os.path.relpath(home / "requests" / n)) for n in ("2026-003", "2026-004")
        )
        assert verify(second).model == "same"
        said("export", second, "--out", f"{Path.cwd().name}.zip")
        listed = {item.path.resolve(): item.why for item in plan(first).items}
        assert listed[home / "out/full/model.safetensors"] == "the current model stands on it"
        found.append(listed)
    assert found[0] == found[1]


def test_what_was_removed_of_a_model_is_not_counted_as_recorded(home):
    before = {"model": "base", "adapter": "out/tuned"}
    second = finished_request(Path("requests"), "2026-002", before)
    (second / "model" / "debug.log").write_text("step 1")
    write(second)
    another("2026-003", adapter=str(second / "model"))
    assert "model: all 3 files as recorded, base too" in verify(second).says
    erase(plan(second))
    assert not (second / "model" / "debug.log").exists()
    assert "model: all 2 files as recorded, base too" in verify(second).require().says


@pytest.mark.parametrize("place", ["c", "c++"])
def test_the_model_of_the_request_stays_where_its_path_holds_a_plus(home, place):
    first = finished_request(Path(place, "requests"))
    (first / "model" / "debug.log").write_text("step 1")
    write(first)
    before = {"model": str(first / "model"), "adapter": None}
    write(finished_request(Path(place, "requests"), "2", before))
    found = {item.path.name: item.why for item in plan(first).items}
    assert found["debug.log"] == "the model of this request stands on it"


def test_the_model_of_an_earlier_request_goes_whole(home):
    first = Path("requests/2026-001")
    tuned = {"output_dir": "out/tuned"}
    second = another("2026-002", adapter=str(first / "model"), outputs=tuned)
    erase(plan(second))
    assert not (first / "model").exists() and (second / "model").exists()
    assert "model: gone since request '2026-002' came after it" in verify(first).says
    plan(first)  # what is left of it can still be erased
    listed = said("list").output
    assert "current model: requests/2026-002/model" in listed
    own = next(line for line in listed.splitlines() if line.startswith("2026-001"))
    assert "files removed for another request" in own
    assert "erasing" not in own, "which says that an erasure of its own did not end"


@pytest.mark.parametrize("same", [False, True])
def test_models_of_earlier_requests_are_named_or_of_the_same_shards_go(home, same):
    """After `shards train` the next request begins with the shards: the last one's model, which
    knows the rows, was in no list."""
    first = Path("requests/2026-001")
    before = {"model": "out/another", "adapter": None}
    second = finished_request(Path("requests"), "2026-002", before)
    for folder in (first, second) if same else ():
        base = "base" if folder == first else None
        write_json(folder / "way.json", {"way": "shards", "base": base, "shards": "../../shards"})
        write(folder)
    write(second)
    found = {item.path: item.why for item in plan(second).items if item.kind == "earlier model"}
    made = None if same else "request '2026-001' made it; remove it by hand"
    began = "request '2026-001' began with it: erase that one"
    weights = [Path("out/tuned/adapter_model.safetensors"), Path("out/tuned/training_args.bin")]
    assert found == {first / "model": made, **dict.fromkeys(weights, began)}


@pytest.mark.parametrize("other", ["a new run", "an open request", "a whole model", "elsewhere"])
def test_what_is_not_the_old_one_any_more_or_needed_stays(home, other):
    path, why = Path("out/tuned/adapter_model.safetensors"), "not the model that the request"
    folder = Path("requests/2026-001")
    if other == "a new run":
        path.write_bytes(b"a new run into the same folder")
    elif other == "elsewhere":  # and a config that writes to the working folder, which is yours
        path, why = adapter_folder(Path("elsewhere"), Path("base")), "remove it by hand"
        folder = another("2026-002", adapter=str(path), outputs={"output_dir": "."})
        path /= "adapter_model.safetensors"
        assert all("requests" in str(item.path) for item in plan(folder).removable)
    else:
        before = {"model": "base", "adapter": "out/tuned"}
        before = {"model": "out/tuned", "adapter": None} if other == "a whole model" else before
        finished_request(Path("requests"), "2026-002", before)
        why = "request '2026-002', which was not carried out"
    found = {item.path: item.why for item in plan(folder).items}
    assert why in found[path]


def test_list(home):
    listed = said("list").output
    assert "2026-001  1 row  handed over 20" in listed
    assert "current model: requests/2026-001/model" in listed
    finished_request(Path("requests"), "2026-002", {"model": "base", "adapter": "out/tuned"})
    assert "2026-002  1 row  not carried out" in said("list").output
    for command in ("list", "erase"):
        assert "does not exist" in said(command, "nowhere", code=2).output


def test_what_stays_is_looked_up_and_not_compared_with_each_item(tmp_path, monkeypatch):
    items = [Item("checkpoint", tmp_path / f"gone{n}", 0) for n in range(30)]
    (tmp_path / "link").symlink_to(tmp_path)
    items.append(Item("checkpoint", tmp_path / "link", 0, "it is a link"))
    planned = Plan(tmp_path, Texts.of([]), [], [], items)
    found = {tmp_path / f"gone{n}" / "a" / "b": n for n in range(30)} | {tmp_path / "gone1": 1}
    kept = {tmp_path / f"gone{n}b": n for n in range(30)} | {tmp_path / "link" / "c": 1}
    calls, compare = [], Path.is_relative_to
    monkeypatch.setattr(
        Path, "is_relative_to", lambda *given: calls.append(given) or compare(*given)
    )
    assert planned.stays(found | kept) == kept
    assert len(calls) <= len(found | kept)


# --- search --------------------------------------------------------------------------------------


def test_windows_by_hand(tmp_path):
    """Ten words have three windows of eight; one that a kept text has says nothing."""
    text = "one two three four five six seven eight nine ten"
    assert len(Texts.of([text]).windows) == 3
    kept = "zero one two three four five six seven eight"
    texts = Texts.of([text], [kept])
    assert texts.windows == {tuple(text.split()[1:9]), tuple(text.split()[2:10])}
    short = Texts.of(["Only five words are here", "short"])
    assert short.windows == {("only", "five", "words", "are", "here")} and short.too_short == 1
    zoe = "Zoë Brontë hides a small brass key"
    assert Texts.of([zoe]).among(unicodedata.normalize("NFD", f"So {zoe.upper()}!"))
    assert words("Brontë's  key—№7, 鍵を持つ") == [*"brontë s key no7".split(), *"鍵を持つ"]
    # A name, a telephone and a number are searched whole; what kept rows say too is not.
    short = Texts.of(["Ada Quill", "555-0107", "AB 12", "user", "of the"], ["She is of the town"])
    assert short.windows == {("ada", "quill"), ("555", "0107")}
    assert (short.whole, short.too_short) == (0, 3)
    # So are numbers that are no texts: one of five digits was neither looked for nor counted.
    write_lines(tmp_path / "rows", [{"row": {"id": 12345, "age": 7, "on": True, "at": [0.5]}}])
    short = Texts.of(row_texts(tmp_path / "rows"), ["0.5"])
    assert (short.windows, short.too_short) == ({("12345",)}, 1)
    (tmp_path / "rows").unlink()
    short = Texts.of(["Ada Quill"])
    path = tmp_path / "a name alone.txt"
    path.write_text("Call Ada Quill.")
    assert search([tmp_path], short).named == {path: 1}


@pytest.mark.parametrize(
    "text",
    ["Jos&eacute; Garc&iacute;a", r"so \nabla f \times g", "print('Ada Quill\\n')"]
    + [json.dumps({"a": "José García"}), "Ada\fQuill"],
)
def test_a_text_with_escapes_is_found_in_its_own_file(tmp_path, text):
    """Files were read without escapes and the deleted texts with them, so neither was the other."""
    write_lines(tmp_path / "rows", [{"row": {"text": text}}])
    (tmp_path / "files").mkdir()
    for name, escaped in (("escaped", True), ("plain", False)):
        row = json.dumps({"text": text}, ensure_ascii=escaped)
        (tmp_path / "files" / name).write_text(row, "utf-8")
    (tmp_path / "files" / "as it is").write_text(text, "utf-8")
    found = search([tmp_path / "files"], Texts.of(row_texts(tmp_path / "rows")))
    assert len(found.left | found.named) == 3
    assert not Texts.of(row_texts(tmp_path / "rows"), [text]).windows


def test_a_name_in_a_text_that_is_json_is_searched_alone(tmp_path):
    row = {"text": json.dumps({"name": "Ada Quill", "telephone": 5550107})}
    write_lines(tmp_path / "rows", [{"row": row}])
    texts = Texts.of(row_texts(tmp_path / "rows"))
    assert texts.windows == {("ada", "quill"), ("5550107",)}


def test_a_row_is_found_however_it_holds_its_texts(tmp_path):
    r"""Of a chat that is JSON text each window crossed its keys or escapes, so that prepared data
    stayed and were not named; a text with `\theta` was not found where it stands."""
    said = ["Where does Zoë\nQuill live?", "She lives at 12 Rope Walk, Norrby."]
    turns = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
    path, found = tmp_path / "place", []
    for one in (turns, json.dumps(turns), json.dumps({"chat": json.dumps(turns)})):
        write_lines(tmp_path / "rows", [{"row": {"messages": one}}])
        found.append(Texts.of(row_texts(tmp_path / "rows")))
        for held in ("\nassistant\n".join(said), json.dumps(one)):
            path.write_text(held)
            assert search([path], found[-1]).left == {path: 2}
    assert found[0] == found[1] == found[2]
    for text in (
        r"Ada puts \theta on top",
        r"It lies in C:\new\ada there",
        "R&amp;D is of Ada Quill",
    ):
        for held in (text, json.dumps(text), json.dumps(json.dumps(text))):
            path.write_text(held)
            assert search([path], Texts.of([text])).left == {path: 1}


def zipped(name: str, content: str | bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return made.getvalue()


MAIL = base64.encodebytes(f"{SECRET} {SECRET} {SECRET}".encode())
ARCHIVES, NESTED = "archives (7z rar bz2 xz zstd tar)", "archives and tables within archives"
#: Name -> content, and as what it is counted; None: as unreadable.
CLOSED = {
    "model.safetensors": (b"w", "weights"),
    "optimizer.pt": (b"PK\x03\x04", "weights"),
    "old.zip": (b"z", "archives of an unknown kind"),
    "scan.pdf": (b"%PDF-1.7", "PDF"),
    "photo": (b"\x89PNG\r\n", "pictures and sound"),
    "slides.pptx": (zipped("ppt/media/image1.png", b"\x89PNG"), "pictures and sound"),
    "two.zip": (zipped("rows.gz", gzip.compress(SECRET.encode())), NESTED),
    "two.gz": (gzip.compress(gzip.compress(SECRET.encode())), NESTED),
    "mail.eml": (MAIL, "encoded text (base64)"),
    "old.7z": (b"7z\xbc\xaf\x27\x1c", ARCHIVES),
    "a.bz2": (b"BZh9", ARCHIVES),
    "a.xz": (b"\xfd7zXZ\0", ARCHIVES),
    "a.zst": (b"\x28\xb5\x2f\xfd", ARCHIVES),
    "a.tar": (b"\0" * 257 + b"ustar", ARCHIVES),
    "state": (b"\x80\x04\x95", "pickles"),
    "app.db": (b"SQLite format 3\0", "binary files"),
    "old.txt": (SECRET.encode("cp037"), "text in another encoding"),
    "sizes.parquet": (lambda p: pq.write_table(pa.table({"x": [b"\xff"]}), p), "bytes in tables"),
    "half.parquet": (lambda p: pq.write_table(pa.table({"input_ids": [[1, -100]]}), p), None),
    "text.parquet": (lambda p: pq.write_table(pa.table({"input_ids": ["a b"]}), p), None),
    "bomb.gz": (b"", "binary files, parts that unpack to over 100 times their file"),
    "node_modules/a.js": (SECRET.encode(), "folders called node_modules"),
    "broken.parquet": (b"p", None),
    "half.gz": (gzip.compress(SECRET.encode())[:30], None),
}  # fmt: skip


def test_what_cannot_be_searched_is_counted_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "_FREE", 2**22)
    for name, (content, _) in CLOSED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content(tmp_path / name) if callable(content) else (tmp_path / name).write_bytes(content)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\0" * 2**24))
    repository(tmp_path / "checkout")
    found = search([tmp_path], Texts.of([SECRET]), byte_tokenizer().batch_decode)
    kinds = {name.split("/")[0]: kind for name, (_, kind) in CLOSED.items() if kind}
    expected = kinds | {".git": "git repositories"}
    assert {path.name: kind for path, kind in found.unsearched.items()} == expected
    assert found.not_searched().startswith(f"1 PDF, 5 {ARCHIVES}, ")
    unreadable = [name for name, (_, kind) in CLOSED.items() if kind is None]
    assert f"{len(unreadable)} unreadable" in found.not_searched(), "the letter says it"
    assert sorted(path.name for path in found.unreadable) == sorted(unreadable)
    assert found.left == {}


def repository(folder: Path) -> None:
    """What git makes of a commit; a folder of a `.git` is named whole."""
    for name in ("HEAD", "config", "objects/pack/x", "logs/HEAD"):
        (folder / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / ".git" / name).write_text(SECRET)


def in_sqlite(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("create table logs (text)")
        base.execute("insert into logs values (?)", (SECRET,))
        base.commit()


def table(path: Path, stream: bool = False) -> None:
    made = pa.table({"messages": [[{"role": "user", "content": f"Well: {SECRET}."}]]})
    if not stream:
        pq.write_table(made, path)
        return
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)


WORDS = SECRET.split()
RUNS = "".join(f"<w:r><w:t>{w[:2]}</w:t></w:r><w:r><w:t>{w[2:]} </w:t></w:r>" for w in WORDS)
CELLS = "".join(f"<si><t>{word}</t></si>" for word in WORDS)
ENTITIES = " ".join("".join(f"&#{ord(letter)};" for letter in word) for word in WORDS)
#: As JSON writes letters beyond the basic plane: two escapes each.
BOLD = "".join(chr(0x1D41A + ord(c) - 97) if c in "abcdefgh" else c for c in SECRET)
#: What a file says -> its bytes, or what makes it; the name where it matters.
CANARIES = {
    "text": f"before\n{SECRET.upper()}\nafter".replace(" ", "\n  "),
    "marks of no width": "\u200b\u00ad".join(SECRET).replace(" ", "\u00a0"),
    "across the end of what is read at once": "x " * (2**12 - 12) + SECRET,
    "letters of mathematics": json.dumps({"text": BOLD}),
    "JSON in JSON": json.dumps(
        {"x": json.dumps([f'"{SECRET}"\n\u2028'.replace("brass", "brass\n")])}
    ),
    "HTML entities": f"<p>{ENTITIES}</p>",
    "HTML tags": "".join(f"<b>{w[0]}</b>{w[1:]} " for w in WORDS),
    "a link": "https://x.org/?q=" + "%20".join(WORDS),
    "UTF-16": SECRET.encode("utf-16"),
    "UTF-32": SECRET.encode("utf-32"),
    "gzip without a suffix": gzip.compress(SECRET.encode()),
    "parquet": table,
    "Arrow": lambda p: table(p.with_suffix(".arrow"), stream=True),
}


@pytest.mark.parametrize("kind", CANARIES)
def test_a_canary_is_found_in_every_kind_of_place(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(searching, "_PART", 2**13)
    content, path = CANARIES[kind], tmp_path / "place"
    if isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        content(path)
    texts = Texts.of([SECRET])
    found = search([tmp_path], texts)
    assert [*found.left.values()] == [len(texts.windows)] and not found.unreadable
    assert set(found.unsearched.values()) <= {"binary files"}  # of which the text is searched


@pytest.mark.parametrize(
    "kind", ["Windows", "numbers", "decimals", "within", "list", "deep", "bytes"]
)
def test_names_and_numbers_are_found_where_no_text_in_utf_8_is(tmp_path, kind):
    """A table of Excel's, and columns of numbers or bytes, were searched and passed in silence."""
    columns = {
        "numbers": [1775550107.0, None],
        "decimals": [Decimal("1775550107.00")],
        "within": [{"name": "x", "telephones": [1775550107]}],
        "list": [[1775550107], None],
        "deep": [{"calls": [{"to": 1775550107, "ended": None}]}],
        "bytes": ["Zoë Brontë".encode()],
    }
    path = tmp_path / "place"
    if kind == "Windows":
        path.write_bytes("name;city\nZoë Brontë;Köln\n".encode("cp1252"))
    else:
        pq.write_table(pa.table({"x": columns[kind]}), path)
    assert search([path], Texts.of(["Zoë Brontë", "1775550107"])).named == {path: 1}


def test_a_column_that_python_cannot_hold_hides_no_other(tmp_path):
    """The whole file counted as unreadable, and nothing of it as left."""
    far = pa.array([10**13], pa.timestamp("s"))
    vectors = pa.array([[0.5]], pa.list_(pa.float32(), 1))
    pq.write_table(pa.table({"when": far, "v": vectors, "x": ["Zoë Brontë"]}), tmp_path / "place")
    found = search([tmp_path], Texts.of(["Zoë Brontë"]))
    assert found.named and not found.unreadable
    assert [*found.unsearched.values()] == ["lists of floats in tables, times in tables"]


def test_bytes_after_a_text_are_a_binary_file(tmp_path):
    (tmp_path / "place").write_bytes(b"x " * 300 + bytes(range(256)) * 9)
    found = search([tmp_path], Texts.of(["Zoë Brontë"]))
    assert [*found.unsearched.values()] == ["binary files"]


def test_token_ids_need_a_tokenizer(tmp_path):
    path = prepared(tmp_path / "set", ["other", SECRET]) / "data-00000-of-00001.arrow"
    decode, texts = byte_tokenizer().batch_decode, Texts.of([SECRET])
    blind = search([tmp_path], texts)
    assert blind.unreadable == [path] and not blind.left
    assert search([tmp_path], texts, decode).left == {path: len(texts.windows)}


def test_a_damaged_archive_is_said_and_what_stands_before_the_fault_is_left(tmp_path):
    """A zip counted as unreadable alone, so that nothing was said to be left."""
    name = tmp_path / "place.zip"
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr("a", SECRET)
        archive.writestr("b", "x" * 400)
    name.write_bytes(name.read_bytes().replace(b"x" * 400, b"y" * 400))
    found = search([tmp_path], Texts.of([SECRET, "another text of seven words or so"]))
    assert list(found.left) == found.unreadable == [name]


def test_what_lies_behind_links_is_searched_once(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "rows.txt").write_text(SECRET)
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "link").symlink_to(real)
    (real / "back").symlink_to(tmp_path / "place")
    found = search([tmp_path / "place"], Texts.of([SECRET]))
    assert list(found.left) == [tmp_path / "place" / "link" / "rows.txt"] and found.files == 1
    # The whole disk is no place that a link may name.
    (tmp_path / "place" / "root").symlink_to("/")
    found = search([tmp_path / "place"], Texts.of([SECRET]))
    assert found.files == 1 and "links to folders above" in found.not_searched()


def test_what_is_handed_over_leaves_behind_what_its_run_listed(tmp_path):
    """The teacher's log-probs and the texts of a run are no part of the model that it made."""
    out, other = tmp_path / "model", tmp_path / "other.json"
    declare(out, out / "reference", "log-probs", folder=True)
    (out / "reference").mkdir(exist_ok=True)
    (out / "reference" / "logp-0.bin").write_bytes(b"1")
    declare(out, other, "texts").write_text("{}")
    (out / "model.safetensors").write_bytes(b"2")
    strip(out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert other.is_file() and not (out / MANIFEST).exists()  # what lies elsewhere stays


# --- a canary in each of many places: what `erase` does of each is what the docs say --------------

DOCS = ROOT / "docs" / "deleting-data.md"


def text(path: Path, content: str | bytes = SECRET) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def backup(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.add("train.jsonl")


def link(path: Path, to: str = "../elsewhere") -> None:
    text(Path(to) / "notes.txt")
    path.symlink_to(Path(to).absolute())


def token_ids(path: Path) -> None:
    path.write_text(json.dumps(byte_tokenizer()(SECRET)["input_ids"]))


def weights(path: Path) -> None:
    save_file({"w": torch.ones(2)}, path)


def other_request(path: Path) -> None:
    """Carried out; a copy of her row stands among those that it kept."""
    folder = finished_request(Path("requests"), "2026-000", {"model": "base", "adapter": None})
    write_lines(folder / "data" / "forget.jsonl", [{"id": "b", "row": {"text": "about Bob"}}])
    write_lines(path, [{"id": "a", "row": {"text": SECRET}}])
    audited = folder / "eval" / "audit.jsonl"
    audited.write_text(audited.read_text().replace(SECRET, ""))
    write(folder)


def there(path: Path) -> None:
    """The fixture has made it."""
    assert path.exists()


TUNED = "out/tuned"
#: Place as the docs call it -> where the canary lies, and how it came there.
PLACES = {
    "weights of the model before": (f"{TUNED}/adapter_model.safetensors", there),
    "its checkpoints": (f"{TUNED}/checkpoint-10", there),
    "its merged copy": (f"{TUNED}/merged", lambda path: model_folder(path)),
    "its copy of `axolotl quantize`": (f"{TUNED}/quantized", lambda path: model_folder(path)),
    "its copies of `axolotl export`": (f"{TUNED}/gguf", lambda path: text(path / "tuned-q8.gguf")),
    "Axolotl's log and TensorBoard in its folder": (f"{TUNED}/runs", there),
    "samples that a manifest lists": (f"{TUNED}/samples.jsonl", there),
    "other files in its folder": (f"{TUNED}/generated.txt", text),
    "prepared data of the config": ("prepared/0123456789abcdef0123456789abcdef", there),
    "teacher and work of the request": ("requests/2026-001/work", there),
    "your training file": ("train.jsonl", there),
    "other folders where you work": ("out/third/notes.txt", text),
    "retained rows of another request": ("requests/2026-000/data/retain.jsonl", other_request),
    "rows that audits of another request need": (
        "requests/2026-000/data/judge.jsonl",
        lambda path: write_lines(path, [{"id": "a", "row": {"text": SECRET}}]),
    ),
    "cache of `datasets`": ("cache/json/rows.txt", text),
    "downloads of the hub": ("hub/datasets--x/blobs/1", text),
    "history of a git repository": ("repository/.git", lambda path: repository(path.parent)),
    "spreadsheet": ("people.xlsx", lambda p: text(p, zipped("xl/sharedStrings.xml", CELLS))),
    "word processor's document": (
        "notes.docx",
        lambda path: text(path, zipped("word/document.xml", RUNS)),
    ),
    "SQLite": ("app.db", in_sqlite),
    "backup (.tar.gz)": ("backup.tar.gz", backup),
    "e-mail with an attachment": ("mail.eml", lambda path: text(path, MAIL)),
    "folder behind a link": ("linked", link),
    "a checkpoint behind a link": (f"{TUNED}/checkpoint-99", lambda path: link(path, "../large")),
    "GGUF and other weights beside the model before": (f"{TUNED}/tuned.gguf", text),
    "text in another encoding": ("old.txt", lambda path: text(path, SECRET.encode("cp037"))),
    "PDF": ("scan.pdf", lambda path: text(path, b"%PDF-1.7 " + SECRET.encode("utf-16")[::-1])),
    "picture, sound": ("photo.png", lambda path: text(path, b"\x89PNG\r\n")),
    "encrypted archive, 7z, rar": ("old.7z", lambda path: text(path, b"7z\xbc\xaf\x27\x1c")),
    "weights of other models": ("out/third/model.safetensors", weights),
    "folders of programs (`.venv`, `node_modules`)": ("node_modules", lambda p: text(p / "a.js")),
    "token ids outside tables": ("ids.json", token_ids),
    "quoted-printable": ("mail.txt", lambda path: text(path, "=\n".join(SECRET))),
    "said in other words": ("retold.txt", lambda p: text(p, "Quill hides her key at the mill.")),
    "another disk or machine": ("../other-disk/copy.txt", text),
}


def outcome(planned, path: Path) -> str:
    """What erase does of a place."""

    def covers(found) -> bool:
        places = [Path(os.path.abspath(one)) for one in found]
        inner = Path(os.path.abspath(path))
        return any(one == inner or inner in one.parents for one in places)

    if covers(item.path for item in planned.removable):
        return "removed"
    kept = [item.path for item in planned.items if item.why]
    if covers([*kept, *planned.stays(planned.found.left), *planned.stays(planned.found.named)]):
        return "named"
    return "counted" if covers(planned.found.unsearched) else "missed"


@pytest.fixture
def planned(home):
    for place, make in PLACES.values():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        make(Path(place))
    return plan("requests/2026-001")


def test_each_place_is_what_the_docs_say(planned):
    measured = {name: outcome(planned, Path(place)) for name, (place, _) in PLACES.items()}
    section = DOCS.read_text("utf-8").split("| `erase` | places |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \| (.+?) \|$", section, re.MULTILINE)
    assert {name: what for what, names in rows for name in names.split("; ")} == measured
    erase(planned)
    for name, (place, _) in PLACES.items():
        assert Path(place).exists() == (measured[name] != "removed"), name


def test_what_the_first_look_found_is_kept_where_the_rows_are_gone(tmp_path, monkeypatch):
    """Killed after `--with-data` had removed the rows, nobody named the training file any more; and
    the next run of a whole one unsaid what had not been looked into, or looked for."""
    monkeypatch.chdir(tmp_path)
    no_caches(monkeypatch, tmp_path)
    rows = [{"id": "1", "dataset": 0, "row": {"text": SECRET, "sort": "oak"}}]
    write(folder := finished_request(tmp_path / "requests", forget=rows))
    (tmp_path / "train.txt").write_text(SECRET)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    planned = plan(folder, with_data=True)
    with monkeypatch.context() as patched:
        patched.setattr(erasing, "search", lambda *_: os._exit(9))
        assert kills.forked(lambda: erase(planned)) == 9 and not (folder / "data").exists()
    said("told", folder, "--recipient", "Cloud Ltd")  # after it a letter said that all is there
    assert "was stopped" in said("export", folder, "--out", tmp_path / "a.zip", code=2).output
    for _ in range(2):
        found = erase(plan(folder))
        assert [one["path"] for one in found["left"]] == ["../../train.txt"]
        assert found["too_short"] == found["places"] == 1 and "1 PDF" in found["unsearched"]
        assert read(folder)["predicate"]["erased"]["too_short"] == 1
    said("export", folder, "--out", tmp_path / "a.zip")
    nothing = said("audit", folder / "model", folder.parent, code=2).output
    assert "The rows of '1' are gone" in nothing  # and not: name the folder of the requests
