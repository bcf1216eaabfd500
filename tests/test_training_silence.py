"""What a run must not do without a word: go on as another run, choose by a mean of means, save the
weights that its optimizer does not mean."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from axolotl.utils.dict import DictDefault
from conftest import code_of
from fault_codes import fails
from safetensors.torch import load_file
from test_train_axolotl import config, history, loaded, stage, train  # noqa: F401
from torch.testing import assert_close
from transformers import MixtralConfig

from axolotl_unlearn.checks.config import config_faults
from axolotl_unlearn.plugin import UnlearnPlugin

# ruff: noqa: F811
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


@pytest.fixture(scope="module")
def begun(stage):
    return train(stage, "begun", **SAVING) / "checkpoint-2"


def other_rows(stage) -> list[dict]:
    rows = (stage / "forget.jsonl").read_text().replace("lamp", "vase")
    (stage / "other.jsonl").write_text(rows)
    entries = config(stage, "x")["datasets"]
    return [{**entries[0], "path": str(stage / "other.jsonl")}, entries[1]]


@pytest.mark.parametrize("key", ["datasets", "unlearn", "seed", "micro_batch_size"])
def test_a_run_that_goes_on_as_another_is_refused(stage, begun, key):
    """Its first steps would be taken for done: forget rows that were never forgotten."""
    change = {
        "datasets": other_rows(stage), "seed": 7, "micro_batch_size": 2,
        "unlearn": {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}},
    }  # fmt: skip
    with fails("resume.made-of"):
        train(stage, f"as-{key}", resume_from_checkpoint=str(begun), **{key: change[key]})


#: Rates and betas come with the optimizer's state, whatever the config says; another scale of the
#: adapter is another model. Other optimizers and other trained weights were a traceback.
SETTINGS = {
    "learning_rate": 1e-5, "adam_beta1": 1e-5, "lora_alpha": 64, "peft_use_rslora": True,
    "optimizer": "sgd", "peft_use_dora": True, "lora_target_modules": ["embed_tokens"],
    "lora_modules_to_save": ["lm_head"], "peft_init_lora_weights": "pissa", "weight_decay": 1e-5,
    "revision_of_model": "v1",
}  # fmt: skip


@pytest.mark.parametrize("key", ["learning_rate", "optimizer", "peft_use_dora"])
def test_a_setting_that_a_resume_would_not_follow_is_refused(stage, begun, key):
    with fails("resume.made-of"):
        train(
            stage, f"as-{key}", resume_from_checkpoint=str(begun), max_steps=3,
            **{key: SETTINGS[key]},
        )  # fmt: skip


def test_a_run_that_goes_on_with_other_code_is_refused(stage, monkeypatch, tmp_path):
    """The module of an extension was edited between the two: half of its steps were the old one's.
    A helper of the same package is a part of it."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "own_edited"
    folder.mkdir()
    extension = "from axolotl_unlearn.training.extensions import Extension\n"
    (folder / "__init__.py").write_text(
        f"from own_edited.parts import SIZE\n{extension}class Own(Extension): ...\n"
    )
    block = config(stage, "x")["unlearn"] | {"extensions": "own_edited:Own"}
    for number in (1, 2):
        (folder / "parts.py").write_text(f"SIZE = {number}\n")
        if number == 1:
            begun = train(stage, "own-code", unlearn=block, **SAVING) / "checkpoint-2"
    with fails("resume.made-of") as caught:
        train(stage, "own-code-2", unlearn=block, resume_from_checkpoint=str(begun), max_steps=3)
    assert "another `unlearn.extensions: own_edited.parts`:" in str(caught.value)


def test_forget_rows_that_are_never_read_are_said(stage, caplog):
    """12 rows in steps of 4; a run of 2 steps, and phases of which one step forgets."""
    loaded(stage, "short", max_steps=2)
    assert "4 forget rows are never read, so never forgotten: a pass over all" in caplog.text
    caplog.clear()
    both = {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}}
    phases = [{"steps": 1, **both}, {"steps": 3, "retain": both["retain"]}]
    loaded(stage, "phased", unlearn={"phases": phases}, num_epochs="DELETE")
    assert "8 forget rows are never read" in caplog.text
    caplog.clear()
    loaded(stage, "all", num_epochs=1)
    assert "never read" not in caplog.text


