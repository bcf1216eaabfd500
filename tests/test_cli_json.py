"""``--json``: of every command one JSON object on standard output, and nothing else there."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import eval_model
import pytest
import yaml
from click.testing import CliRunner
from requests_folder import finished_request, model_folder, no_caches, write_lines

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.requests.record import write
from axolotl_unlearn.requests.request import Request, write_json

#: They train: slow tests of test_requests_run and test_shards_requests read what they print.
ELSEWHERE = {"request run", "shards train"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Two tiny models, rows of all kinds, a config that forgets, one that fine-tunes, a request."""
    home = tmp_path_factory.mktemp("json")
    sides = eval_model.made_up_rows(8)
    for seed, name in enumerate(("model", "other")):
        eval_model.train_model(home / name, sides["forget"][:4], steps=1, seed=seed)
    texts = eval_model.documents_of(sides)
    eval_model.write_folder(home / "data", sides, texts, general=8)
    common = {"base_model": str(home / "model"), "sequence_len": 256, "dataset_num_proc": 0}
    common |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-3}
    places = {"output_dir": str(home / "model"), "dataset_prepared_path": str(home / "prepared")}
    sets = [
        {"path": f"{home}/data/{role}.jsonl", "type": f"axolotl_unlearn.data.{role}"}
        for role in ("forget", "retain")
    ]
    block = {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}}
    ours = {"plugins": ["axolotl_unlearn.UnlearnPlugin"], "output_dir": str(home / "out")}
    forgetting = common | ours | {"unlearn": block, "datasets": sets}
    (home / "forget.yml").write_text(yaml.safe_dump(forgetting))
    rows = [{"id": f"p{n}", "text": f"Person {n} keeps {n} bees by the mill."} for n in range(9)]
    write_lines(home / "train.jsonl", rows)
    entry = {"path": str(home / "train.jsonl"), "ds_type": "json", "type": "completion"}
    tuning = common | places | {"datasets": [entry], "num_epochs": 1, "bf16": False}
    (home / "finetune.yml").write_text(yaml.safe_dump(tuning))
    old = {"model": str(model_folder(home / "old")), "adapter": None}
    with contextlib.chdir(home):  # which `erase` reads whole
        outputs = {"output_dir": places["output_dir"]}
        folder = finished_request(home / "requests", "r1", old, outputs=outputs)
    shutil.copytree(home / "model", folder / "model", dirs_exist_ok=True)
    shutil.copytree(home / "data", folder / "eval-data")
    write_json(folder / "eval" / "results.json", {"settings": {"max_gen_toks": 4}})
    write(folder)
    assert Request.load(folder).id == "r1"
    return home


ATTACK = "{model} --data {data} --out {attacks} --device cpu"
FEW = ATTACK + " --limit 2 --max-new-tokens 4"
#: Command -> its arguments and a key of the answer. Some read what those before them wrote.
CASES = {
    "attack inside": (ATTACK, "tests"),
    "attack membership": (ATTACK + " --attacks loss", "tests"),
    "attack prompt": (FEW + " --variants prefix", "rows"),
    "attack quantise": (FEW + " --schemes int8", "rows"),
    "attack relearn": (FEW + " --source retain --steps 1 --rows 2 --lr 0.001", "rows"),
    "audit": (
        "{data}/member.jsonl --model {model} --out {audit} --device cpu --max-new-tokens 4",
        "documents",
    ),
    "augment": ("idk {forget_yml} --out {idk}", "rows"),
    "canaries": ("{data}/forget.jsonl --out {canaries}", "train"),
    "check": ("{forget_yml} --full", "steps"),
    "eval": (
        "{model} {other} --data {data} --out {eval} --limit 4 --max-gen-toks 4 --min-members 0 "
        "--device cpu --quiet",
        "verdicts",
    ),
    "examples": ("{examples}", "files"),
    "init": (
        "--base-model m --forget {data}/forget.jsonl --retain {data}/retain.jsonl --out {new_yml}",
        "config",
    ),
    "methods": ("npo", "objectives"),
    "report": ("{eval}", "verdicts"),
    "request audit": ("{model} {requests} --device cpu --quiet", "lines"),
    "request derived": ("{requests}/r1 {other}", "withdraw"),
    "request erase": ("{requests}/r1", "items"),
    "request export": ("{requests}/r1 --out {archive}", "due"),
    "request list": ("{requests}", "requests"),
    "request new": ("{finetune_yml} --where id=p3 --out {requests}/r2", "counts"),
    "request plan": ("{requests}/r2", "heldout_needed"),
    "request sign": ("{requests}/r1 --key {forget_yml}", "error"),
    "request suppress": ("{requests}", "digests"),
    "request told": ("{requests}/r1 --recipient Cloud", "day"),
    "request verify": ("{requests}/r1", "signature"),
    "tasks run": (
        "--model hf-unlearn --model_args pretrained={model},dtype=float32 --device cpu --limit 2 "
        "--tasks unlearn_likelihood --metadata {{'data_dir':'{data}'}} --batch_size 4",
        "results",
    ),
    "teacher": ("{finetune_yml} --forget {nothing}", "error"),
}


class Places(dict):
    def __missing__(self, name: str) -> Path:
        return self["home"] / name.replace("_", ".")


def words(home: Path, name: str) -> list[str]:
    text = CASES[name][0].format_map(Places(home=home))
    return [*name.split(), *(w.replace("'", '"') for w in text.split()), "--json"]


@pytest.mark.parametrize("name", CASES)
def test_one_object_and_nothing_else(home, monkeypatch, name):
    monkeypatch.chdir(home)
    no_caches(monkeypatch, home)
    done = CliRunner().invoke(unlearn, words(home, name))
    said = json.loads(done.stdout)
    key = CASES[name][1]
    assert said["exit"] == done.exit_code, done.output
    assert key in said and ("error" in said) == (key == "error"), done.output
    if key != "error" and name not in ("request audit", "request verify"):  # it is not signed
        assert done.exit_code == 0, done.output


def test_every_model_that_was_attacked_is_in_the_answer(home):
    """The last one alone was."""
    given = words(home, "attack membership")
    done = CliRunner().invoke(unlearn, [*given[:3], f"other={given[2]}", *given[3:]])
    names = [one["model"] for one in json.loads(done.stdout)["results"]]
    assert names == ["model", "other"], done.output


def test_the_list_of_attacks_is_in_the_answer():
    """It was printed for readers alone."""
    done = CliRunner().invoke(unlearn, ["attack", "membership", "--list", "--json"])
    assert any(one.startswith("loss") for one in json.loads(done.stdout)["attacks"]), done.output


def leaves(group: click.Group, before: str = "") -> set[str]:
    found = set()
    for name in group.list_commands(None):
        one = group.get_command(None, name)
        if isinstance(one, click.Group):
            found |= leaves(one, f"{before}{name} ")
        elif not one.hidden:
            found.add(before + name)
    return found


def test_every_command_is_tried():
    assert leaves(unlearn) == {*CASES, *ELSEWHERE}


@pytest.mark.parametrize("words", [["methods", "npo"], ["request", "new"], ["check", "no.yml"]])
def test_a_program_reads_it(words):
    """Of a process of its own, where libraries and programs that it starts print too; of wrong
    options as well."""
    command = [sys.executable, "-m", "axolotl_unlearn.cli", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["exit"] == done.returncode, done.stderr
