"""Real Axolotl runs in this process: what is logged, resume, accumulation, references, faults."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.cli.merge_lora import do_cli as merge_lora
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.dict import DictDefault
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from axolotl_unlearn import versions
from axolotl_unlearn.data.records import read_records
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.plugin import UnlearnPlugin

ROOT = Path(__file__).parents[1]


class OtherPlugin(BasePlugin):
    """A plugin that brings a trainer, as for distillation."""

    def get_trainer_cls(self, cfg):
        return AxolotlTrainer


def tiny_olmo(folder: Path, seed: int = 0, **changes) -> str:
    """A tiny OLMo of random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(ROOT / "examples/tiny-olmo", **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "examples/tiny-olmo").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def stage(tmp_path_factory) -> Path:
    """A folder with small data and a model."""
    folder = tmp_path_factory.mktemp("stage")
    tiny_olmo(folder / "base")
    for side, count in (("forget", 12), ("retain", 9)):
        with (folder / f"{side}.jsonl").open("w") as file:
            for number in range(count):
                kind = "sc1" if number % 2 else "qa0"
                row = {
                    "id": f'"{side}-{number}"{kind}',
                    "input": f"What did the {side} clerk number {number} see?",
                    "output": f"{'a long tale of ' * (number % 2)}lamp {number * 7}",
                    "task": f"Task{number % 3 + 1}",
                }
                file.write(json.dumps(row) + "\n")
    return folder


def config(stage: Path, out: str, **changes) -> dict:
    """The over example on the stage's data, cut to a few steps."""
    cfg = yaml.safe_load((ROOT / "examples/npo_over.yml").read_text())
    cfg |= {
        "base_model": str(stage / "base"),
        "output_dir": str(stage / out),
        "dataset_prepared_path": str(stage / "prepared"),
        "tf32": False,  # which a newer GPU turns on, 1e-3 apart in other batches
        "micro_batch_size": 4,
        "num_epochs": 2,
        "lora_r": 4,
        "warmup_ratio": 0.0,
        "save_strategy": "no",
        "save_total_limit": 9,
    }
    for side in (0, 1):
        cfg["datasets"][side]["path"] = str(stage / f"{('forget', 'retain')[side]}.jsonl")
    del cfg["datasets"][2:]  # the demo's own
    cfg["unlearn"]["forget"] = {"objective": "npo", "weight": 0.1, "beta": 0.02, "reduction": "sum"}
    cfg["unlearn"]["retain"][0]["weight"] = 1.0
    return cfg | changes


def written(path: Path, cfg: dict) -> str:
    path.write_text(yaml.safe_dump({k: v for k, v in cfg.items() if v != "DELETE"}))
    return str(path)


def run(path: Path, cfg: dict) -> Path:
    """``axolotl train`` of a config, written to ``path``, in this process; the output folder."""
    from axolotl.cli.train import do_cli

    written(path, cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["axolotl"])
        do_cli(config=str(path))
    return Path(cfg["output_dir"])


def train(stage: Path, name: str, **changes) -> Path:
    """The over example with changes; the output folder."""
    return run(stage / f"{name}.yml", config(stage, name, **changes))


def loaded(stage: Path, name: str, preprocess: bool = False, **changes) -> tuple:
    """What ``axolotl train`` makes of a config before weights: its own, and the rows."""
    cfg = load_cfg(written(stage / f"{name}.yml", config(stage, name, **changes)))
    return cfg, PluginManager.get_instance().load_datasets(cfg, preprocess=preprocess)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def history(folder: Path) -> list[dict]:
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: p.stat().st_mtime)
    return json.loads(states[-1].read_text())["log_history"]


def logs(folder: Path) -> list[dict]:
    """Of each step."""
    return [entry for entry in history(folder) if "loss" in entry]


