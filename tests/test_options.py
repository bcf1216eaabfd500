"""Options of Axolotl: each changes what it says and nothing else, is noted, or is refused."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from test_train_axolotl import adapter, config, history, logs, stage, train  # noqa: F401

from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.checks.config import config_faults, run_notes, setting_notes

RUN = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3, "learning_rate": 1e-3,
       "lr_scheduler": "linear"}  # fmt: skip
#: Options -> what they change: learning rates of the log, weights (else only those), or the folder.
EFFECTS = [
    ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"power": 3.0}}, "rates"),
    ({"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.5}, "rates"),
    ({"lr_scheduler": "rex", "cosine_min_lr_ratio": 0.5}, "rates"),
    ({"warmup_steps": 2}, "rates"),
    ({"warmup_ratio": 0.7}, "rates"),
    ({"learning_rate": 2e-3}, "rates"),
    ({"weight_decay": 0.5}, "weights"),
    ({"adam_beta1": 0.5, "adam_beta2": 0.6}, "weights"),
    ({"adam_epsilon": 1.0}, "weights"),
    ({"max_grad_norm": 1e-3, "optimizer": "sgd"}, "weights"),
    ({"loraplus_lr_ratio": 8}, "weights"),
    ({"optimizer": "sgd", "optim_args": {"momentum": 0.9}}, "weights"),
    ({"peft_init_lora_weights": "gaussian"}, "weights"),
    ({"lr_groups": [{"name": "q", "modules": ["q_proj"], "lr": 1e-2}]}, "weights"),
    ({"lora_alpha": 64}, "weights"),
    ({"peft_use_rslora": True}, "weights"),
    ({"lora_dropout": 0.5}, "weights"),
    ({"lora_r": 2}, "shapes"),
    ({"lora_target_modules": ["q_proj"], "lora_target_linear": False}, "shapes"),
    ({"lora_modules_to_save": ["lm_head"]}, "shapes"),
    ({"peft_layers_to_transform": [1]}, "shapes"),
    ({"peft_use_dora": True}, "shapes"),
]
#: Options that change nothing -> the note.
IDLE = [
    ({"shuffle_merged_datasets": False}, "`shuffle_merged_datasets: False` has no effect"),
    ({"peft_init_lora_weights": False}, "`peft_init_lora_weights: False` has no effect"),
    ({"sample_packing": True}, "`sample_packing: True` has no effect"),
    ({"shuffle_before_merging_datasets": True}, "`shuffle_before_merging_datasets: True` has no"),
    ({"rl_beta": 0.5}, "`rl_beta: 0.5` has no effect"),
    ({"dpo_beta": 0.5}, "`dpo_beta: 0.5` has no effect"),
    ({"chunked_cross_entropy": True}, "`chunked_cross_entropy: True` has no effect"),
    ({"lr_div_factor": 3.0}, "`lr_div_factor: 3.0` has no effect"),
    ({"include_tkps": True}, "`include_tkps: True` has no effect"),
    ({"logging_nan_inf_filter": True}, "`logging_nan_inf_filter: True` has no effect"),
    ({"sample_packing_bin_size": 9}, "`sample_packing_bin_size: 9` has no effect"),
    ({"max_prompt_len": 5}, "`max_prompt_len: 5` has no effect"),
    ({"cosine_min_lr_ratio": 0.5}, "`cosine_min_lr_ratio: 0.5` has no effect"),
    ({"cosine_constant_lr_ratio": 0.5}, "`cosine_constant_lr_ratio: 0.5` has no effect"),
    ({"lr_quadratic_warmup": True}, "`lr_quadratic_warmup: True` has no effect"),
    ({"jagged_restart_warmup_steps": 3}, "`jagged_restart_warmup_steps: 3` has no effect"),
    ({"loraplus_lr_embedding": 1e-3}, "`loraplus_lr_embedding: 0.001` has no effect"),
    ({"adam_beta3": 0.5}, "`adam_beta3: 0.5` has no effect"),
    ({"dion_lr": 0.1}, "`dion_lr: 0.1` has no effect"),
    ({"torch_compile_backend": "eager"}, "`torch_compile_backend: eager` has no effect"),
    ({"optim_args": {"eps": 1.0}}, "`optim_args: {'eps': 1.0}` has no effect"),
    ({"revision_of_model": "v1"}, "`revision_of_model` does nothing here"),
    ({"chat_template": "chatml"}, "`chat_template` renders no row here"),
    ({"default_system_message": "Be brief."}, "`default_system_message` renders no row here"),
    ({"load_best_model_at_end": True}, "`load_best_model_at_end` does nothing here"),
]


@pytest.fixture(scope="module")
def plain(stage):  # noqa: F811
    return train(stage, "options-plain", **RUN)


@pytest.mark.parametrize(("options", "changes"), EFFECTS, ids=lambda x: str(x)[:60])
def test_an_option_changes_what_it_says_and_nothing_else(stage, plain, options, changes):  # noqa: F811
    """At the first step the model is the start, so rows, order and losses are those of before."""
    assert not config_faults(config(stage, "x") | options)
    found = train(stage, "options-one", **RUN | options)
    first, before = logs(found)[0], logs(plain)[0]
    for part in ("forget/npo", "retain/nll", "retain/kl", "forget_nll"):
        assert first[part] == pytest.approx(before[part], rel=1e-6 if "dropout" not in str(options)
                                            else 1e-1, abs=1e-6), part  # fmt: skip
    one, two = adapter(found), adapter(plain)
    rates = [[entry["learning_rate"] for entry in logs(folder)] for folder in (found, plain)]
    assert (rates[0] != rates[1]) == (changes == "rates"), rates
    assert ({n: w.shape for n, w in one.items()} != {n: w.shape for n, w in two.items()}) == (
        changes == "shapes"
    )
    assert changes == "shapes" or any(not torch.equal(one[name], two[name]) for name in two)


def test_a_run_with_nothing_idle_says_nothing(stage, caplog):  # noqa: F811
    """Axolotl fills in defaults of what nobody asked for."""
    train(stage, "silent", **RUN | {"max_steps": 1, "save_steps": 1})
    said = [one for one in caplog.messages if re.search("does nothing|no effect|renders no", one)]
    assert not said


def test_options_without_effect_are_noted(stage, plain):  # noqa: F811
    """They were "supported", or passed without a word. One run has them all."""
    every = {}
    for options, note in IDLE:
        cfg = config(stage, "x") | RUN | options
        assert note in " ".join([*setting_notes(cfg), *axolotl_options.noted(cfg).values()])
        every |= options
    one, two = adapter(train(stage, "options-idle", **RUN | every)), adapter(plain)
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_an_option_has_an_effect_beside_another(stage):  # noqa: F811
    """An adapter's, of which all weights were trained, said nothing."""
    for option, other in (
        ({"lora_r": 4}, {"adapter": "lora"}),
        ({"loraplus_lr_ratio": 8}, {"adapter": "lora"}),
        ({"loraplus_lr_embedding": 1e-3}, {"loraplus_lr_ratio": 8}),
        ({"cosine_min_lr_ratio": 0.5}, {}),  # cosine is Axolotl's default
        ({"optim_args": "momentum=0.9"}, {"optimizer": "sgd"}),
    ):
        (key,) = option
        assert key not in axolotl_options.noted(option | other)
        without = option | ({} if other else {"lr_scheduler": "linear"})
        assert f"`{key}: {option[key]}` has no effect" in axolotl_options.noted(without)[key]


