"""`make leaderboard`: the same budget for all, the choice, the arithmetic of a line, a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import OBJECTIVES
from research.__main__ import research
from research.analysis.leaderboard import (
    line,
    page,
    smallest_difference,
    strongest_attack,
    tables,
)
from research.harness.stages import Plan
from research.studies.leaderboard import TRIALS, World, best, leaderboard, table
from research.studies.methods import METHODS, chosen_methods, slug
from research.worlds.generate import Sizes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_method_has_the_same_chance():
    """All objectives that forget; as many strengths each."""
    assert {len(set(method.values)) for method in METHODS.values()} == {TRIALS}
    assert all(list(m.values) == sorted(m.values) for m in METHODS.values())
    forgets = {name for name, one in OBJECTIVES.items() if one.side == "forget"}
    # These compare with held-out rows, which no other method is given.
    forgets -= {name for name, one in OBJECTIVES.items() if one.against_heldout}
    assert {e["objective"] for m in METHODS.values() for e in (m.forget, *m.beside)} == forgets
    assert len({slug(name) for name in METHODS}) == len(METHODS)
    npo = METHODS["NPO"]
    assert npo.tried(TRIALS) == npo.values and npo.tried(2) == npo.values[2:4]
    assert npo.tried(1) == npo.values[2:3]


def test_stages_differ_in_the_method_alone(tmp_path):
    world = World()
    methods = chosen_methods("npo + gu,idkdpo,rmu")
    assert list(methods) == ["NPO + GU", "IdkDPO", "RMU"]
    plan = Plan("test", tmp_path, table(tmp_path, 3, methods, world), seed=3)
    names = [stage.name for stage in plan.job.stages]
    assert len(names) == 3 + 1 + 3 * (TRIALS + 1) + 1 + 3 * 2
    configs = {p.stem: yaml.safe_load(p.read_text()) for p in (tmp_path / "configs").glob("*.yml")}
    for name, method in methods.items():
        for number, value in enumerate(method.values):
            config = configs[f"{slug(name)}-{number}"]
            args = parse_unlearn(config["unlearn"])
            assert args.forget[0].model_dump()[method.knob] == value
            roles = {entry["type"].rpartition(".")[2] for entry in config["datasets"]}
            assert roles == args.roles()
            same = configs["rmu-0"]
            for key in set(config) - {"unlearn", "datasets", "output_dir"}:
                assert config[key] == same[key], key
    command = next(s for s in plan.job.stages if s.name == "alternative").command()
    assert command[command.index("idk") + 1].endswith("configs/idkdpo-0.yml")
    at = chosen_methods("rmu")["RMU"].placed(layer=7)
    assert at.forget["layer"] == at.retain[0]["layer"] == 7


def test_a_method_with_a_teacher_gets_one(tmp_path):
    """A model that read other biographies, after a pass over the retain rows; of the user's own
    model it is the user's."""
    from axolotl_unlearn.checks.report import check

    sizes = Sizes(
        stories=2, pii=2, facts_forget=8, facts_retain=4, nonmembers=8, general=4, background=8,
        passes=1, background_per_pass=8,
    )  # fmt: skip
    world = World(sizes=sizes)
    chosen = chosen_methods("match,match + nckd,npo")
    plan = Plan("test", tmp_path, table(tmp_path, 3, world.placed(chosen, tmp_path), world), seed=3)
    stages = {stage.name: stage for stage in plan.job.stages}
    stages["data"].action()
    assert stages["teacher"].needs == ["data", "before"]
    for name in ("before", "teacher", "match-0", f"{slug('Match + NCKD')}-0"):
        config = yaml.safe_load((tmp_path / "configs" / f"{name}.yml").read_text())
        faults, *_ = check(tmp_path / "configs" / f"{name}.yml")
        unmade = ("base_model", "teacher")  # what earlier stages make
        assert all(any(word in fault for word in unmade) for fault in faults), (name, faults)
        if name == "teacher":
            assert config["base_model"] == str(tmp_path / "before")
            assert "reinit_weights" not in config
            assert Path(config["datasets"][0]["path"]).name == "retain.jsonl"
        elif "match" in name:
            forget = parse_unlearn(config["unlearn"]).forget
            assert {e.reference.model for e in forget} == {str(tmp_path / "teacher")}
            assert "teacher" in stages[name].needs and len(forget) == 1 + ("nckd" in name)
    assert "teacher" not in stages["npo-0"].needs
    own = World(model=tmp_path, retrained=tmp_path, data=tmp_path)
    assert list(own.placed(chosen, tmp_path)) == ["NPO"]
    with pytest.raises(UnlearnError, match="Match compares with a teacher.*--teacher"):
        leaderboard(tmp_path, [0], "match", world=own)