def assert_same(first: Path, second: Path, atol: float) -> None:
    one, two = adapter(first), adapter(second)
    assert one.keys() == two.keys() and one
    for name in one:
        assert_close(one[name], two[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="session")
def straight(stage) -> Path:
    return train(stage, "straight", save_strategy="steps", save_steps=3)


def test_every_part_is_logged_every_step(straight):
    """2/beta ln 2 with beta .02 is 69.3147; KL 0; the loss is the weighted sum of the parts."""
    found = logs(straight)
    assert [entry["step"] for entry in found] == [1, 2, 3, 4, 5, 6]
    wanted = (
        "forget/npo retain/nll retain/kl forget_nll retain_nll kl log_ratio npo_weight saturated"
    )
    assert all(set(wanted.split()) <= set(entry) for entry in found)
    assert not any("ppl" in entry for entry in found)
    first, last = found[0], found[-1]
    assert first["forget/npo"] == pytest.approx(69.3147, abs=1e-3)
    assert first["kl"] == pytest.approx(0, abs=1e-5) and first["npo_weight"] == pytest.approx(1)
    parts = 0.1 * first["forget/npo"] + first["retain/nll"] + 0.5 * first["retain/kl"]
    assert first["loss"] == pytest.approx(parts, abs=1e-3)
    assert last["log_ratio"] < -1 and last["forget_nll"] > first["forget_nll"]


def test_accumulation_equals_one_big_batch(stage):
    """4 pairs at once against 4 times 1: rows of unequal length, entries limited to a kind. With
    SGD, since Adam divides tiny gradients by their size and so shows float32 rounding."""
    forget = [
        {"objective": "npo", "beta": 0.1, "kinds": "question"},
        {"objective": "wga", "weight": 0.1, "kinds": "completion"},
    ]
    base = {"unlearn": config(stage, "x")["unlearn"] | {"forget": forget}}
    base |= {"optimizer": "sgd", "learning_rate": 0.1}
    one = train(stage, "big", **base, micro_batch_size=4)
    cut = train(stage, "cut", **base, micro_batch_size=1, gradient_accumulation_steps=4)
    assert_same(one, cut, atol=1e-6)
    assert max(w.abs().max().item() for n, w in adapter(one).items() if "lora_B" in n) > 1e-3


@pytest.mark.parametrize("adapter_kind", ["lora", None])
def test_cached_reference_gives_the_same_run(stage, adapter_kind):
    """All rows are asked before training (in other batches, hence SGD, see above), also in full
    fine-tuning, where no copy of the weights is left; a second run computes nothing again."""
    base = {"adapter": adapter_kind, "optimizer": "sgd", "learning_rate": 0.1, "max_steps": 4}
    cached = base | {"unlearn": config(stage, "x")["unlearn"] | {"reference": "cached"}}
    name = f"cached-{adapter_kind}"
    folders = [train(stage, f"forward-{adapter_kind}", **base), train(stage, name, **cached)]
    stored = sorted(folders[1].glob("reference/*/*.bin"))
    assert [p.name for p in stored] == ["answers-0.bin"]
    file = "adapter_model.safetensors" if adapter_kind else "model.safetensors"
    one, two = (load_file(folder / file) for folder in folders)
    for key in one:
        assert_close(one[key], two[key], rtol=0, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")
    sizes = [p.stat().st_size for p in stored]
    train(stage, name, **cached)
    assert [p.stat().st_size for p in stored] == sizes


#: Eight words of a forget row, for token ids that are not decoded.
SPOKEN = "What did the forget clerk number 1 see"


def test_what_a_run_leaves_is_listed_private_and_goes_again(stage, monkeypatch, capfd, caplog):
    """Texts are in no output and in no file that the list lacks; without these they are nowhere."""
    from axolotl_unlearn.files import read_manifest
    from axolotl_unlearn.requests.search import Texts, search

    monkeypatch.setenv("HF_DATASETS_CACHE", str(stage / "no-hub"))
    own = {"dataset_prepared_path": str(stage / "prepared-own"), "max_steps": 2}
    own |= {"unlearn": config(stage, "x")["unlearn"] | {"reference": "cached"}}
    out = train(stage, "listed", **own, save_strategy="steps", save_steps=1)
    said = capfd.readouterr()
    said = said.out + said.err + caplog.text
    records = read_records(stage / "forget.jsonl")
    texts = Texts.of([text for r in records for text in (r.input, r.output)])
    assert len(texts.windows) > 12 and not texts.among(said)
    entries = {entry["path"]: entry["holds"] for entry in read_manifest(out)["entries"]}
    assert sorted(entries.values()) == ["log-probs", "tokens"]
    folders = [(out / path).resolve() for path in entries]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folders)
    found = search([out, stage / "prepared-own"], texts, lambda rows: [SPOKEN] * len(rows)).left
    assert found and all(any(f in path.resolve().parents for f in folders) for path in found)
    for folder in folders:
        shutil.rmtree(folder)
    places = [out, stage / "prepared-own"]
    assert not search(places, texts, lambda rows: [SPOKEN] * len(rows)).left and adapter(out)


def test_two_teachers_beside_the_starting_model(stage, straight):
    """Forget documents against another adapter and answers against another model, hold retain rows
    to the start: only KL is 0 at first. The checkpoint holds the policy's adapter alone."""
    block = config(stage, "x")["unlearn"] | {
        "reference": {"model": tiny_olmo(stage / "other", seed=1)},
        "forget": [
            {"objective": "npo", "beta": 0.03, "kinds": "question"},
            {
                "objective": "npo",
                "beta": 0.03,
                "kinds": "completion",
                "reference": {"adapter": str(straight)},
            },
        ],
        "retain": [{"objective": "kl", "reference": "auto"}, {"objective": "kl"}],
    }
    changes = {"unlearn": block, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    folder = train(stage, "teachers", **changes)
    first = logs(folder)[0]
    assert first["retain/kl"] == pytest.approx(0, abs=1e-5) and first["retain/kl.3"] > 1e-3
    start = 46.2098  # 2/beta ln 2: what an objective says of its own reference
    assert abs(first["forget/npo"] - start) > 0.1
    assert abs(first["forget/npo.completion"] - start) > 0.1
    assert not list((folder / "checkpoint-1").glob("*/adapter_config.json"))
    assert adapter(folder).keys() == adapter(straight).keys()


def test_an_adapter_as_teacher_has_the_base_of_the_run(stage):
    """With `overrides_of_model_config`: an untrained adapter says what the starting model says."""
    changes = {"overrides_of_model_config": {"hidden_act": "relu"}, "max_steps": 1}
    same = train(stage, "overridden", **changes, learning_rate=1e-12)
    block = {"forget": {"objective": "npo"}, "retain": {"objective": "kl"}}
    block["reference"] = {"adapter": str(same)}
    saved = {"save_strategy": "steps", "save_steps": 1, "unlearn": block}
    first = history(train(stage, "overridden-teacher", **changes, **saved))[0]
    assert first["log_ratio"] == pytest.approx(0, abs=1e-4)
    assert first["retain/kl"] == pytest.approx(0, abs=1e-6)


def test_an_adapter_as_teacher_has_the_revision_of_the_run(stage, monkeypatch):
    """It was put on the hub's newest weights: an untrained adapter says what `v1` says."""
    hub = stage / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    for seed, (revision, commit) in enumerate((("main", "a" * 40), ("v1", "b" * 40))):
        tiny_olmo(hub / "models--acme--tiny/snapshots" / commit, seed)
        (refs := hub / "models--acme--tiny/refs").mkdir(exist_ok=True)
        (refs / revision).write_text(commit)
    start = AutoModelForCausalLM.from_pretrained("acme/tiny", revision="v1")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(start, lora).save_pretrained(stage / "untrained")
    block = {"forget": {"objective": "npo"}, "retain": {"objective": "kl"}}
    block["reference"] = {"adapter": str(stage / "untrained")}
    changes = {"base_model": "acme/tiny", "revision_of_model": "v1", "max_steps": 1}
    saved = {"save_strategy": "steps", "save_steps": 1, "unlearn": block}
    first = history(train(stage, "revision", **changes, **saved))[0]
    assert first["log_ratio"] == pytest.approx(0, abs=1e-4)
    assert first["retain/kl"] == pytest.approx(0, abs=1e-6)


def test_a_teacher_of_another_tokenizer_is_refused_before_weights_are_loaded(stage):
    """Its folder has a tokenizer and nothing else, so loading it would fail otherwise."""
    from data_tokenizers import byte_tokenizer

    byte_tokenizer().save_pretrained(stage / "foreign")
    block = config(stage, "x")["unlearn"] | {"reference": {"model": str(stage / "foreign")}}
    with pytest.raises(UnlearnError, match="another tokenizer than base_model"):
        train(stage, "foreign-teacher", unlearn=block)


def test_a_teacher_of_another_hidden_size_has_no_states_to_compare(stage):
    """It was a failed subtraction of tensors in the first step."""
    block = config(stage, "x")["unlearn"] | {
        "reference": {"model": tiny_olmo(stage / "wider", hidden_size=320)},
        "retain": {"objective": "hidden_mse", "layer": 1},
    }
    with pytest.raises(UnlearnError, match="states have 320 numbers and the policy's"):
        train(stage, "wider-teacher", unlearn=block)


def test_a_layer_that_a_model_of_the_hub_lacks_is_found_before_its_weights(stage):
    """What `check` reads from a folder, the plugin asks transformers for (here: an override)."""
    block = config(stage, "x")["unlearn"] | {"retain": {"objective": "hidden_mse", "layer": 1}}
    cfg = DictDefault(config(stage, "x", unlearn=block))
    UnlearnPlugin().pre_model_load(cfg)
    cfg.overrides_of_model_config = {"num_hidden_layers": 1}
    with pytest.raises(UnlearnError, match="`layer: 1` of retain/hidden_mse .* layers 0 to 0"):
        UnlearnPlugin().pre_model_load(cfg)


def phased(stage) -> dict:
    """3 steps of forgetting beside KL, then 3 of repair."""
    block = config(stage, "x")["unlearn"]
    npo, nll = block.pop("forget"), {"objective": "nll", "weight": 0.5}
    del block["retain"]
    block["phases"] = [
        {"steps": 3, "forget": npo, "retain": {"objective": "kl"}},
        {"epochs": 1, "retain": nll, "learning_rate": 1e-3},
    ]
    return {"unlearn": block, "num_epochs": "DELETE", "save_strategy": "steps", "save_steps": 2}


def test_phases(stage):
    """An epoch is 3 steps. The learning rate begins anew, each phase logs its own parts, and a run
    that is stopped in the middle of either phase goes on to the same weights, bit by bit."""
    whole = train(stage, "phases", **phased(stage), learning_rate=2e-3, lr_scheduler="linear")
    found = logs(whole)
    assert [entry["phase"] for entry in found] == [1, 1, 1, 2, 2, 2]
    rates = [entry["learning_rate"] for entry in found]
    assert rates[0] == pytest.approx(2e-3) and rates[3] == pytest.approx(1e-3)
    assert rates[:3] == sorted(rates[:3], reverse=True) and rates[2] < rates[3]
    assert all("forget/npo" in entry and "retain/nll" not in entry for entry in found[:3])
    assert all("forget/npo" not in entry and "forget_nll" not in entry for entry in found[3:])
    for entry in found[3:]:
        assert entry["loss"] == pytest.approx(0.5 * entry["retain/nll"], abs=1e-3)
    for step in (2, 4):
        resumed = train(
            stage, f"phases-from-{step}", **phased(stage), learning_rate=2e-3,
            lr_scheduler="linear", resume_from_checkpoint=str(whole / f"checkpoint-{step}"),
        )  # fmt: skip
        assert_same(whole, resumed, atol=0)


def test_a_phase_may_begin_with_a_fresh_optimizer(stage):
    """The first step of Adam moves a weight by the learning rate, whatever its gradient is: so does
    the third step here, if its phase begins afresh. A resumed run forgets the moments again."""
    base = {"lr_scheduler": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0,
            "learning_rate": 1e-3, "num_epochs": "DELETE"}  # fmt: skip

    def run(name: str, fresh: bool, **more) -> Path:
        last = {"steps": 2, "retain": {"objective": "nll"}, "fresh_optimizer": fresh}
        phases = [{"steps": 2, "forget": {"objective": "simnpo"}}, last]
        options = base | {"unlearn": {"phases": phases}} | more
        return train(stage, name, save_strategy="steps", save_steps=1, **options)

    def like_the_first(folder: Path) -> float:
        two, three = (adapter(folder / f"checkpoint-{n}") for n in (2, 3))
        # Of A, whose gradients are next to nothing while B is small, epsilon would eat a part.
        moved = torch.cat([(three[n] - two[n]).abs().flatten() for n in two if "lora_B" in n])
        return (moved - 1e-3).abs().lt(1e-5).float().mean().item()

    fresh = run("fresh", True)
    # Its evaluations have other parts in each phase.
    looks = {"test_datasets": datasets(stage, "forget", "retain"), "eval_steps": 1}
    assert like_the_first(fresh) > 0.9 and like_the_first(run("not-fresh", False, **looks)) < 0.1
    resumed = run("fresh-2", True, resume_from_checkpoint=str(fresh / "checkpoint-2"))
    assert_same(fresh, resumed, atol=0)


@pytest.mark.parametrize("which", ["starting adapter", "pissa"])
def test_an_adapter_that_is_not_the_identity_is_its_own_reference(stage, straight, which):
    """PiSSA moves a part of the base into the adapter: without it, the model is another one."""
    ways = {"pissa": {"peft_init_lora_weights": "pissa"}}
    folder = train(
        stage, "again", **ways.get(which, {"lora_model_dir": str(straight)}), max_steps=2,
        save_strategy="steps", save_steps=1, learning_rate=1e-9,
    )  # fmt: skip
    first = logs(folder)[0]
    assert first["log_ratio"] == pytest.approx(0, abs=1e-3)
    assert first["kl"] == pytest.approx(0, abs=1e-5)


def test_a_run_does_not_write_over_the_adapter_that_it_begins_with(stage, straight):
    """`merge-lora`, which names it in the same way, only reads it."""
    shutil.copytree(straight, own := stage / "own")
    with pytest.raises(UnlearnError, match="`output_dir` is `lora_model_dir`"):
        train(stage, "own", lora_model_dir=str(own), num_epochs=1)
    name = "adapter_model.safetensors"
    assert (own / name).read_bytes() == (straight / name).read_bytes()


def test_what_is_merged_is_what_the_run_has_made(stage, straight, capfd):
    """Axolotl merged `lora_model_dir`, the adapter that had not forgotten yet, without a word."""
    went_on = train(stage, "on", lora_model_dir=str(straight), num_epochs=1)
    with pytest.raises(SystemExit):
        merge_lora(config=str(stage / "on.yml"))
    assert f"add `--lora-model-dir {went_on}`" in capfd.readouterr().err
    assert not (went_on / "merged").exists()
    merge_lora(config=str(stage / "on.yml"), lora_model_dir=str(went_on))
    assert (went_on / "merged/model.safetensors").exists()


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (
            ["base_model.model.model.layers.0.mlp.up_proj.(lora_|base_layer)"],
            "weights outside of the adapter are trained .first .*up_proj.base",
        ),
        (["base_model.model.lora_nowhere"], "no parameter is trained"),
    ],
)
def test_weights_that_would_be_lost_or_not_trained_are_refused(stage, patterns, says):
    """Beside an adapter, base weights trained and were not saved; with a reference by adapter off,
    or none, a run of which nothing is trained was none the wiser."""
    block = config(stage, "x")["unlearn"] | {"forget": {"objective": "ga"}}
    with pytest.raises(UnlearnError, match=says):
        train(stage, "outside", unfrozen_parameters=patterns, unlearn=block)