@pytest.mark.parametrize("optimizer", ["muon", "sinkgd"])
def test_rates_that_an_optimizer_does_not_ask_for_are_noted(stage, optimizer):  # noqa: F811
    """It makes groups of weights by itself, and the config's were gone without a word."""
    given = RUN | {"optimizer": optimizer, "max_steps": 1, "save_steps": 1}
    one = adapter(train(stage, "rates-own", **given))
    for rates in (
        {"lr_groups": [{"name": "q", "modules": ["q_proj"], "lr": 1e-1}]},
        {"loraplus_lr_ratio": 8},
    ):
        (key,) = rates
        assert key not in axolotl_options.noted(config(stage, "x") | rates)
        noted = axolotl_options.noted(config(stage, "x") | given | rates)
        assert "muon, dion and sinkgd make groups of weights" in noted[key]
        two = adapter(train(stage, "rates-given", **given | rates))
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("given", ["betas=(0.5,0.6)", "momentum", {"betas": [0.5, 0.6]}])
def test_optimizer_arguments_that_cannot_be_read_are_refused(stage, given):  # noqa: F811
    """They ended in a ValueError when the weights were loaded."""
    (said,) = config_faults(config(stage, "x") | {"optimizer": "sgd", "optim_args": given})
    assert said.startswith("`optim_args: ") and "cannot be read" in said


