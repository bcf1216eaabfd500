"""What people type by mistake: one table of mistake, code and cure. No traceback, no "ready"."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from attack_models import tokenizer
from click.testing import CliRunner
from conftest import tiny_llama
from requests_folder import write_lines

from axolotl_unlearn import __version__
from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.checks.config import config_faults, prepare, prepare_data
from axolotl_unlearn.checks.estimate import steps
from axolotl_unlearn.checks.report import axolotl_faults
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import base

ROWS = {
    side: [{"input": f"{side} question {n}?", "output": f"{side} answer {n}"} for n in range(3)]
    for side in ("forget", "retain")
}
CHAT = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Bo"}]}]
CANARY = "question 0"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    words = tokenizer()
    tiny_llama(vocabulary=len(words)).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "bare" / name).unlink()
    for name in ("empty", "cut", "cut-config"):
        shutil.copytree(folder / "model", folder / name)
    (folder / "cut-config/config.json").write_text('{"model_type": "llama", "hidd')
    (folder / "empty/model.safetensors").unlink()
    with (folder / "cut/model.safetensors").open("r+b") as file:
        file.truncate(5000)
    for side in ROWS:
        write_lines(folder / f"asked/{side}.jsonl", [{"question": f"{side}?", "answer": side}])
    (folder / "lora").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "lora" / name).write_text("{}")
    shutil.copytree(folder / "lora", folder / "torn")
    facts = {"base_model_name_or_path": "model", "peft_type": "LORA", "target_modules": ["q_proj"]}
    (folder / "torn/adapter_config.json").write_text(json.dumps(facts))
    for side, rows in (*ROWS.items(), ("chat", CHAT)):
        write_lines(folder / f"{side}.jsonl", rows)
    return folder


def config(**changes) -> dict:
    """A good config with changes, by path (``unlearn.forget``); None removes."""
    cfg = {
        "base_model": "model", "plugins": ["axolotl_unlearn.UnlearnPlugin"], "sequence_len": 64,
        "unlearn": {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}, "data": {}},
        "datasets": [
            {"path": f"{side}.jsonl", "type": f"axolotl_unlearn.data.{side}"} for side in ROWS
        ],
        "micro_batch_size": 1, "learning_rate": 1e-4, "num_epochs": 1, "output_dir": "out",
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    for path, value in changes.items():
        *way, last = path.split(".")
        block = cfg
        for key in way:
            block = block[key]
        block.pop(last, None) if value is None else block.__setitem__(last, value)
    return cfg


def moved(cfg: dict, **names: str) -> dict:
    return {names.get(key, key): value for key, value in cfg.items()}


def forget_of(path: str) -> list[dict]:
    return [{"path": path, "type": "axolotl_unlearn.data.forget"}, config()["datasets"][1]]


NEVER_SEEN = {"preset": "never-seen", "teacher": "bare", "heldout": "h.jsonl"}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 4, "lora_target_linear": True}
LOOKS = {"test_datasets": config()["datasets"], "eval_steps": 1, "save_steps": 1,
         "metric_for_best_model": "retain_nll", "greater_is_better": False}  # fmt: skip
PHASES = [{"steps": 1, "forget": {"objective": "ga"}},
          {"steps": 1, "forget": {"objective": "ga"}, "retain": {"objective": "nll"}}]  # fmt: skip
KEPT = {"objective": "kl", "reference": {"model": "out/../out/t", "adapter": "lora"}}
#: Mistake -> (config, words that name the cure). `check` ends with code 2 and loads nothing.
CONFIGS = {
    "a typo in an entry": (config(**{"unlearn.forget": {"objectiv": "npo"}}), "`objectiv` meant"),
    "a typo of the block": (moved(config(), unlearn="unlern"), "did you mean `unlern`"),
    "a typo in the block": (config(**{"unlearn.retian": {}}), "did you mean 'retain'"),
    "a typo of an option": (moved(config(), learning_rate="learning_rat"), "`learning_rate`"),
    "an objective without its name": (config(**{"unlearn.forget": {"beta": 1}}), "objective"),
    "another objective": (config(**{"unlearn.forget": {"objective": "nop"}}), "did you mean 'npo'"),
    "chats as records": (config(datasets=forget_of("chat.jsonl")), "{type: chat_template}"),
    "rows in a folder's place": (config(datasets=forget_of("nowhere.jsonl")), "does not exist"),
    "rows of one side": (config(datasets=forget_of("forget.jsonl")[:1]), "data.retain"),
    "one file on both sides": (
        config(datasets=[one | {"path": "forget.jsonl"} for one in config()["datasets"]]),
        "rows of its own",
    ),
    "no model": (config(base_model=None), "name the model that is to forget"),
    "a model that is not there": (config(base_model="./nowhere"), "check the path"),
    "a model that is not in a folder of ours": (config(base_model="asked/model"), "check the path"),
    "a model of the hub, offline": (config(base_model="some/model"), "or download it"),
    "a model without a tokenizer": (config(base_model="bare"), "copy the tokenizer files"),
    "a model without weights": (config(base_model="empty"), "`reinit_weights: true`"),
    "a field that no row has": (
        config(
            datasets=forget_of("asked/forget.jsonl"),
            **{"unlearn.data": {"fields": {"input": "qestion", "output": "answer"}}},
        ),
        "field 'qestion' (there are answer, question)",
    ),
    "an adapter as the model": (config(base_model="lora"), "axolotl merge-lora"),
    "a chat template that is not there": (
        config(**{"unlearn.data": {"chat_template": True}}), "set `chat_template:`",
    ),
    "a plugin's line forgotten": (config(plugins=["axolotl_unlearn.Unlearn"]), "UnlearnPlugin"),
    "no number": (config(learning_rate="fast"), "is no number"),
    "a run that fine-tunes": (config(unlearn=None), "`axolotl-unlearn request new`"),
    "no optimizer": (config(optimizer="lion_pytorch"), "`optimizer: lion_pytorch` is no optimizer"),
    "output into the model": (config(output_dir="./model"), "which would be overwritten"),
    "output into the adapter before": (
        config(output_dir="lora", adapter="lora", lora_model_dir="./lora"), "is `lora_model_dir`",
    ),
    "output into the teacher's adapter": (
        config(output_dir="./lora", **{"unlearn.retain": KEPT}), "is `reference.adapter`",
    ),
    "output into the model before": (
        config(
            output_dir="out/o", unlearn={"preset": "never-seen", "teacher": "bare",
            "heldout": "h.jsonl", "original": "./out/o"},
        ), "is `reference.model`",
    ),
    "a batch size alone": (
        config(batch_size=8, gradient_accumulation_steps=None), "`gradient_accumulation_steps`",
    ),
    "a best checkpoint beside a level": (
        config(load_best_model_at_end=True, unlearn=NEVER_SEEN), "load_best_model_at_end` may hand",
    ),
    "a metric that no evaluation gives": (
        config(**LOOKS | {"metric_for_best_model": "eval_retian_nll"}), "did you mean 'retain_nll'",
    ),
    "a metric that one phase alone gives": (
        config(**LOOKS, unlearn={"phases": PHASES}, num_epochs=None), "forget_nll, loss.",
    ),
    "a part of an epoch with phases": (
        config(unlearn={"phases": PHASES}, num_epochs=None, saves_per_epoch=2), "give `save_steps`",
    ),
    "the greatest loss is the best": (
        config(**LOOKS | {"greater_is_better": None}), "set `greater_is_better: false`",
    ),
    "a layer beyond the model": (
        config(**LORA, peft_layers_to_transform=[0, 99]), "the model has layers 0 to 1",
    ),
    "no schedule": (config(lr_scheduler="cosin"), "did you mean 'cosine'"),
    "no pattern": (config(**LORA | {"lora_target_modules": "(q_proj"}), "(q_proj` is no pattern"),
    "tokens that nothing learns": (
        config(**LORA, tokens=["<new>"]), "`lora_modules_to_save: [embed_tokens, lm_head]`",
    ),
    "a teacher that nothing compares with": (
        config(**{"unlearn.reference": {"model": "bare"}, "unlearn.forget": {"objective": "ga"}}),
        "`unlearn.reference` names a model that no objective",
    ),
    "two files of held-out rows": (
        config(unlearn=NEVER_SEEN | {"level": {"heldout": "i.jsonl"}}), "`heldout: h.jsonl` is not",
    ),
    "a checkpoint that is not there": (
        config(resume_from_checkpoint="out/checkpoint-3"), "checkpoint-3` does not exist; remove",
    ),
    "a cut config of the model": (config(base_model="cut-config"), "copy or make it again"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mistake_in_a_config(world, monkeypatch, name):
    monkeypatch.chdir(world)
    cfg, cure = CONFIGS[name]
    Path("my.yml").write_text(yaml.safe_dump(cfg))
    done = CliRunner().invoke(unlearn, ["check", "my.yml"])
    assert done.exit_code == 2 and cure in done.output, done.output
    assert "ready" not in done.output and "Traceback" not in done.output
    assert CANARY not in done.output


RAISES = "{% for m in messages %}{{ raise_exception('No system here') }}{% endfor %}"
MISSES = "{% for m in messages %}{{ m.tool.name }}{% endfor %}"
#: What only tokens show -> words that name the cure: `check --full`.
TOKENS = {
    "a template that refuses the rows": ({"chat_template_jinja": RAISES}, "(No system here)"),
    "a template with another field": ({"chat_template_jinja": MISSES}, "has no attribute 'tool'"),
    "no such type": ({"type": "chat_templte", "chat_template": None}, "did you mean 'chat_templ"),
    "a template without its text": ({}, "Axolotl refuses the entry"),
    "another field of messages": (
        {"field_messages": "talk", "chat_template": "chatml"},
        "the entry of `datasets`",
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_mistake_that_tokens_show(world, monkeypatch, name):
    monkeypatch.chdir(world)
    changes, cure = TOKENS[name]
    entry = {"type": "chat_template", "chat_template": "jinja"} | changes
    for side in ROWS:
        row = {"messages": [{"role": "user", "content": side}], "id": side}
        write_lines(Path(f"talk-{side}.jsonl"), [row])
    data = [
        one | {"path": f"talk-{side}.jsonl"}
        for side, one in zip(ROWS, config()["datasets"], strict=True)
    ]
    Path("my.yml").write_text(
        yaml.safe_dump(config(datasets=data, **{"unlearn.data": {"rows": entry}}))
    )
    done = CliRunner().invoke(unlearn, ["check", "my.yml", "--full"])
    assert done.exit_code == 2 and cure in done.output, done.output
    assert "ready" not in done.output


def test_a_template_without_its_name_is_taken(world, monkeypatch):
    """Axolotl reads `chat_template_jinja` alone as `chat_template: jinja`; it was refused, and rows
    were shown as of another template."""
    monkeypatch.chdir(world)
    own = {"chat_template_jinja": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    Path("my.yml").write_text(yaml.safe_dump(config(**{"unlearn.data.chat_template": True}) | own))
    done = CliRunner().invoke(unlearn, ["check", "my.yml", "--full", "--show", "1"])
    assert done.exit_code == 0 and "| <" in done.output, done.output
    raw = yaml.safe_load(Path("my.yml").read_text())  # as `axolotl train` gives it to plugins
    assert not config_faults(raw, trains=True)


@pytest.mark.parametrize("name", ["a model of the hub, offline", "a typo in an entry", "no number"])
def test_a_mistake_that_training_meets(world, monkeypatch, capsys, name):
    """`axolotl train` ends with the same sentence and code 2, before anything is loaded."""
    from axolotl_unlearn.plugin import UnlearnPlugin

    monkeypatch.chdir(world)
    cfg, cure = CONFIGS[name]
    with pytest.raises(SystemExit) as end:
        UnlearnPlugin().register(cfg)
    assert end.value.code == 2 and cure in capsys.readouterr().err


def test_merging_does_not_ask_for_what_training_read(world, monkeypatch):
    """After the teacher and the held-out rows had been deleted, `axolotl merge-lora` was refused;
    `check` and training do ask for them."""
    monkeypatch.chdir(world)
    gone = {"preset": "never-seen", "teacher": "./out/gone", "heldout": "gone.jsonl"}
    cfg = config(**LORA, unlearn=gone)
    says = [one for one in config_faults(cfg, trains=True) if "gone" in one]
    assert len(says) == 2 and "does not exist" in says[0] and "is no file" in says[1], says
    prepare(cfg)  # of every command
    with pytest.raises(UnlearnError, match=r"out/gone` does not exist.* gone.jsonl` is no file"):
        prepare_data(cfg, {})


@pytest.mark.parametrize(
    ("began", "own"), [("out", True), ("./out/checkpoint-2", True), ("out/begun", False)]
)
def test_a_checkpoint_of_the_run_may_be_merged(began, own):
    """An adapter below `output_dir` may be the one that the run began with."""
    found = config_faults(config(**LORA, lora_model_dir=began, merge_lora=True))
    assert any("would be merged in place" in one for one in found) != own, found


OWN = "from axolotl_unlearn.objectives import LabelScores, Terms, objective\n"
BARE = '@objective("own_{0}", unit="{1}", source="none")\ndef own_{0}(scores: LabelScores):\n    '
EXTENSION = (
    "from __future__ import annotations\n"
    "from axolotl_unlearn.training.extensions import Extension\nclass {}(Extension):\n"
)
#: A module of the user's, as `unlearn.extensions` and the objective name it -> words of the cure.
MODULES = {
    "bare": (BARE.format("bare", "token") + "return scores.logp", "own_bare", "returned Tensor"),
    "mean": (
        BARE.format("mean", "token") + "return Terms(scores.logp.mean())", "own_mean",
        "returned Terms of values []",
    ),
    "none": (BARE.format("none", "row") + "pass", "own_none", "returned NoneType"),
    "fails": (BARE.format("fails", "row") + "return scores.log", "own_fails", "AttributeError"),
    "taken": (
        BARE.format("taken", "row").replace("LabelScores", "LabelScores, *, weight: float = 2") +
        "pass", "own_taken", "a key of every entry",
    ),
    "nosource": ('@objective("own_x")\ndef own_x(scores): ...', "own_x", "has no `source=`"),
    "imports": ("import torchh", "npo", "No module named 'torchh'"),
    "plain:Plain": ("class Plain: ...", "npo", "has no class 'Plain' that is an Extension"),
    "untyped:Untyped": (
        EXTENSION.format("Untyped") + "    def __init__(self, *, rho=1): ...", "npos", "'npos'",
    ),
    "unknown:Unknown": (
        EXTENSION.format("Unknown") + "    def __init__(self, *, rho: Foo = 1): ...", "npo",
        "name 'Foo' is not defined",
    ),
    "named:Named": (
        EXTENSION.format("Named") + "    def __init__(self, *, extension: int = 1): ...", "npo",
        "a key of every entry",
    ),
    "idle": (EXTENSION.format("Idle") + "    ...", "npo", "`own_idle:Class`"),
    "twice": (
        BARE.format("twice", "row") + "...\n" +
        BARE.format("twice", "row").replace("def own_twice", "def own_other") + "...", "own_twice",
        "registered twice",
    ),
    "absent:": (None, "npo", "PYTHONPATH"),
    "typo": (BARE.format("typo", "row") + "pass", "own_tpo", "extensions add"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_mistake_in_a_module_of_ones_own(world, monkeypatch, name):
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    text, objective, cure = MODULES[name]
    module, colon, kind = name.partition(":")
    if text:
        head = "" if text.startswith("from __future__") else OWN
        Path(f"own_{module}.py").write_text(head + text + "\n")
    block = {"unlearn.extensions": f"own_{module}{colon}{kind}".rstrip(":")}
    Path("my.yml").write_text(
        yaml.safe_dump(config(**block, **{"unlearn.forget": {"objective": objective}}))
    )
    done = CliRunner().invoke(unlearn, ["check", "my.yml", "--full"])
    for one in [one for one in base.OBJECTIVES if one.startswith("own_")]:
        del base.OBJECTIVES[one]
    assert done.exit_code == 2 and cure in " ".join(done.output.split()), done.output
    assert "please report" not in done.output and "Field required" not in done.output


#: Command line -> words that name the cure.
COMMANDS = {
    "train my.yml": "did you mean `axolotl train`?",
    "merge-lora my.yml": "did you mean `axolotl merge-lora`?",
    "chek my.yml": "did you mean `axolotl-unlearn check`?",
    "frobnicate": "`--help` lists them",
    "methods npoo": "'npo'",
    "check forget.jsonl": "give the path of an Axolotl config",
    "check": "Missing argument 'CONFIG'",
    "check nowhere.yml": "does not exist",
    "check .": "is a folder; name the config in it",
    "init --base-model model --forget no.jsonl --retain no2.jsonl": "no.jsonl and no2.jsonl",
    "init --kind match --base-model m --forget f --retain r": "needs --heldout and --teacher",
    "eval nowhere ./gone": "./gone does not exist",
    "eval some/model": "or download it",
    "eval model --data asked": "`--min-members 0`",
    "eval model --data asked --min-members 0 --device xpu": "give `--device",
    "attack prompt model --data asked --device xpu": "give `--device",
    "audit forget.jsonl --model bare": "copy the tokenizer files",
    "audit forget.jsonl --model localhost:8000/v1": "of a server write http://localhost:8000/v1",
    "eval served=localhost:8000/v1 --data asked --min-members 0": "of a server write http://localhost:8000/v1",
    "request verify gone.zip": "gone.zip does not exist",
    "audit forget.jsonl --model cut": "copy or make it again",
    "audit forget.jsonl --model torn": "torn/adapter_model.safetensors cannot be read",
    "tasks run --model hf-unlearn --model_args pretrained=./gone --tasks tofu": "./gone does not",
    "tasks run --model hf-unlearn --model_args pretrained=model --tasks tofu,tofuu": "Tasks not "
    "found: tofuu; ours are muse, rwku",
    "tasks run --model hf-unlearn --model_args pretrained=model --tasks tofu --metadata "
    '{"data_dir":"gone"}': "Error: gone has no forget10_perturbed.jsonl",
    "audit forget.jsonl --model model --held-out forget.jsonl": "3 of 3 texts",
    "eval ./nowhere ./gone": "./nowhere does not exist",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_mistake_on_the_command_line(world, monkeypatch, line):
    monkeypatch.chdir(world)
    done = CliRunner().invoke(unlearn, line.split())
    assert done.exit_code == 2 and COMMANDS[line] in done.output, done.output
    assert "Traceback" not in done.output and "please report" not in done.output


@pytest.mark.parametrize(
    "name", ["eval", "audit", "init", "attack relearn", "attack inside", "request audit"]
)
def test_what_goes_on_after_ctrl_c_is_said(monkeypatch, name):
    """It was "Aborted!"; and an audit of minutes, which keeps nothing, "goes on"."""

    def stop(*_):
        raise KeyboardInterrupt

    command, *more = name.split()
    monkeypatch.setattr(unlearn.get_command(None, command), "invoke", stop)
    line = {"init": "--base-model m", "audit": "a --model m"}.get(name, "m")
    done = CliRunner().invoke(unlearn, [command, *more, *line.split()])
    assert done.exit_code == 130 and "stopped; the same command" in done.output, done.output
    kept = name in ("eval", "attack relearn")
    assert ("goes on: what is finished is kept." if kept else "begins again.") in done.output


STOPS = {"early_stopping_patience": 2, "test_datasets": config()["datasets"]}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"max_steps": 1.5}, "`max_steps`"),
        (STOPS | {"test_datasets": None}, "`early_stopping_patience`"),
        (STOPS | {"save_steps": 3, "eval_steps": 2}, "`early_stopping_patience`"),
        (STOPS | {"num_epochs": 2, "saves_per_epoch": 1, "evals_per_epoch": 5}, "`early_stopping_"),
        (STOPS | {"save_steps": 4, "eval_steps": 2}, None),
    ],
)
def test_what_axolotl_refuses_itself_is_left_to_it(world, monkeypatch, more, key):
    """In a sentence that names the key, before the weights are loaded."""
    monkeypatch.chdir(world)
    cfg = config(**more)
    assert config_faults(cfg) == []
    said = axolotl_faults(cfg)
    assert len(said) == bool(key) and all(key in one for one in said), said


#: Answered within five seconds: no heavy library loads for them.
QUICK = [
    "eval nowhere",
    "eval empty",
    "eval model --data nowhere",
    "eval model --data asked",
    "audit nowhere.jsonl --model model",
    "audit forget.jsonl --model nowhere",
    "check nowhere.yml",
    "request new nowhere.yml --person Bo --out request",
    "request run nowhere",
    "report nowhere",
    "init --base-model model --forget no.jsonl --retain no.jsonl",
]


def test_a_mistake_is_answered_before_heavy_libraries_load(world):
    script = (
        "import sys; from click.testing import CliRunner; from axolotl_unlearn.cli import unlearn\n"
        f"for line in {QUICK}:\n"
        "    assert CliRunner().invoke(unlearn, line.split()).exit_code == 2, line\n"
        "    heavy = {'torch', 'transformers', 'axolotl', 'datasets'} & sys.modules.keys()\n"
        "    assert not heavy, (line, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=world, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("side", ["forget", "memorise"])
def test_rows_are_shown_as_the_model_will_read_them(world, monkeypatch, side):
    """Those of a memorisation, too; what has labels stands behind `>`."""
    monkeypatch.chdir(world)
    cfg = config()
    if side == "memorise":
        entry = {"path": "forget.jsonl", "type": "axolotl_unlearn.data.memorise"}
        cfg = config(
            datasets=[entry], **{"unlearn": {"data": {"labels": {"completion": "answer"}}}}
        )
    Path("my.yml").write_text(yaml.safe_dump(cfg))
    done = CliRunner().invoke(unlearn, ["check", "my.yml", "--show", "2"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert sum(line.startswith(f"  {side} row ") for line in lines) == 2
    shown = [line[4:] for line in lines if line.startswith("    ")]
    assert any(line.startswith("> ") and "answer 1" in line for line in shown)
    assert any(line.startswith("| ") and "question 1" in line for line in shown) == (
        side == "memorise"
    )


def test_rows_that_are_too_long_are_found_by_their_tokens(world, monkeypatch):
    """Raw rows do not show it."""
    monkeypatch.chdir(world)
    Path("my.yml").write_text(yaml.safe_dump(config(sequence_len=4)))
    plain, full = (
        CliRunner().invoke(unlearn, ["check", "my.yml", *more]) for more in ([], ["--full"])
    )
    assert plain.exit_code == 0 and full.exit_code == 2, full.output
    assert "rows do not fit into 4 tokens" in " ".join(full.output.split())


@pytest.mark.parametrize("given", [{"sequence_len": None}, {"warmup_ratio": "1e-1"}])
def test_what_axolotl_reads_is_no_fault(world, monkeypatch, given):
    """It has a default for a length that is not given, which `check --full` asked for; and `1e-1`
    is a text in YAML, which ended there in a traceback."""
    monkeypatch.chdir(world)
    Path("my.yml").write_text(yaml.safe_dump(config(**given)))
    done = CliRunner().invoke(unlearn, ["check", "my.yml", "--full"])
    assert done.exit_code == 0, done.output


def test_init_leaves_no_config_after_a_fault(world, monkeypatch):
    """With it the next try ended in "exists; name another file"."""
    monkeypatch.chdir(world)
    shutil.copytree("model", "broken")
    Path("broken/tokenizer.json").write_text("{")
    line = "init --base-model broken --forget forget.jsonl --retain retain.jsonl --out broken.yml"
    done = CliRunner().invoke(unlearn, line.split())
    assert done.exit_code == 2 and "the tokenizer of broken" in done.output, done.output
    assert not Path("broken.yml").exists()


def test_the_version_is_said():
    assert __version__ in CliRunner().invoke(unlearn, ["--version"]).output


def commands(group, words=()):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield (*words, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*words, name))


@pytest.mark.parametrize("words", [(), *commands(unlearn)], ids=" ".join)
def test_help_fits_into_80_columns(words):
    said = CliRunner().invoke(unlearn, [*words, "--help"], terminal_width=80).output
    assert max(map(len, said.splitlines())) <= 80, max(said.splitlines(), key=len)


def test_check_fits_into_80_columns(world, monkeypatch):
    monkeypatch.chdir(world)
    for cfg in (config(), config(**{"unlearn.forget": {"objectiv": "npo"}, "learning_rat": 1})):
        Path("my.yml").write_text(yaml.safe_dump(cfg))
        said = (
            CliRunner()
            .invoke(unlearn, ["check", "my.yml", "--show", "1"], terminal_width=80)
            .output
        )
        assert max(map(len, said.splitlines())) <= 80, said


def test_a_release_that_has_its_names_elsewhere_refuses_none(monkeypatch):
    """Every optimizer would be refused where the class of their names has moved."""
    for place in ("transformers/training_args.py Moved", "transformers/moved.py OptimizerNames"):
        monkeypatch.setitem(axolotl_options._NAMES, "optimizer", (place,))
        assert list(axolotl_options.name_faults({"optimizer": "adamw_torch"})) == []


def test_numbers_that_are_written_as_text_count_steps():
    """5 rows a pass in steps of 2, twice; `check --full` reads the config as it stands."""
    block = parse_unlearn({"forget": {"objective": "ga"}})
    asked = {"num_epochs": "2", "micro_batch_size": "2"}
    found = {"steps": 6, "steps_of_an_epoch": 3, "forget_rows_never_read": 0}
    assert steps(asked, block, 5) == found
    assert steps(asked | {"max_steps": "1"}, block, 5)["forget_rows_never_read"] == 3