def test_methods_that_are_no_training_are_commands_on_the_original(tmp_path):
    """And what their hooks do is loaded where models are scored and attacked."""
    own = World(model=tmp_path / "m", retrained=tmp_path / "r", data=tmp_path / "d")
    chosen = own.placed(chosen_methods("npo,bs-s,mrp,guard-it,skillpack of npo"), tmp_path)
    plan = Plan("test", tmp_path, table(tmp_path, 0, chosen, own, 2), seed=0, data=tmp_path / "d")
    stages = {stage.name: stage for stage in plan.job.stages}
    words = stages["mrp-1"].command()
    assert words[1:4] == ["-m", "research", "mrp"] and words[4] == str(tmp_path / "m")
    assert words[words.index("--directions") + 1] == "32" and "--merge" in words
    assert "npo-validation" in stages["skillpack-of-npo-0"].needs
    assert stages["guard-it-validation"].command()[1:4] == ["-m", "research", "trusted"]
    assert "trusted" not in stages["mrp-validation"].command()
    config = yaml.safe_load((tmp_path / "configs" / "bs-s-0.yml").read_text())
    added = config["datasets"][2]
    assert added["path"].endswith("self.jsonl") and added["type"].endswith(".forget")
    assert "self" in stages["bs-s-0"].needs
    assert stages["self"].command()[2:4] == ["augment", "self"]


def test_unknown_methods_and_budgets_are_refused(tmp_path):
    with pytest.raises(UnlearnError, match="no method 'nppo'; there are graddiff, npo"):
        chosen_methods("nppo")
    with pytest.raises(UnlearnError, match="give 1 to 6"):
        leaderboard(tmp_path, [0], "npo", trials=9)
    done = CliRunner().invoke(research, ["leaderboard", "--model", str(tmp_path)])
    assert done.exit_code == 2 and "together, or none" in done.output


def model(name: str, aggregate: float, *, collapsed=False, below=False) -> dict:
    return {
        "name": name,
        "role": "candidate",
        "aggregate": aggregate,
        "task_aggregate": aggregate,
        "utility": 0.5,
        "collapse": {"collapsed": collapsed, "broken": 0.25},
        "gate": {"below_gate": below},
        "distance": {"a": {"value": -0.2}, "b": {"value": 0.4}, "aggregate": {"value": 9.0}},
        # a member with less loss than each of two others: .5, but Min-K% sees it above both
        "likelihood": {
            "member_loss": [1.0, 3.0],
            "nonmember_loss": [2.0, 2.5],
            "attacks": {"min_k": {"member": [9.0, 9.5], "nonmember": [1.0, 9.2]}},
        },
    }


def test_the_choice_is_the_best_that_works(tmp_path):
    def choice(*models):
        folder = tmp_path / "npo-validation"
        folder.mkdir(exist_ok=True)
        original = model("original", 2.0) | {"role": "original"}
        (folder / "results.json").write_text(json.dumps({"models": [original, *models]}))
        return best(tmp_path, "NPO")["name"]

    assert choice(model("npo-0", 0.5), model("npo-1", 0.7)) == "npo-1"
    lost = [model("npo-1", 0.9, collapsed=True), model("npo-2", 0.8, below=True)]
    assert choice(model("npo-0", 0.5), *lost) == "npo-0"
    assert choice(*lost) == "npo-1"