def test_rows_longer_than_the_model_has_positions_are_said(stage, caplog):
    """They were read at positions that the model never learned."""
    few = shutil.copytree(stage / "base", stage / "few-positions")
    known = json.loads((few / "config.json").read_text()) | {"max_position_embeddings": 16}
    (few / "config.json").write_text(json.dumps(known))
    loaded(stage, "positions", max_steps=3, base_model=str(few))
    assert "tokens are longer than the 16 positions of this model" in caplog.text
    caplog.clear()
    loaded(stage, "positions", max_steps=3)
    assert "positions of this model" not in caplog.text


def test_a_group_of_rates_that_holds_no_weight_is_refused(stage):
    """Axolotl took the name without a word, and the rate was that of all others. Embeddings have a
    rate of their own, so a group of them alone did nothing."""
    whole = {"adapter": "DELETE", "lora_target_linear": "DELETE"}
    for modules, more in (
        (["q_prj"], {}), (["q_proj", "embed_tokens"], {}), (["q_proj", "embed_tokens"], whole)
    ):  # fmt: skip
        groups = [{"name": "own", "modules": modules, "lr": 1e-2}]
        with fails("training.no-module"):
            train(stage, "no-group", lr_groups=groups, max_steps=1, **more)


def test_a_rate_of_embeddings_that_are_not_trained_is_said(stage, caplog):
    """It did nothing without a word."""
    for given in ({"embedding_lr": 1e-2}, {"embedding_lr_scale": 5.0}):
        for more in ({}, {"lora_modules_to_save": ["lm_head"]}):
            caplog.clear()
            train(stage, "no-embedding", max_steps=1, **given, **more)
            assert ("no embedding or head is trained" in caplog.text) == (not more)