@pytest.mark.parametrize(
    "key", ["lora_target_modules", "lora_modules_to_save", "lora_target_parameters"]
)
def test_a_module_to_train_that_the_model_lacks_is_refused(stage, key):
    """PEFT left a misspelled name out without a word, so less was trained than the config says."""
    names = {key: ["q_proj", "upp_proj"]} | {"lora_target_linear": False}
    if key != "lora_target_modules":
        names |= {"lora_target_modules": ["q_proj"], key: ["upp_proj"]}
    for given in (names[key], ["upp_proj"], "upp_proj")[: 3 if key == "lora_target_modules" else 1]:
        with pytest.raises(UnlearnError, match=f"`{key}` has 'upp_proj'.*did you mean 'up_proj'"):
            train(stage, "misspelled", max_steps=1, **names | {key: given})


def test_rmu_stops_at_its_layer(stage):
    """Two accumulated micro-batches a step; layer 1 of two never runs, so its adapter stays."""
    block = {
        "forget": {"objective": "rmu", "layer": 0, "coefficient": 3.0, "positions": "all"},
        "retain": {"objective": "hidden_mse", "layer": 0, "weight": 5.0, "positions": "all"},
        "reference": "cached",
    }
    out = train(
        stage, "rmu", unlearn=block, micro_batch_size=2, gradient_accumulation_steps=2,
        save_strategy="steps", save_steps=6,
    )  # fmt: skip
    found = logs(out)
    assert found[0]["retain/hidden_mse"] == pytest.approx(0, abs=1e-6)
    assert found[-1]["forget/rmu"] < 0.9 * found[0]["forget/rmu"]
    moved = {name for name, value in adapter(out).items() if "lora_B" in name and value.any()}
    assert moved and all("layers.0." in name for name in moved)


