"""Any number of processes gives one update: ``axolotl train`` on 1, 2 and 4 of them (gloo)."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import zlib
from contextlib import suppress
from pathlib import Path

import pretend_device
import pytest
import ranks
import yaml
from safetensors.torch import load_file
from test_train_axolotl import config, stage  # noqa: F401
from test_training_level import example, life  # noqa: F401
from torch.testing import assert_close

ROOT = Path(__file__).parents[1]
RANK, SHARDED, ZERO, ON_DEVICE = (
    Path(__file__).parent / f"{name}.py"
    for name in ("rank", "rank_sharded", "rank_zero", "rank_device")
)
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 4, "lora_target_linear": True}
FULL = {"adapter": "DELETE"}


def free_port() -> int:
    """None that the system hands out: others' connections could take it before rank 0 listens."""
    for port in random.sample(range(10000, 32000), 100):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def train_on(processes: int, cfg: dict, script: Path = RANK) -> dict:
    """Trained weights of ``axolotl train`` on so many processes."""
    out = Path(cfg["output_dir"])
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump({k: v for k, v in cfg.items() if v != "DELETE"}))
    port = str(free_port())
    started = []
    for rank in range(processes):
        log = out.with_suffix(f".{rank}.log")
        log.write_text("")
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes}
        started.append(ranks.start(script, [str(path)], log, RANK=rank, LOCAL_RANK=rank, **where))
    codes = ended(started)
    said = "\n".join(p.read_text()[-3000:] for p in sorted(out.parent.glob(f"{out.name}.*.log")))
    assert codes == [0] * processes, said
    return load_file(next(out.glob("*model.safetensors")))


def ended(started: list, within: float = 600) -> list[int | str]:
    """Exit codes; of a process that waits for one that failed, or for ever: waits."""
    until = time.monotonic() + within
    waiting = list(started)
    while waiting and time.monotonic() < until:
        for one in tuple(waiting):
            one.join(0.1)
            if one.exitcode is not None:
                waiting.remove(one)
                if one.exitcode:  # the others wait for it
                    until = min(until, time.monotonic() + 10)
    for one in waiting:
        one.kill()
    return ["waits" if one in waiting else one.exitcode for one in started]


def objectives(*forget: dict, retain: tuple = ({"objective": "nll"},)) -> dict:
    return {"unlearn": {"forget": list(forget), "retain": list(retain)}}


NPO = objectives(
    {"objective": "npo"}, retain=({"objective": "nll", "weight": 0.4}, {"objective": "kl"})
)
RMU = objectives(
    {"objective": "rmu", "layer": 1}, retain=({"objective": "hidden_mse", "layer": 1},)
)

SURGERY = {"extensions": {"extension": "research.methods.surgery:Surgery", "method": "pcgrad"}}