def test_a_line_by_hand():
    """Loss: pairs (1<2, 1<2.5, 3>2, 3>2.5): AUC 1/2. Min-K%: 9 and 9.5 against 1 and 9.2: only
    9 < 9.2, so 1/4: farther from chance. Distance (.2 + .4) / 2."""
    one = model("npo", 0.6)
    assert strongest_attack(one) == ("min_k", pytest.approx(0.25))
    found = line(one)
    assert found["distance"] == pytest.approx(0.3) and found["broken"] == 0.25
    assert not found["collapsed"] and line(model("x", 1.0, below=True))["collapsed"]


def test_tables_put_what_collapsed_last():
    def lines(**aggregates):
        tried = {"knob": "beta", "value": 0.1, "at_end": True, "seconds": 1.0, "mib": 700}
        found = {n: line(model(n, a)) | tried for n, a in aggregates.items()}
        found["GA"] |= {"collapsed": True}
        return {"retrained": line(model("retrained", 0.9)), **found}

    seeds = {"0": lines(NPO=0.6, GA=0.95, WGA=0.7), "1": lines(NPO=0.8, GA=0.5, WGA=0.6)}
    content = {"seeds": seeds}
    made = tables(content)["methods"]
    assert [row[0] for row in made["rows"]] == [
        "retrained", "NPO", "WGA", "GA (collapsed in 2 of 2)",
    ]  # fmt: skip
    npo = dict(zip(made["columns"], made["rows"][1], strict=True))
    assert npo["Aggregate"] == "0.700" and npo["MiB"] == "700" and npo["relearnt"] == ""
    assert npo["strongest attack"] == "0.75"  # .25: as far from chance
    assert "| NPO | beta | 0.1*, 0.1* | min_k |" in page(content)


def test_the_smallest_difference_by_hand():
    """Two seeds, variances of .6/.8, .95/.5 and .7/.6: .02, .10125 and .005, mean .0420833; t with
    3 degrees of freedom is 3.18245, so 3.18245 * sqrt(2 * .0420833 / 2)."""
    tried = {"knob": "beta", "value": 0.1, "at_end": False, "seconds": 1.0, "mib": 700}
    seeds = {
        str(seed): {n: line(model(n, a)) | tried for n, a in zip("abc", scores, strict=True)}
        for seed, scores in enumerate(((0.6, 0.95, 0.7), (0.8, 0.5, 0.6)))
    }
    spread, least = smallest_difference({"seeds": seeds})
    assert spread == pytest.approx(0.0420833**0.5, rel=1e-5)
    assert least == pytest.approx(3.18245 * 0.0420833**0.5, rel=1e-5)
    assert f"nearer than {least:.3f} cannot" in page({"seeds": seeds})
    assert smallest_difference({"seeds": {"0": seeds["0"]}}) is None


@pytest.mark.slow
def test_a_model_of_the_users_own_from_end_to_end(tmp_path, forks):
    """Real commands on random weights: one method that needs alternatives, one trial; a second call
    does nothing again."""
    from rich.console import Console
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from research.worlds.generate import make_data

    sizes = Sizes(
        stories=2, pii=2, facts_forget=40, facts_retain=4, nonmembers=40, general=8, background=2,
        passes=1, background_per_pass=1,
    )  # fmt: skip
    make_data(tmp_path / "data", seed=0, sizes=sizes)
    for seed, name in enumerate(("mine", "without")):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(
            "examples/tiny-olmo", hidden_size=32, num_hidden_layers=2
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained("examples/tiny-olmo").save_pretrained(tmp_path / name)
    world = World("npo_over", 1, tmp_path / "mine", tmp_path / "without", tmp_path / "data")
    log = tmp_path / "log"
    for _ in range(2):
        with log.open("w") as file:
            console = Console(file=file)
            path = leaderboard(
                tmp_path / "out", [0], "idkdpo", world=world, trials=1, console=console
            )
    assert log.read_text().count("unchanged, kept") == 6 and ": started" not in log.read_text()
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    found = content["seeds"]["0"]["IdkDPO"]
    assert content["schema"] == "leaderboard" and set(found) >= {"relearn", "quantise", "mib"}
    assert 0 < found["seconds"] < 60 and found["value"] == METHODS["IdkDPO"].values[2]
    assert "relearn" in content["seeds"]["0"]["retrained"]
    assert "| IdkDPO" in path.read_text()
