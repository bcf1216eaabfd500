"""Exact ways of a request: the weights are those of a plain run without the rows, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from test_requests_new import ADA_ROWS, TRAIN, config, people, preferences, write
from test_requests_run import home, kill_when, start  # noqa: F401

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Request, weights
from axolotl_unlearn.requests.steps import ENVIRONMENT, executable
from axolotl_unlearn.requests.verdict import exact
from axolotl_unlearn.requests.verify import verify
from axolotl_unlearn.requests.ways import retrain, way_of
from axolotl_unlearn.requests.ways.plan import choose, plan

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
        way_of(way).make(made, run, repeat=False)
    return weights(made.path("work", "model"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full with a split", "preferences"])
def test_retrained_is_plain_training_without_the_rows(home, tmp_path, forks, kind):  # noqa: F811
    """Copies of a row go with it; rows that were held out stay so."""
    rows = [*TRAIN[:18], TRAIN[1]]
    left = [row for row in rows if row["id"] != "ada-quill"]
    settings = config(home, sample_packing=False, **FEW)
    settings["datasets"][0]["path"] = str(write(tmp_path / "rows.jsonl", rows))
    settings["dataset_prepared_path"] = str(tmp_path / "prepared")
    wanted, held = ADA_ROWS, None
    if kind == "lora":
        settings |= LORA | {"output_dir": str(home / "base"), "save_strategy": "epoch"}
    elif kind == "preferences":
        settings = config(home, **{"sample_packing": False, **preferences(tmp_path), **FEW})
        wanted = Wanted(contains=["Bo1 Berg1 keeps"])
        lines = Path(settings["datasets"][0]["path"]).read_text().splitlines()
        left = [json.loads(line) for line in lines if "Bo1 Berg1 keeps" not in line]
        assert len(left) == len(lines) - 1
    else:
        del settings["test_datasets"]
        settings["val_set_size"] = 4
        held = 4
    path = tmp_path / "finetune.yml"
    path.write_text(yaml.safe_dump(settings))
    options = Options(model=home / "tuned")
    if held:
        options = Options(
            model=home / "tuned", heldout=write(tmp_path / "h.jsonl", people(200, 40))
        )
    made = new_request(path, tmp_path / "requests" / "r", wanted, options).request
    found = carried_out(made, *RETRAIN) if kind == "lora" else train(made, "retrain")
    shown = json.loads(made.path("exact.json").read_text())
    assert shown["weights"] == found
    assert shown["compared"] is (kind == "lora")
    assert made.way["base"] == (str(home / "base") if kind == "lora" else None)
    if held:
        from axolotl_unlearn.data.typed import row_id
        from axolotl_unlearn.requests.rows import trained_rows

        learned = {one.id for one in trained_rows(path).rows}
        split = [row for row in left if row_id(row) not in learned]
        left = [row for row in left if row_id(row) in learned]
        assert made.way["rows"]["trained"] == len(left)
        test = write(tmp_path / "split.jsonl", split)
        entry = settings["datasets"][0] | {"path": str(test), "split": "train"}
        settings["test_datasets"] = [entry]
        del settings["val_set_size"]
    settings["datasets"][0]["path"] = str(write(tmp_path / "without.jsonl", left))
    settings |= {
        "output_dir": str(tmp_path / "plain"),
        "dataset_prepared_path": str(tmp_path / "p"),
    }
    assert plain(tmp_path / "plain.yml", settings) == found


RETRAIN = (
    ("--way", "retrain", "--repeat"),
    ("train without the rows", "train without the rows, once more", "evaluate before"),
)


def carried_out(made: Request, words: Sequence[str], titles: Sequence[str]) -> dict[str, str]:
    """All of a request, killed in every stage; the weights that were handed over."""
    for number, title in enumerate(titles):
        seen = kill_when(start(made.folder, *words), title)
        assert title in seen[-1], "".join(seen)
        assert sum("kept from an earlier run" in line for line in seen) >= number - 1
        assert not made.path("model").exists() and not made.path("record.json").exists()
    process = start(made.folder, *words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "Verdict: exact" in said and "second run" not in said
    verify(made.folder).require()
    record = read(made.folder)["predicate"]
    assert record["way"]["compared"] == ("--repeat" in words)
    assert record["verdict"]["outcome"] == "shown"
    (one,) = record["tries"]
    assert (one["outcome"], one["way"], one["seed"]) == ("shown", "retrain", 42)
    assert str(made.folder.parents[1]) not in json.dumps(record)
    assert "tep of the training" in record["way"]["because"]
    assert "tep of the training" in made.path("REPORT.html").read_text()
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
    for content, found, outcome in (
        (texts, {"back": 0}, "not shown"),
        (whole[0], {"back": 1}, "refused"),
        (whole[0], {"back": 0, "unreadable": {"2025-001": "gone"}}, "not shown"),
        (whole[0], {"back": 0}, "shown"),
    ):
        audited.write_text(content, "utf-8")
        earlier.write_text(json.dumps(found), "utf-8")
        assert exact(made)["outcome"] == outcome, (content == texts, found)
    audited.write_text(whole[0], "utf-8")
    earlier.write_text(whole[1], "utf-8")


#: Axolotl asks a torch that is built for CUDA about peers, and places the model of a process on
#: the device of its number, which a CPU has not: in the processes that torchrun starts.
ON_CPU = """
import os