def cut(stage, name, processes, **changes):  # noqa: F811
    """Four pairs a step, whoever reads them."""
    base = {"optimizer": "sgd", "learning_rate": 0.1, "max_steps": 5, "seed": 7}
    each = {"micro_batch_size": 4 // processes, "gradient_accumulation_steps": 1}
    return config(stage, f"{name}-{processes}", **base | each | changes)


def alone(stage, **changes) -> dict:  # noqa: F811
    """Trained weights of one process, which several tests compare with."""
    key = f"alone-{zlib.crc32(json.dumps(changes, sort_keys=True).encode())}"
    made = [*(stage / f"{key}-1").glob("*model.safetensors")]
    return load_file(made[0]) if made else train_on(1, cut(stage, key, 1, **changes))


def test_one_that_fails_ends_the_wait(tmp_path):
    """CI once waited for 15 minutes, and no log was shown."""
    codes = ("raise SystemExit(3)", "import time; time.sleep(600)")
    started = []
    for number, code in enumerate(codes):
        (script := tmp_path / f"{number}.py").write_text(code)
        started.append(ranks.start(script, [], tmp_path / f"{number}.log"))
    assert ended(started) == [3, "waits"]


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert_close(one[name], other[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes, most",
    [
        ("npo", NPO, 4),
        ("npo-full", NPO | FULL | {"unlearn": NPO["unlearn"] | {"reference": "cached"}}, 2),
        ("npo-full-copy", NPO | FULL, 2),
        ("rmu", RMU, 2),
        ("rmu-full", RMU | FULL, 2),
        ("rmu-kl", {"unlearn": RMU["unlearn"] | {"retain": {"objective": "kl"}}}, 2),
        ("pcgrad", {"unlearn": NPO["unlearn"] | SURGERY}, 2),
    ],
)
def test_the_update_of_one_process(stage, name, changes, most):  # noqa: F811
    one = alone(stage, **changes)
    start = load_file(stage / "base/model.safetensors")
    moved = [(w - start[n]).abs().max() for n, w in one.items() if n in start] or [
        w.abs().max() for n, w in one.items() if "lora_B" in n
    ]
    assert max(moved) > 1e-3
    for processes in range(2, most + 1, 2):
        together = train_on(processes, cut(stage, name, processes, **changes))
        assert_equal(together, one)


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", [
    ("npo", NPO), ("npo-full", NPO | FULL | {"unlearn": NPO["unlearn"] | {"reference": "cached"}}),
    ("rmu", RMU),
])  # fmt: skip
def test_two_processes_each_on_an_accelerator(stage, name, changes):  # noqa: F811
    """DDP on two pretended devices gives the update of one process of a CPU."""
    if why := pretend_device.unavailable():
        pytest.skip(why)
    together = train_on(2, cut(stage, f"{name}-two", 2, **changes), ON_DEVICE)
    assert_equal(together, alone(stage, **changes))


def part_of(stage, rows: int, processes: int) -> dict:  # noqa: F811
    """Two passes over so many forget rows, six pairs a step, evaluated after each step."""
    path = stage / f"forget-{rows}.jsonl"
    path.write_text("".join((stage / "forget.jsonl").read_text().splitlines(True)[:rows]))
    micro, accumulated = {1: (2, 3), 2: (3, 1), 3: (1, 2)}[processes]
    cfg = cut(stage, f"rest-{rows}", processes, **NPO) | {"max_steps": "DELETE", "num_epochs": 2}
    cfg |= {"micro_batch_size": micro, "gradient_accumulation_steps": accumulated}
    cfg["datasets"] = [{**cfg["datasets"][0], "path": str(path)}, cfg["datasets"][1]]
    often = {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "eval_batch_size": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return cfg | {"test_datasets": cfg["datasets"], **often, **best}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 10])
def test_rows_that_do_not_fill_a_step_weigh_as_in_one_process(stage, rows):  # noqa: F811
    """The same weights, evaluations and best checkpoint, with accumulation. One row is left for the
    last step, so processes have none and a micro-batch is missing; or four, which fill one round of
    three processes and a part of the next. Rows were repeated to fill the last batches (weights
    7e-3 apart)."""
    found = []
    for processes in (1, 2, 3):
        cfg = part_of(stage, rows, processes)
        weights = train_on(processes, cfg)
        newest = max(Path(cfg["output_dir"]).glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
        state = json.loads((newest / "trainer_state.json").read_text())
        losses = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
        found.append((weights, losses, Path(state["best_model_checkpoint"]).name))
    for weights, losses, best in found[1:]:
        assert_equal(weights, found[0][0])
        assert losses == pytest.approx(found[0][1], abs=1e-5)
        assert len(losses) == 1 + 2 * -(-rows // 6)
        assert best == found[0][2]


@pytest.mark.slow
def test_what_several_processes_do_otherwise_is_said(stage):  # noqa: F811
    mean = objectives({"objective": "npo", "reduction": "batch_token_mean"}) | {"max_steps": 1}
    cfg = cut(stage, "otherwise", 2, **mean | {"lora_dropout": 0.5})
    train_on(2, cfg)
    said = Path(cfg["output_dir"]).with_suffix(".0.log").read_text()
    for what, of in (
        ("`reduction: batch_token_mean` is a mean over", "micro-batches"),
        ("`lora_dropout` draws in each", "processes"),
    ):
        assert re.search(rf"{what}[^.]*: the update on \d\s+{of} is not that of one", said), said


FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "OlmoDecoderLayer",
        "reshard_after_forward": True,
        "state_dict_type": "FULL_STATE_DICT",
    },
}