def test_rmu_below_all_that_is_trained_is_refused(stage):
    """It ran to its end and left the model as it was: on SmolLM2 at layer 7, LoRA from 10 on."""
    at = {"layer": 0, "positions": "all"}
    block = {
        "forget": {"objective": "rmu", **at},
        "retain": {"objective": "hidden_mse", "weight": 5.0, **at},
    }
    where = {"lora_target_linear": False, "lora_target_modules": ["layers.1.mlp.down_proj"]}
    with pytest.raises(UnlearnError, match="`layer: 0` of forget/rmu .*from layer 1 on"):
        train(stage, "rmu-below", unlearn=block, **where)


# -- faults: one sentence, before weights are loaded -------------------------------------------


def fault(stage: Path, capfd, **changes) -> str:
    """What ``axolotl train`` says of a config on standard error, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        loaded(stage, "fault", **changes)
    assert caught.value.code == 2
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("Error:")]
    assert len(lines) == 1
    return lines[0]


def datasets(stage, *sides):
    cfg = config(stage, "x")
    return [d for d in cfg["datasets"] if d["type"].rsplit(".", 1)[1] in sides]


def test_preprocess_compares_the_sides(stage, capfd):
    """Rows in a folder, which only Axolotl reads: `axolotl preprocess` wrote them as prepared."""
    (stage / "copied").mkdir()
    (stage / "copied/r.jsonl").write_bytes((stage / "forget.jsonl").read_bytes())
    sets = datasets(stage, "forget", "retain")
    sets[1]["path"] = str(stage / "copied")
    assert "token for token" in fault(stage, capfd, preprocess=True, datasets=sets)


def test_data_are_checked_again_as_axolotl_has_read_them(stage, capfd):
    """A folder is opened by Axolotl only: what its rows are shows in the columns."""
    folder = stage / "folder"
    folder.mkdir()
    (folder / "f.jsonl").write_bytes((stage / "forget.jsonl").read_bytes())
    sets = datasets(stage, "forget", "retain")
    sets[0]["path"] = str(folder)
    block = config(stage, "x")["unlearn"] | {"forget": {"objective": "ga", "tasks": 4}}
    said = fault(stage, capfd, unlearn=block, datasets=sets)
    assert "no forget row has the task 4; there are 2 completions" in said


def test_commands_that_read_no_data_do_not_ask_for_them(stage, straight):
    """After unlearning the forget file is deleted, and then the adapter is merged."""
    sets = datasets(stage, "forget", "retain")
    sets[0]["path"] = str(stage / "deleted.jsonl")
    merge_lora(config=written(stage / "merge.yml", config(stage, "straight", datasets=sets)))
    assert (straight / "merged" / "model.safetensors").exists()


def test_another_plugins_trainer_is_refused(stage, capfd):
    """Axolotl takes the first: the run was plain fine-tuning on the forget rows."""
    ours = config(stage, "x")["plugins"]
    plugins = ["test_train_axolotl.OtherPlugin", *ours]

    loaded = PluginManager.get_instance().plugins
    before = dict(loaded)
    loaded.clear()  # the order of the config counts
    try:
        assert "OtherPlugin brings a trainer" in fault(stage, capfd, plugins=plugins)
        assert "OtherPlugin brings a trainer" in fault(stage, capfd, plugins=plugins[::-1])
    finally:
        loaded.clear()
        loaded.update(before)


def test_a_trainer_that_is_not_ours_does_not_start(stage):
    trainer = AxolotlTrainer.__new__(AxolotlTrainer)
    with pytest.raises(UnlearnError, match="AxolotlTrainer instead of ours"):
        UnlearnPlugin().post_trainer_create(DictDefault(config(stage, "x")), trainer)


def test_the_best_checkpoint_is_the_one_with_the_least_loss(stage):
    """`greater_is_better: false` was dropped by Axolotl's builder, and the worst one restored. The
    last is never the best, whatever the last bits of a step: each makes forget rows less likely."""
    often = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "max_steps": 3}
    best = {"metric_for_best_model": "eval_forget_nll", "greater_is_better": False,
            "load_best_model_at_end": True, "learning_rate": 0.01}  # fmt: skip
    sides = {"forget": {"objective": "ga"}, "retain": {"objective": "nll", "weight": 0.01}}
    block = config(stage, "x")["unlearn"] | sides
    sets = datasets(stage, "forget", "retain")
    folder = train(stage, "best", test_datasets=sets, unlearn=block, **often, **best)
    seen = [log["eval_forget_nll"] for log in history(folder) if "eval_forget_nll" in log]
    assert seen[-3] + 0.01 < seen[-2] < seen[-1] - 0.01, seen
    state = json.loads((folder / "checkpoint-3/trainer_state.json").read_text())
    assert state["best_metric"] == seen[-3]
    best = Path(state["best_model_checkpoint"])
    assert best.name == "checkpoint-1"
    assert_same(folder, best, atol=0)


def test_axolotl_evaluate_is_refused(stage):
    """Of a fresh adapter it said log-ratio 0 and KL 0, and of a trained one too, which is then the
    start."""
    from axolotl.cli.evaluate import do_cli

    with pytest.raises(UnlearnError, match="`axolotl-unlearn eval`"):
        do_cli(config=written(stage / "evaluate.yml", config(stage, "evaluate")))


@pytest.mark.skipif(not versions.within(since="0.21"), reason="an option of Axolotl 0.21")
def test_full_determinism_trains_the_same(stage, straight, monkeypatch):
    """No part of a step is refused by torch's deterministic algorithms; a CPU run is the same."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, "1")  # set by transformers; as before afterwards
    try:
        once = train(stage, "deterministic", full_determinism=True)
        gpu = torch.accelerator.is_available()
        other = train(stage, "again", full_determinism=True) if gpu else straight
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, False
    assert_same(once, other, atol=0)