if "LOCAL_RANK" in os.environ:
    import torch

    torch.cuda.can_device_access_peer = lambda *_: False
    from axolotl.loaders.model import ModelLoader

    theirs = ModelLoader._set_device_map_config

    def placed(self):
        theirs(self)
        self.model_kwargs["device_map"] = {"": "cpu"}

    ModelLoader._set_device_map_config = placed
"""


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights(home, tmp_path, monkeypatch):  # noqa: F811
    """gloo: as `axolotl train --launcher torchrun` by hand."""
    (tmp_path / "sitecustomize.py").write_text(ON_CPU)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    left = [row for row in TRAIN[:18] if row["id"] != "ada-quill"]
    settings = config(home, sample_packing=False, **FEW)
    path = tmp_path / "finetune.yml"
    path.write_text(yaml.safe_dump(settings))
    made = new_request(path, tmp_path / "requests" / "r", ADA_ROWS).request
    with running.running(made, threads=1, processes=2) as run:
        running.take(made, "retrain")
        retrain.make(made, run, repeat=False)
    proof = json.loads(made.path("exact.json").read_text())
    assert proof["processes"] == 2
    settings["datasets"][0]["path"] = str(write(tmp_path / "without.jsonl", left))
    settings |= {
        "output_dir": str(tmp_path / "plain"),
        "dataset_prepared_path": str(tmp_path / "p"),
    }
    words = ["torchrun", "--", "--standalone", "--nproc_per_node=2"]
    assert plain(tmp_path / "plain.yml", settings, *words) == proof["weights"]


# -- what a way costs -----------------------------------------------------------------------------


def test_a_plan_without_figures(home, tmp_path):  # noqa: F811
    settings = config(home, sample_packing=False, **FEW)
    settings["datasets"][0]["path"] = str(write(tmp_path / "all.jsonl", TRAIN[:18]))
    path = tmp_path / "all.yml"
    path.write_text(yaml.safe_dump(settings))
    made = new_request(path, tmp_path / "requests" / "r", ADA_ROWS).request
    before = sorted(made.folder.rglob("*"))
    result = CliRunner().invoke(unlearn, ["request", "plan", str(made.folder), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    costs = {one["way"]: one for one in found["ways"]}
    assert found["auto"] == "retrain"
    assert costs["retrain"]["by"] == "estimated" and costs["match"]["reads"] > 30
    assert sorted(made.folder.rglob("*")) == before
    log = home / "tuned" / "debug.log"  # as Axolotl leaves it beside the model
    log.write_text("{'train_runtime': '20.5', 'epoch': '2'}")
    again = next(cost for cost in plan(made) if cost.way == "retrain")
    assert again.by == "1 earlier training" and 20 < again.seconds < 35.5
    log.unlink()
    before_log = plan(made)
    with pytest.raises(UnlearnError, match="use retrain, match or auto"):
        running.take(made, "magic")
    (tmp_path / "all.jsonl").write_text("{}\n")
    said = CliRunner().invoke(unlearn, ["request", "plan", str(made.folder)]).output
    assert "retrain   not open" in said and "auto      match" in said
    assert "memory" in said and "memory 0" not in said
    assert choose(before_log, limit=1e-9) == "match"