def zero(level: int) -> dict:
    return {
        "deepspeed": {
            "zero_optimization": {
                "stage": level,
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    }


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["auto", {"model": "base"}])
def test_full_fine_tuning_in_parts(stage, reference):  # noqa: F811
    """FSDP2: the starting model is asked before the first step; or is a teacher, which is whole."""
    whole = alone(stage, **NPO, **FULL)
    if reference != "auto":
        reference = {"model": str(stage / "base")}
    name = "npo-sharded-auto" if reference == "auto" else "npo-sharded-teacher"
    changes = {"unlearn": NPO["unlearn"] | {"reference": reference}, **FSDP2, **FULL}
    assert_equal(train_on(2, cut(stage, name, 2, **changes), SHARDED), whole)
    assert (stage / f"{name}-2/reference/start-0.safetensors").exists() == (reference == "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    "level, trained",
    [(2, FULL), (3, FULL), (2, LORA), (3, LORA)],
    ids=["2-full", "3-full", "2-lora", "3-lora"],
)
def test_zero_gives_the_update_of_one_process(stage, level, trained):  # noqa: F811
    """Where DeepSpeed is installed; what Axolotl saves under it is whole."""
    pytest.importorskip("deepspeed")
    kind = "lora" if trained is LORA else "full"
    cfg = cut(stage, f"zero-{level}-{kind}", 2, **NPO, **trained, **zero(level))
    assert_equal(train_on(2, cfg, ZERO), alone(stage, **NPO, **trained))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp2", "zero 3"])
def test_full_fine_tuning_in_parts_goes_on(stage, way):  # noqa: F811
    """From a checkpoint of step 3, as after a kill, to the weights of a run in one go."""
    if way == "zero 3":
        pytest.importorskip("deepspeed")
    script, how = (SHARDED, FSDP2) if way == "fsdp2" else (ZERO, zero(3))
    saved = {"save_strategy": "steps", "save_steps": 3, "optimizer": "adamw_torch"}
    cfg = cut(stage, f"go-on-{way[0]}", 2, **NPO, **FULL, **how) | saved
    whole = train_on(2, cfg, script)
    out = Path(cfg["output_dir"])
    (out / "model.safetensors").unlink()
    cfg["resume_from_checkpoint"] = str(out / "checkpoint-3")
    assert_equal(train_on(2, cfg, script), whole)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [{}, LORA], ids=["full", "lora"])
def test_match_with_looks(life, trained):  # noqa: F811
    """Looks at steps 0, 2, 4 and 5: level, stopping and the kept state are those of one process,
    also with what is compared with held-out rows."""
    found, runs = [], [(1, RANK), (2, RANK)]
    if trained and not pretend_device.unavailable():
        runs.append((2, ON_DEVICE))
    for processes, script in runs:
        name = f"match-{len(trained)}-{processes}-{script.stem}"
        cfg = example(life, name, every=2)
        assert any(e["objective"].endswith("_matching") for e in cfg["unlearn"]["forget"])
        cfg |= trained | {"max_steps": 5, "micro_batch_size": 4 // processes}
        cfg |= {"optimizer": "sgd", "learning_rate": 0.05, "warmup_ratio": 0}
        found.append(train_on(processes, cfg, script))
    for other in found[1:]:
        assert_equal(found[0], other)