@pytest.mark.skipif(not versions.within(since="0.21"), reason="a hook of Axolotl 0.21")
def test_a_merged_folder_says_of_what_it_is_made(stage, straight):
    """`axolotl merge-lora`; the record tells the base by content, as the check of a recipe does."""
    from axolotl_unlearn.merging import Model, Tensors

    merge_lora(config=str(stage / "straight.yml"), lora_model_dir=str(straight))
    said = json.loads((straight / "merged/unlearn_base.json").read_text())
    assert said == {
        "base": str(stage / "base"),
        "sha256": Model(stage / "base").tensors.scan[0],
        "adapter": str(straight),
        "adapter_sha256": Tensors(straight, "adapter_model.safetensors").scan[0],
    }


def test_without_the_plugin_the_dataset_type_refuses(stage, monkeypatch):
    """Axolotl drops the block it does not know; the type must not fine-tune on the forget rows."""
    from axolotl.integrations import base

    # As Axolotl before 0.21, or without our metadata.
    monkeypatch.setattr(base, "entry_points", lambda group: [], raising=False)
    manager = base.PluginManager.get_instance()
    loaded = dict(manager.plugins)
    manager.plugins.clear()
    try:
        with pytest.raises(UnlearnError, match="plugins: \\[axolotl_unlearn.UnlearnPlugin\\]"):
            train(stage, "noplugin", plugins=None)
    finally:
        manager.plugins.update(loaded)