@pytest.mark.parametrize(
    ("optimizer", "given", "wrong"),
    [("sgd", {"momentum": 0.9, "dampening": 0.1, "nesterov": True}, []),
     ("sgd", "momentum=0.9, eps=1", ["eps"]), ("sgd", {"weight_decay": 0.5}, ["weight_decay"]),
     ("adagrad", {"eps": 0.1, "lr_decay": 0.1}, []), ("adagrad", {"momentum": 0.9}, ["momentum"]),
     ("rmsprop", "alpha=0.5,centered=true", []), ("rmsprop", {"betas": 1}, ["betas"])],
)  # fmt: skip
def test_optimizer_arguments_that_nobody_reads_are_noted(stage, optimizer, given, wrong):  # noqa: F811
    """transformers dropped them without a word, and the run was another than the config says."""
    cfg = config(stage, "x") | {"optimizer": optimizer, "optim_args": given}
    assert config_faults(cfg) == []
    said = [one for one in setting_notes(cfg) if "`optim_args`" in one]
    assert [one.split("'")[1] for one in said] == wrong, said


def test_optimizer_arguments_are_those_that_transformers_reads():
    """Beside `weight_decay`, which each group of weights has of its own."""
    from transformers import trainer_optimizer

    for name, ours in axolotl_options.TABLE["optim_args"].items():
        source = inspect.getsource(getattr(trainer_optimizer, f"_get_{name}"))
        keys = re.findall(r"for key in \((.*?)\)", source)[0] + source.partition("float")[2]
        theirs = {*re.findall(r'"(\w+)"', keys)} - {"weight_decay", "true", "1", "yes"}
        assert theirs == {*ours}, name


def test_rows_that_are_never_evaluated_are_noted(stage):  # noqa: F811
    """`test_datasets` without a time to look: Axolotl reads them and goes on."""
    tested = {"test_datasets": config(stage, "x")["datasets"]}
    for given, said in (
        ({}, True), ({"eval_steps": 1}, False), ({"eval_strategy": "epoch"}, False),
        ({"evals_per_epoch": 1, "num_epochs": 2}, False),
        ({"evals_per_epoch": 1, "num_epochs": 1}, True),
    ):  # fmt: skip
        notes = " ".join(setting_notes(config(stage, "x") | tested | given))
        assert ("`test_datasets` are never evaluated" in notes) == said, given
    found = train(stage, "unlooked", **RUN | tested | {"max_steps": 1, "save_steps": 1})
    assert not [one for one in history(found) if "eval_loss" in one]


def test_a_template_of_rows_that_axolotl_reads_is_not_noted(stage):  # noqa: F811
    """Beside rows to memorise; it was said to render no row."""
    rows = [{"path": "a", "type": "axolotl_unlearn.data.memorise"}]
    block = {"unlearn": {"data": {"eos": True}}, "chat_template": "chatml"}
    for more, said in (([], True), ([{"path": "b", "type": "chat_template"}], False)):
        notes = " ".join(setting_notes(block | {"datasets": rows + more}))
        assert ("`chat_template` renders no row here" in notes) == said


