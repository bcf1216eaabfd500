"""Exact ways of a request: the weights are those of a plain run without the rows, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from rich.console import Console
from test_requests_new import ADA, ADA_ROWS, MENTION, TRAIN, config, people, preferences, write
from test_requests_run import home, kill_when, start  # noqa: F401

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.recipe import Recipe
from axolotl_unlearn.requests import erase, removal
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.record import read, verify
from axolotl_unlearn.requests.request import Request, weights
from axolotl_unlearn.requests.search import Texts
from axolotl_unlearn.requests.steps import ENVIRONMENT, executable
from axolotl_unlearn.requests.ways import shards
from axolotl_unlearn.requests.ways.plan import Line, choose, plan
from axolotl_unlearn.requests.ways.shards import Sharding, place, train_shards, unit

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


def train(made: Request, way: str, **more) -> dict[str, str]:
    """The trainings of a way, without what is measured afterwards."""
    with running.running(made, threads=1) as run:
        running.take(made, way)
        running.train(made, run, **more)
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
    verify(made.folder)
    record = read(made.folder)["predicate"]
    assert record["way"]["compared"] == ("--repeat" in words)
    assert record["verdict"]["outcome"] == "shown"
    assert str(made.folder.parents[1]) not in json.dumps(record)
    assert "tep of the training" in record["way"]["because"]
    assert "tep of the training" in made.path("REPORT.html").read_text()
    assert not list(made.path("model").glob("checkpoint-*"))
    return weights(made.path("model"))


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
        running.train(made, run)
    proof = json.loads(made.path("exact.json").read_text())
    assert proof["processes"] == 2
    settings["datasets"][0]["path"] = str(write(tmp_path / "without.jsonl", left))
    settings |= {
        "output_dir": str(tmp_path / "plain"),
        "dataset_prepared_path": str(tmp_path / "p"),
    }
    words = ["torchrun", "--", "--standalone", "--nproc_per_node=2"]
    assert plain(tmp_path / "plain.yml", settings, *words) == proof["weights"]


# -- shards ---------------------------------------------------------------------------------------

KEYED = b"k" * 32


def sharded(home: Path, folder: Path, rows: list[dict], name: str, **more) -> tuple[Path, Path]:  # noqa: F811
    """A config on these rows, and shards of it."""
    settings = config(home, sample_packing=False, **FEW, **more)
    settings["datasets"][0]["path"] = str(write(folder / f"{name}.jsonl", rows))
    path = folder / f"{name}.yml"
    path.write_text(yaml.safe_dump(settings))
    return path, folder / f"shards-{name}"


def cut_and_trained(path: Path, out: Path, sharding: Sharding) -> dict:
    return train_shards(path, out, sharding, key=KEYED, console=Console(quiet=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(3, 2, "id"),
        Sharding(3, 2, "id", Recipe(method="dare_ties", density=0.5, scale="sum", seed=3)),
        Sharding(1, 3, "id"),
    ],
    ids=["full, mean", "lora, dare", "one shard"],
)
def test_a_sharded_request_is_the_run_without_the_rows(home, tmp_path, forks, sharding):  # noqa: F811
    """Killed in every stage; then a second request. One shard is a
    chain of slices, of which the request repeats the end."""
    rows = [*TRAIN[:18], TRAIN[1]]
    more = LORA if sharding.recipe.random else {}
    short = sharding.recipe.random or sharding.count == 1
    path, out = sharded(home, tmp_path, rows, "all", **more)
    facts = cut_and_trained(path, out, sharding)
    assert sum(facts["rows"].values()) == 19
    ada = place(KEYED, "ada-quill", sharding.count, sharding.slices)
    assert facts["rows"][f"{ada[0]}-{ada[1]}"] >= 4
    options = Options(model=out / "model")
    requests = tmp_path / "requests"
    made = new_request(path, requests / "r1", ADA_ROWS, options).request
    left = [row for row in rows if row["id"] != "ada-quill"]
    if short:
        found = train(made, "shards")
    else:
        steps = [f"shard {ada[0]}, slices 1 to {k}" for k in range(ada[1], sharding.slices + 1)]
        found = carried_out(made, ("--way", "shards"), [*steps, "merge the shards", "evaluate"])
    assert made.way["again"] == [f"{ada[0]}-{k}" for k in range(ada[1], sharding.slices + 1)]
    without = sharded(home, tmp_path, left, "left", **more)
    again = cut_and_trained(*without, sharding)
    assert again["model"] == found != facts["model"]
    if short:
        return
    now = json.loads((out / "shards.json").read_text())
    assert now["steps"] == again["steps"] and now["model"] == again["model"]
    assert now["rows"] == again["rows"]
    assert not Texts.of([ADA[0][1]]).among("".join(x.read_text() for x in out.rglob("*.jsonl")))
    listed = erase.plan(made.folder, places=[out])
    removed = {item.path for item in listed.removable}
    assert set((out / "model").glob("*.safetensors")) <= removed
    assert not any(removal.within(item, out / "steps") for item in removed)
    second = Wanted(where=[("id", "p3")])
    made = new_request(path, requests / "r2", second).request
    assert made.before == str(requests / "r1" / "model")
    planned(made)
    found = train(made, "shards")
    left = [row for row in left if row["id"] != "p3"]
    third = cut_and_trained(*sharded(home, tmp_path, left, "both"), sharding)
    assert third["model"] == found


def test_adapters_of_an_architecture_that_mergekit_does_not_know(tmp_path):
    """OLMo: the merge is the base and the mean of what the adapters add, b a by hand."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, OlmoConfig, OlmoForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    OlmoForCausalLM(
        OlmoConfig(vocab_size=16, num_attention_heads=1, num_key_value_heads=1, **sizes)
    ).save_pretrained(tmp_path / "base")
    added = 0
    for part in ("1-1", "2-1"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=False)
        )
        model.save_pretrained(tmp_path / "steps" / part)
        a, b = (p for name, p in sorted(model.named_parameters()) if "lora_" in name)
        added = added + (b @ a).detach() / 2
    facts = {"count": 2, "slices": 1, "rows": {"1-1": 1, "2-1": 1}, "threads": 1, "processes": 1}
    facts["recipe"] = Sharding().recipe.to_dict()
    chain = shards.Chain(tmp_path, {"base_model": str(tmp_path / "base"), "adapter": "lora"}, facts)
    chain.merge()
    name = "model.layers.0.self_attn.q_proj.weight"
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("base", "model"))
    assert torch.allclose(after[name], before[name] + added, atol=1e-6) and added.abs().max() > 0.1
    assert all(torch.equal(after[other], before[other]) for other in before if other != name)