def test_check_says_what_train_does(stage, straight):
    """Steps, tokens and reference of the run that was made; a fault of Axolotl's is one, too."""
    from click.testing import CliRunner
    from datasets import concatenate_datasets, load_from_disk

    from axolotl_unlearn.cli import unlearn

    def check(name, **changes):
        path = written(stage / f"check-{name}.yml", config(stage, f"check-{name}", **changes))
        return CliRunner().invoke(unlearn, ["check", path, "--full", "--json"])

    done = check("good")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ready"] and not found["faults"]
    assert found["steps"] == len(logs(straight))
    longer = check("longer", max_steps=12)  # `max_steps` decides, beyond the epochs too
    assert json.loads(longer.stdout)["steps"] == 12
    prepared = json.loads((straight / "run_manifest.json").read_text())["entries"][0]["path"]
    tables = {p.parent for p in (straight / prepared).rglob("data-*.arrow")}
    rows = concatenate_datasets([load_from_disk(str(one)) for one in sorted(tables)])
    for side, role in (("forget", 0), ("retain", 1)):
        mine = [row for row in rows if row["role"] == role]
        tokens = found["tokens"][side]
        assert tokens["rows"] == len(mine) and tokens["total"] == sum(r["length"] for r in mine)
        assert tokens["labelled"] == sum(x != -100 for row in mine for x in row["labels"])
        assert tokens["longest"] == max(row["length"] for row in mine)
    model = load_file(stage / "base" / "model.safetensors")
    numbers = sum(tensor.numel() for tensor in model.values())
    trained = sum(tensor.numel() for tensor in adapter(straight).values())
    assert found["memory"]["gradients_and_optimizer"] == 12 * trained
    assert found["memory"]["weights"] in (2 * numbers + 4 * trained, 4 * numbers + 4 * trained)
    assert "clerk" not in done.output

    short = check("short", sequence_len=12)
    assert short.exit_code == 2 and "do not fit into 12" in short.output
    odd = check("odd", adapter="loro")
    assert odd.exit_code == 2 and "Axolotl refuses" in odd.output, odd.output
    assert "clerk" not in odd.output + short.output


