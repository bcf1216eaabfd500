"""Ray: `use_ray: true` of Axolotl, and ``--ray`` of our commands, on two workers without GPUs."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_train_axolotl import adapter, stage, train  # noqa: F401
from test_training_processes import NPO, assert_equal, cut

from axolotl_unlearn.errors import UnlearnError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Its address. With ports of our own the node waits for no file of its agents, which takes
    longer than its patience on a busy machine; a token keeps others out."""
    if find_spec("ray") is None:  # imported, it would read its variables now
        pytest.skip("the extra `ray`")
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(5)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]) for one in free]
    names = ("port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
             "dashboard-agent-listen-port", "metrics-export-port")  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--num-cpus=2", "--num-gpus=0", "--include-dashboard=false"]
    command += [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    command += [f"--temp-dir={tmp_path_factory.mktemp('r')}"]
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    given |= {"RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as monkey:
        for name, value in given.items():
            monkey.setenv(name, value)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for line in process.stdout:
            if "block" in line:
                break
        assert process.poll() is None
        address = f"{socket.gethostbyname(socket.gethostname())}:{ports[0]}"
        monkey.setenv("RAY_ADDRESS", address)
        yield address
        import ray

        ray.shutdown()
        os.killpg(process.pid, signal.SIGKILL)  # asked to end, it waits half a minute for itself
        process.wait(60)


@pytest.mark.slow
def test_axolotl_trains_on_two_workers(stage, cluster):  # noqa: F811
    """``use_ray: true`` as Axolotl has it, but that it asks for GPUs (`ray_train.py`)."""
    one = train(stage, "one", **cut(stage, "one", 1, **NPO))
    ray = {"use_ray": True, "ray_num_workers": 2, "resources_per_worker": {"CPU": 1}}
    cfg = cut(stage, "ray", 2, **NPO, **ray)
    path = stage / "ray.yml"
    path.write_text(yaml.safe_dump(cfg))
    command = [sys.executable, str(ROOT / "tests/ray_train.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal(adapter(Path(cfg["output_dir"])), adapter(one))


@pytest.mark.parametrize(("told", "joined"), [("2", 1), (None, 2)])
def test_processes_that_would_train_apart_are_an_error(monkeypatch, told, joined):
    """Without a GPU Accelerate takes each for one alone unless it is told to use the CPU. Where
    WORLD_SIZE was not set at all the sentence ended in a KeyError."""
    from axolotl.utils.dict import DictDefault

    from axolotl_unlearn.plugin import UnlearnPlugin
    from axolotl_unlearn.training.trainer import UnlearnTrainer

    trainer = object.__new__(UnlearnTrainer)
    trainer.args = SimpleNamespace(world_size=joined)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if told:
        monkeypatch.setenv("WORLD_SIZE", told)
    cfg = DictDefault(unlearn={"forget": [{"objective": "npo"}]})
    says = f"{told or 1} processes were started, but {joined} train together"
    with pytest.raises(UnlearnError, match=says):
        UnlearnPlugin().post_trainer_create(cfg, trainer)