def test_a_place_depends_on_no_other_row():
    places = [place(KEYED, f"p{n}", 8, 4) for n in range(4000)]
    assert places == [place(KEYED, f"p{n}", 8, 4) for n in range(4000)]
    assert {s for s, _ in places} == set(range(1, 9)) and {k for _, k in places} == {1, 2, 3, 4}
    counts = [places.count(one) for one in set(places)]
    assert len(counts) == 32 and min(counts) > 80 and max(counts) < 180
    assert place(b"x" * 32, "p0", 8, 4) != places[0] or place(b"x" * 32, "p1", 8, 4) != places[1]


@pytest.mark.parametrize(
    ("row", "by", "whose"),
    [
        ({"id": "a", "document": "d"}, None, "d"),
        ({"id": 7}, None, "7"),
        ({"meta": {"person": "ada"}}, "meta.person", "ada"),
        ({"people": ["ada", "bo"]}, "people", "ada"),
        ({"text": "x"}, None, None),
        ({"meta": "x"}, "meta.person", None),
    ],
)
def test_to_whom_a_row_belongs(row, by, whose):
    assert unit(row, by) == whose


@pytest.mark.parametrize(
    ("changes", "sharding", "says"),
    [
        ({"max_steps": 5}, Sharding(), "`max_steps` does not go with shards; write `num_epochs`"),
        ({"val_set_size": 0.1}, Sharding(), "`val_set_size` does not go with shards"),
        ({"peft_use_dora": True}, Sharding(), "`peft_use_dora` does not go with shards"),
        ({"peft_init_lora_weights": "pissa"}, Sharding(), "changes the base; leave it out"),
        ({"base_model": "."}, Sharding(), "holds no config.json: the base must be a full model"),
        ({}, Sharding(1, 1), "--count 2 or more"),
        ({}, Sharding(by="nobody"), "--by nobody: no row .* has this field"),
    ],
)
def test_what_cannot_be_sharded(home, tmp_path, changes, sharding, says):  # noqa: F811
    path, out = sharded(home, tmp_path, TRAIN[:18], "all", **changes)
    with pytest.raises(UnlearnError, match=says):
        train_shards(path, out, sharding)