def test_an_adapter_to_begin_with_keeps_its_shape(stage, plain):  # noqa: F811
    """PEFT reads the folder's own settings: those of the config passed without a word."""
    shape = {"lora_r": 9, "lora_alpha": 999, "lora_dropout": 0.5, "peft_use_dora": True,
             "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"],
             "peft_layers_to_transform": [0], "peft_use_rslora": True}  # fmt: skip
    start = {"lora_model_dir": str(plain), "max_steps": 1}
    saved = json.loads((plain / "adapter_config.json").read_text())
    same = {"lora_r": saved["r"], "lora_alpha": saved["lora_alpha"],
            "lora_target_modules": saved["target_modules"][::-1]}  # fmt: skip
    found = []
    for given, names in ((shape, [*shape]), (same, [])):
        cfg = config(stage, "x") | RUN | start | given
        notes = [one for one in setting_notes(cfg) if "`lora_model_dir`" in one]
        assert sorted(one.split("`")[1].split(":")[0] for one in notes) == sorted(names)
        found.append(adapter(train(stage, "options-start", **RUN | start | given)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overrides_of_model_config": {"rms_norm_eps": 0.5}}, "'rms_norm_eps' is no setting"),
        ({"overrides_of_model_config": {"attention_dropout": 0.5}}, "(attention_dropout: 0.5)"),
        ({"data_seed": 7}, "`data_seed` is no option of Axolotl"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_key_that_nobody_reads_is_said(stage, options, said, caplog):  # noqa: F811
    """Axolotl took any key."""
    cfg = config(stage, "unmet", **RUN | options | {"max_steps": 1, "save_steps": 1})
    train(stage, "unmet", **cfg)
    says = re.compile("no option of Axolotl|no setting of this|with dropout")
    told = [message for message in caplog.messages if says.search(message)]
    assert len(told) == 1 and said in told[0], told


@pytest.mark.parametrize(
    ("options", "module"),
    [({"tiled_mlp": True}, "deepspeed"), ({"optimizer": "came_pytorch"}, "came_pytorch")],
)
def test_a_package_that_is_absent_is_named(stage, monkeypatch, options, module):  # noqa: F811
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = [*axolotl_options.absent(config(stage, "x") | options)]
    assert len(said) == 1 and f"needs the package {module}, which is not installed" in said[0]


def test_an_adapter_beside_quantised_weights_is_noted(stage):  # noqa: F811
    notes = setting_notes(config(stage, "x") | {"adapter": "qlora", "load_in_4bit": True})
    assert "adds it to the whole ones: evaluate the merged model" in " ".join(notes)


def test_a_mean_that_depends_on_the_micro_batch_is_noted():
    """docs/several-gpus.md: an update does not depend on how a step is cut."""
    match = {"preset": "never-seen", "teacher": "t", "heldout": "h"}
    for block, parts, says in ((match, 2, True), (match, 1, False), ({"preset": "ce-u"}, 2, False)):
        notes = setting_notes({"unlearn": block, "gradient_accumulation_steps": parts})
        assert ("update on 2 micro-batches is not that of one" in " ".join(notes)) == says


@pytest.mark.parametrize(
    ("able", "known", "emulated"),
    [({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, True, True),
     ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, True, False),
     ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True, False),
     ({"architecture": "aarch64"}, True, False), ({"architecture": "aarch64"}, False, True)],
)  # fmt: skip
def test_bfloat16_that_a_processor_only_emulates_is_noted(
    stage, monkeypatch, able, known, emulated  # noqa: F811
):  # fmt: skip
    """SmolLM2 took four times as long, without a word: AVX-512 alone is "supported" by oneDNN."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: known)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    monkeypatch.setattr("axolotl_unlearn.device.accelerator", lambda: None)
    said = {bf16: " ".join(setting_notes(config(stage, "x") | {"bf16": bf16}))
            for bf16 in (True, "full", "auto", False)}  # fmt: skip
    noted = {bf16 for bf16, notes in said.items() if "only emulates bfloat16" in notes}
    assert noted == ({True, "full"} if emulated else set())


def test_warmup_is_a_share_of_the_steps_that_are_made(stage):  # noqa: F811
    """`max_steps` beyond the epochs: it was a share of those (6 steps)."""
    found = train(stage, "warm", **RUN | {"max_steps": 12, "save_steps": 12, "warmup_ratio": 0.5})
    rates = [entry["learning_rate"] for entry in logs(found)]
    assert len(rates) == 12 and rates.index(max(rates)) == 6


def test_a_warmup_that_is_not_over_is_said(stage, caplog):  # noqa: F811
    """Found by the fuzzer: a run of one step with a warmup changed no weight and said nothing."""
    found = train(stage, "cold", **RUN | {"max_steps": 1, "save_steps": 1, "warmup_steps": 2})
    assert "`warmup_steps: 2` is not over when the run ends, after 1 step:" in caplog.text
    assert all(not weight.any() for name, weight in adapter(found).items() if "lora_B" in name)


def test_looks_that_a_run_never_reaches_are_said(stage):  # noqa: F811
    """Its targets stay where they were; what draws towards held-out rows never begins."""
    block = {"forget": {"objective": "match"}, "retain": {"objective": "kl"},
             "reference": {"model": "other"}}  # fmt: skip
    for every, said in ((2, False), (5, False), (6, True), (None, False)):
        level = {"heldout": "h.jsonl", "every": every}
        cfg = config(stage, "x", unlearn=block | {"level": level})
        notes = " ".join(run_notes(cfg, {"steps": 6}, 9, {}))
        assert ("`unlearn.level.every: 6` is not reached" in notes) == said


def test_a_schedule_is_refused_or_can_be_made(stage):  # noqa: F811
    """One that needs settings, or evaluations, ended in a traceback when the weights were loaded
    and the teacher had read all rows."""
    from transformers import SchedulerType, get_scheduler

    for name in SchedulerType:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        can = name not in ("reduce_lr_on_plateau", "greedy")  # without evaluations
        try:
            get_scheduler(name, optimizer, 0, 9)
        except (TypeError, ValueError):
            can = False
        cfg = config(stage, "x") | {"lr_scheduler": name.value}
        said = [one for one in config_faults(cfg) if "`lr_scheduler:" in one]
        assert bool(said) != can, (name, said)
    looked = {"lr_scheduler": "greedy", "test_datasets": config(stage, "x")["datasets"]}
    set_ = {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    assert not config_faults(config(stage, "x") | looked)
    assert not config_faults(config(stage, "x") | set_)


def optimizers() -> list[str]:
    from axolotl.utils.schemas.enums import CustomSupportedOptimizers
    from transformers.training_args import OptimizerNames

    return [one.value for names in (OptimizerNames, CustomSupportedOptimizers) for one in names]


@pytest.mark.parametrize("name", optimizers())
def test_an_optimizer_is_refused_or_trains(stage, name):  # noqa: F811
    """Axolotl's schema takes names whose packages are absent, or that it cannot make. The page says
    of each what happens."""
    page = (Path(__file__).parents[1] / "docs/axolotl-options.md").read_text("utf-8")
    said = re.search(rf"^\| `{name}` \| (.*) \|$", page, re.M)[1]
    package = re.search(r"needs the package `(\w+)`", said)
    absent = package is not None and importlib.util.find_spec(package[1]) is None
    faults = config_faults(config(stage, "x", optimizer=name))
    assert all(f"`optimizer: {name}`" in fault for fault in faults)
    assert bool(faults) == (said.startswith("refused") or absent or name == "dion")
    if absent:
        assert package[1] in faults[0]
    if not faults:
        train(stage, f"optimizer-{name}", optimizer=name, max_steps=1)