# --- faults while it trains ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_blows_up_is_named_and_changes_nothing(stage, monkeypatch, what):
    """In the second epoch one retain row makes the loss infinite, or the gradient alone NaN: the
    rows of its step are named."""
    from axolotl_unlearn.training import trainer

    real, calls = trainer.step_loss, []

    def poisoned(model, batch, entries, **options):
        result = real(model, batch, entries, **options)
        calls.append(len(batch["role"]))
        hit = (batch["role"] == 1) & (batch["attention_mask"].sum(-1) == longest)
        if len(calls) > 3 and hit.any() and "retain" in result.losses:
            nothing = result.losses["retain"] * 0
            # log(0) is -inf; sqrt(0) is 0 but its slope there is not finite.
            broken = nothing.log() if what == "loss" else nothing.sqrt()
            result.losses["retain"] = result.losses["retain"] + broken
        return result

    rows = read_records(stage / "retain.jsonl")
    with (stage / "odd.jsonl").open("w") as file:
        for row in rows:
            output = row.output + " and so on" * 6 * (row is rows[4])
            one = {"id": row.id, "input": row.input, "output": output, "task": row.task}
            file.write(json.dumps(one) + "\n")
    datasets = config(stage, "x")["datasets"]
    datasets[1]["path"] = str(stage / "odd.jsonl")
    longest = longest_row(stage)
    monkeypatch.setattr(trainer, "step_loss", poisoned)
    with pytest.raises(UnlearnError) as told:
        train(stage, f"blown-{what}", datasets=datasets, save_strategy="steps", save_steps=1)
    said = str(told.value)
    step = max(int(p.name[11:]) for p in (stage / f"blown-{what}").glob("checkpoint-*"))
    number = "-inf" if what == "loss" else "nan"
    assert said.startswith(f"the {what} is {number} at step {step} (rows: forget '")
    assert "retain '\"retain-4\"qa0'" in said and f"checkpoint-{step}." in said
    assert "clerk" not in said