def test_a_person_in_rows_of_others_is_said(home, tmp_path, monkeypatch):  # noqa: F811
    """Where those rows are in another shard; nothing is trained."""
    monkeypatch.setattr(shards.Chain, "make", lambda *_: None)
    path, out = sharded(home, tmp_path, [*TRAIN[:18], MENTION], "all")
    words = ["shards", "train", str(path), "--by", "id", "--out", str(out)]
    apart = place(KEYED, "ada-quill", 4, 2)[0] != place(KEYED, "p900", 4, 2)[0]
    monkeypatch.setattr(shards.secrets, "token_bytes", lambda _: KEYED)
    result = CliRunner().invoke(unlearn, words)
    assert result.exit_code == 0, result.output
    assert apart and "1 people or documents are named in rows of others" in result.output
    assert "Quill" not in result.output and "ada" not in (out / "shards.json").read_text()


def test_a_model_that_was_not_merged_of_shards(home, tmp_path):  # noqa: F811
    path, _ = sharded(home, tmp_path, TRAIN[:18], "all")
    made = new_request(path, tmp_path / "requests" / "r", ADA_ROWS).request
    with pytest.raises(UnlearnError, match="is not the merge of any shards"):
        running.take(made, "shards")
    with pytest.raises(UnlearnError, match="use retrain, shards, match"):
        running.take(made, "magic")
    (tmp_path / "all.jsonl").write_text("{}\n")
    with pytest.raises(UnlearnError, match="was changed or removed since `request new`"):
        running.take(made, "retrain")


def planned(made: Request) -> None:
    """After a sharded request: measured by the steps of the shards."""
    costs = {cost.way: cost for cost in plan(made)}
    one = costs["shards"]
    assert not costs["retrain"].closed and costs["retrain"].reads == 17 * 2
    assert one.by.endswith("earlier trainings") and one.measuring > 0 and one.bytes > 0
    assert choose(costs.values()) in ("shards", "retrain")
    assert choose(costs.values(), limit=1e-9) == "match"


def test_a_plan_without_figures(home, tmp_path):  # noqa: F811
    path, _ = sharded(home, tmp_path, TRAIN[:18], "all")
    made = new_request(path, tmp_path / "requests" / "r", ADA_ROWS).request
    before = sorted(made.folder.rglob("*"))
    result = CliRunner().invoke(unlearn, ["request", "plan", str(made.folder), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    costs = {one["way"]: one for one in found["ways"]}
    assert found["auto"] == "retrain" and "not the merge of any shards" in costs["shards"]["closed"]
    assert costs["retrain"]["by"] == "estimated" and costs["match"]["reads"] > 30
    assert sorted(made.folder.rglob("*")) == before
    log = home / "tuned" / "debug.log"  # as Axolotl leaves it beside the model
    log.write_text("{'train_runtime': '20.5', 'epoch': '2'}")
    again = next(cost for cost in plan(made) if cost.way == "retrain")
    assert again.by == "1 earlier training" and 20 < again.seconds < 35.5
    log.unlink()
    (tmp_path / "all.jsonl").write_text("{}\n")
    said = CliRunner().invoke(unlearn, ["request", "plan", str(made.folder)]).output
    assert "retrain   not open" in said and "auto      match" in said
    assert "memory" in said and "memory 0" not in said
    # Retraining that reads so many rows would take as long as the teacher and the run together.
    assert "less than retraining from" in said
    assert costs["match"]["pays_from"] > costs["match"]["reads"]  # a second start, too


def test_the_line_through_measured_trainings():
    """Two points lie on it; a falling line or one of one point goes through the origin."""
    line = Line.through([(10, 7), (30, 11), (20, 9)], None)
    assert (line.start, line.each) == (pytest.approx(5), pytest.approx(0.2))
    assert line.seconds([100, 10]) == pytest.approx(25 + 7)
    for points in ([(10, 5)], [(10, 7), (20, 3)]):
        line = Line.through(points, None)
        each = sum(s for _, s in points) / sum(r for r, _ in points)
        assert (line.start, line.each) == (0, pytest.approx(each))