def test_what_the_loss_leaves_out_or_cuts_is_said(stage, caplog):
    """A router's loss and noise; a mean that depends on the micro-batch, also of one process."""
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512}  # fmt: skip
    for asked in (False, True):
        caplog.clear()
        tiny |= {"output_router_logits": asked, "router_jitter_noise": 0.1 * asked}
        MixtralConfig(**tiny).save_pretrained(stage / "experts")
        given = {"base_model": str(stage / "experts"), "reinit_weights": True}
        cfg = DictDefault(config(stage, "x", **given))
        UnlearnPlugin().pre_model_load(cfg)
        assert ("`output_router_logits`" in caplog.text) == asked
        assert ("(router_jitter_noise: 0.1)" in caplog.text) == asked
    block = config(stage, "x")["unlearn"]
    block["forget"] = {"objective": "npo", "reduction": "batch_token_mean"}
    for parts in (1, 2):
        caplog.clear()
        cut = {"micro_batch_size": 2 // parts, "gradient_accumulation_steps": parts}
        train(stage, "cut", unlearn=block, max_steps=1, **cut)
        assert ("update on 2 micro-batches is not that of one" in caplog.text) == (parts == 2)


def test_files_that_a_run_is_made_of(tmp_path):
    """Each setting, and each edit of what names stand for: a base's or an adapter's config, a
    teacher, held-out rows."""
    from datasets import Dataset

    from axolotl_unlearn.config import parse_unlearn
    from axolotl_unlearn.training.resume import made_of

    files = {
        "base/config.json": "base_model",
        "base/model.safetensors": "base_model",
        "start/adapter_config.json": "base_model",
        "teacher/model.safetensors": "unlearn.reference",
        "beside/adapter_model.safetensors": "unlearn.reference",
        "heldout.jsonl": "unlearn.level.heldout",
    }
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("1")
    teacher = {"model": str(tmp_path / "teacher"), "adapter": str(tmp_path / "beside")}
    args = parse_unlearn({
        "forget": {"objective": "match"}, "retain": {"objective": "kl"}, "reference": teacher,
        "level": {"heldout": str(tmp_path / "heldout.jsonl")},
    })  # fmt: skip
    rows = Dataset.from_dict(dict.fromkeys(("input_ids", "labels", "role", "kind", "task"), [[1]]))
    cfg = {"base_model": str(tmp_path / "base"), "lora_model_dir": str(tmp_path / "start")}
    before = made_of(cfg, args, rows, 4)
    for file, key in files.items():
        (tmp_path / file).write_text("11")
        now = made_of(cfg, args, rows, 4)
        assert [name for name in now if now[name] != before[name]] == [key]
        before = now
    for key, value in SETTINGS.items():
        now = made_of(cfg | {key: value}, args, rows, 4)
        assert [name for name in now if now[name] != before[name]] == [key]
    # The steps of `rex` beyond its old end had the rate 0, and `one_cycle` a traceback.
    for schedule in ("linear", "rex", "one_cycle"):
        short, long = ({"lr_scheduler": schedule, "max_steps": n} for n in (2, 3))
        before, now = (made_of(cfg | how, args, rows, 4) for how in (short, long))
        differ = [name for name in now if now[name] != before[name]]
        assert differ == ["lr_scheduler"] * (schedule != "linear")


def test_a_run_that_goes_on_longer_is_the_same_run(stage, begun):
    """So is one that cuts its batches otherwise."""
    cut = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    more = {"resume_from_checkpoint": str(begun), "max_steps": 3, **cut}
    assert (train(stage, "longer", **more) / "adapter_model.safetensors").is_file()


def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(stage):
    """Batches of 1, 3 and all rows: the weighted sum of the parts, which are logged beside it."""
    entries = config(stage, "x")["datasets"]
    losses = []
    for size in (1, 3, 16):
        out = train(
            stage, f"evaluated-{size}", test_datasets=entries, eval_batch_size=size, eval_steps=2,
            **SAVING,
        )  # fmt: skip
        seen = next(entry for entry in history(out) if "eval_loss" in entry)
        parts = {"eval_forget/npo": 0.1, "eval_retain/nll": 1.0, "eval_retain/kl": 0.5}
        wanted = sum(weight * seen[name] for name, weight in parts.items())
        assert seen["eval_loss"] == pytest.approx(wanted, abs=1e-4)
        losses.append(seen["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-4)


LEAST = {"greater_is_better": False}
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_steps": None}


@pytest.mark.parametrize(
    ("changes", "evaluated", "best"),
    [
        ({"evals_per_epoch": 1, "num_epochs": 2}, [0, 3, 6], True),
        ({"eval_steps": 2, "save_steps": 3, "load_best_model_at_end": True}, [0, 2, 4, 6], False),
        (EPOCHS | {"load_best_model_at_end": True}, [0, 3, 6], False),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_best_model_that_never_comes_is_said(stage, caplog, changes, evaluated, best):
    """Axolotl kept the last one and said nothing."""
    entries, saved = config(stage, "x")["datasets"], {"save_strategy": "steps", "save_steps": 3}
    found = history(train(stage, "never", test_datasets=entries, **saved | changes))
    assert [entry["step"] for entry in found if "eval_loss" in entry] == evaluated
    assert ("so the last model stays" in caplog.text) is not best


def test_a_batch_size_that_would_leave_rows_out_is_refused(stage):
    """Axolotl counted steps of 8 rows and took 2: two passes of 12 rows ended after 8 of them."""
    sizes = {"batch_size": 8, "micro_batch_size": 2}
    cfg = config(stage, "x") | sizes
    cfg.pop("gradient_accumulation_steps", None)
    assert "so rows would be left out" in " ".join(config_faults(cfg))
    assert not config_faults(cfg | {"gradient_accumulation_steps": 4, "batch_size": None})


def test_a_best_model_of_weights_that_change_is_said(stage, caplog):
    """The sum falls though the model stands still."""
    entries = config(stage, "x")["datasets"]
    both = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
    light = {side: one | {"weight": 0.1} for side, one in both.items()}
    block = {"phases": [{"steps": 2, **both}, {"steps": 1, **light}]}
    more = {"load_best_model_at_end": True, "eval_steps": 1, "save_strategy": "steps"}
    more |= {"save_steps": 1, "learning_rate": 1e-12, "test_datasets": entries}
    more["num_epochs"] = "DELETE"
    seen = [e for e in history(train(stage, "moves", unlearn=block, **more)) if "eval_loss" in e]
    assert seen[-1]["eval_loss"] < seen[0]["eval_loss"] - 1
    assert seen[-1]["eval_forget/npo"] == pytest.approx(seen[0]["eval_forget/npo"], abs=1e-4)
    assert "compares sums whose weights change" in caplog.text
    caplog.clear()
    train(stage, "part", unlearn=block, metric_for_best_model="eval_retain_nll", **more | LEAST)
    assert "compares sums whose weights change" not in caplog.text


def test_a_metric_of_rows_that_are_not_evaluated_is_refused_before_training(stage):
    """Entries of completions have no value on questions alone: a KeyError after two steps."""
    sets = config(stage, "x")["datasets"]
    rows = (stage / "forget.jsonl").read_text().splitlines(True)[::2]
    (stage / "asked.jsonl").write_text("".join(rows))
    block = {"forget": [{"objective": "npo", "kinds": "question"},
                        {"objective": "npo", "kinds": "completion"}],
             "retain": {"objective": "nll"}}  # fmt: skip
    sets = [sets[0] | {"path": str(stage / "asked.jsonl")}, sets[1]]
    best = {"metric_for_best_model": "forget/npo.completion", **LEAST, "eval_steps": 2}
    with fails("training.no-metric"):
        train(stage, "unmeasured", unlearn=block, test_datasets=sets, **SAVING | best)
    assert not list((stage / "unmeasured").glob("checkpoint-*"))


def test_a_schedule_free_optimizer_saves_the_weights_that_it_means(stage, monkeypatch):
    """Those of its `eval()`, in checkpoints and at the end, and not those of its gradients."""
    pytest.importorskip("schedulefree")
    from axolotl_unlearn.training.trainer import UnlearnTrainer

    seen = {}

    def watched(self, *args, **options):
        output = real(self, *args, **options)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        model = self.accelerator.unwrap_model(self.model)
        trains = optimizer.param_groups[0]["train_mode"]
        for what, switch in (("trained", optimizer.train), ("meant", optimizer.eval)):
            switch()
            named = ((n.replace(".default", ""), p) for n, p in model.named_parameters())
            seen[what] = {name: p.detach().cpu().clone() for name, p in named}
        (optimizer.train if trains else optimizer.eval)()
        return output

    real = UnlearnTrainer.train
    monkeypatch.setattr(UnlearnTrainer, "train", watched)
    free = {"optimizer": "schedule_free_adamw", "learning_rate": 1e-2, "lr_scheduler": "constant"}
    out = train(stage, "free", **SAVING | {"max_steps": 4}, **free)
    apart = 0.0
    for folder in (out, out / "checkpoint-4"):
        saved = load_file(folder / "adapter_model.safetensors")
        for name, value in saved.items():
            known = seen["meant"][name]
            assert_close(value, known, rtol=0, atol=1e-7)
            apart = max(apart, (value - seen["trained"][name]).abs().max().item())
    assert apart > 1e-4


def test_an_objective_of_ones_own_needs_no_edit_of_the_package(stage, monkeypatch, tmp_path):
    """The module of docs/add-objective.md registers it, through real Axolotl."""
    code = code_of("add-objective.md").replace("focal", "own_focal")
    (tmp_path / "own_objective_of_a_user.py").write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    block = {
        "extensions": "own_objective_of_a_user",
        "forget": {"objective": "own_focal", "gamma": 1.0},
        "retain": {"objective": "nll"},
    }
    out = train(stage, "own", unlearn=block, **SAVING)
    state = json.loads((out / "checkpoint-2/trainer_state.json").read_text())
    assert any("forget/own_focal" in entry for entry in state["log_history"])
