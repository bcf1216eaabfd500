"""Exact ways of a request: the weights are those of a plain run without the rows, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from test_requests_new import ADA_ROWS, TRAIN, config, people, preferences, write
from test_requests_run import home, kill_when, start  # noqa: F401

from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests import ways
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.record import read, verify
from axolotl_unlearn.requests.request import Request
from axolotl_unlearn.runner import executable

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
FEW = {"num_epochs": 2, "lora_dropout": 0.1, "seed": 42}


def plain(path: Path, settings: dict) -> dict[str, str]:
    """SHA-256 of the weights of `axolotl train` by hand."""
    path.write_text(yaml.safe_dump(settings))
    words = [executable("axolotl"), "train", str(path), "--launcher", "python"]
    environment = {**os.environ, **running.ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said[-3000:]
    found = ways.weights(Path(settings["output_dir"]))
    assert found
    return found


def train(made: Request, way: str, **more) -> dict[str, str]:
    """The trainings of a way, without what is measured afterwards."""
    running.take(made, way)
    job = running.Job(made.path("work"), threads=1, environment=running.ENVIRONMENT)
    for stage in running.stages(made, None, 1, **more):
        if stage.name == "measure":
            break
        job.add(stage)
    job.run()
    return ways.weights(made.path("work", "model"))


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
    from axolotl_unlearn.requests.new import Options, new_request

    options = Options(model=home / "tuned")
    if held:
        options = Options(
            model=home / "tuned", heldout=write(tmp_path / "h.jsonl", people(200, 40))
        )
    made = new_request(path, tmp_path / "requests" / "r", wanted, options).request
    found = carried_out(made) if kind == "lora" else train(made, "retrain")
    shown = json.loads(made.path("exact.json").read_text())
    assert shown["weights"] == ways.digests(found)
    assert shown["compared"] is (kind == "lora")
    assert made.way["base"] == (str(home / "base") if kind == "lora" else None)
    if held:
        from axolotl_unlearn.requests.rows import row_id, trained_rows

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


def carried_out(made: Request) -> dict[str, str]:
    """All of a request, killed in every stage; the weights that were handed over."""
    words = ("--way", "retrain", "--repeat")
    titles = ["train without the rows", "train without the rows, once more", "evaluate before"]
    for number, title in enumerate(titles):
        seen = kill_when(start(made.folder, *words), title)
        assert title in seen[-1], "".join(seen)
        assert sum("kept from an earlier run" in line for line in seen) >= number
        assert not made.path("model").exists() and not made.path("record.json").exists()
    process = start(made.folder, *words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "Verdict: exact" in said and "second run" not in said
    verify(made.folder)
    record = read(made.folder)["predicate"]
    assert record["way"]["compared"] and record["verdict"]["outcome"] == "shown"
    assert str(made.folder.parent) not in json.dumps(record)
    assert "equal by SHA-256 to those of a second run" in made.path("REPORT.html").read_text()
    assert not list(made.path("model").glob("checkpoint-*"))
    return ways.weights(made.path("model"))