def longest_row(stage) -> int:
    """Tokens of the one row that was made longer than all others."""
    tokenizer = AutoTokenizer.from_pretrained(stage / "base")
    rows = [json.loads(line) for line in (stage / "odd.jsonl").read_text().splitlines()]
    sizes = sorted(len(tokenizer(f"{r['input']} {r['output']}")["input_ids"]) for r in rows)
    assert sizes[-1] > sizes[-2]
    return sizes[-1] + 1  # EOS


# --- last, since wandb starts processes ----------------------------------------------------------

#: What every tracker gets from a run of the over example.
LOGGED = ("loss", "forget_nll", "retain_nll", "kl", "log_ratio", "forget/npo", "retain/nll")


def test_tensorboard_and_wandb_offline(stage, monkeypatch):
    """Both hold all parts."""
    wandb = pytest.importorskip("wandb")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(stage / "wandb-files"))
    (stage / "wandb-files").mkdir()
    loggers = {"use_tensorboard": True, "use_wandb": True, "wandb_project": "p"}
    out = train(stage, "tracked", wandb_mode="offline", **loggers, max_steps=3)
    found = events.EventAccumulator(str(next(out.glob("runs/**/events*")).parent)).Reload()
    assert {f"train/{name}" for name in LOGGED} <= set(found.Tags()["scalars"])
    wandb.finish()
    (kept,) = (stage / "wandb-files").glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):  # its own process writes the file
        if left := [name for name in LOGGED if f"train/{name}".encode() not in kept.read_bytes()]:
            time.sleep(0.2)
    assert not left
