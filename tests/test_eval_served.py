"""A served model is measured as its weights are, and what a server cannot give is not measured."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import eval_model
import httpx
import pytest
from fault_codes import fails
from test_eval_run import OPTIONS, home, results  # noqa: F401

from axolotl_unlearn.evaluation import in_vllm, run, served
from axolotl_unlearn.evaluation.measurement import Options
from axolotl_unlearn.evaluation.served import Served
from axolotl_unlearn.metrics.verdict import judged

TESTS = Path(__file__).parent


@contextmanager
def serving(*command: str, python: str = sys.executable, **more: str):
    """The address of a server, when it answers; ``PORT`` in the command is a free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(port) if word == "PORT" else word for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(TESTS)}
    process = subprocess.Popen([python, *words], env=environment | more)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{url}/models")
                break
            except httpx.TransportError:
                assert process.poll() is None
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def vllm(model: Path):
    """vLLM's server of the environment that its command is in; it has heads of 32 or more."""
    command = shutil.which("vllm") or pytest.skip("the command `vllm`")
    rows = [row for side in eval_model.made_up_rows(4).values() for row in side]
    eval_model.train_model(model, rows, steps=40, hidden=128)
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "PORT"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    python = str(Path(command).resolve().parent / "python")
    return serving(*words, python=python, VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH="")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "vllm"])
def test_a_server_with_log_probs_gives_the_numbers_of_the_weights(home, tmp_path, kind):  # noqa: F811
    """Also where it is busy at first; but for the attacks that need whole distributions."""
    model = home / "original" if kind == "ours" else tmp_path / "original"
    own = (str(TESTS / "logprob_server.py"), str(model), "PORT", "2")
    with serving(*own) if kind == "ours" else vllm(model) as url:
        models = [str(model), f"answers={url}"]
        local, found = run.evaluate(models, home / "data", Options(out_dir=tmp_path, **OPTIONS))
        same = ("cells", "task_aggregate", "mia_auc", "utility", "aggregate", "answers", "stopped")
        assert {name: found[name] for name in same} == {name: local[name] for name in same}
        for side in ("member_loss", "nonmember_loss"):
            assert found["likelihood"][side] == pytest.approx(local["likelihood"][side], abs=1e-4)
        assert found["extraction"]["strength"] == local["extraction"]["strength"]
        assert found["extraction"]["tokens"] == local["extraction"]["tokens"]
        assert set(found["likelihood"]["attacks"]) == {"min_k_20", "zlib"}
        assert "learned" not in found and found["collapse"]["collapsed"] is False
        judgement = judged(json.loads((tmp_path / "results.json").read_text()))["answers"]
        assert not judgement.good
    # What it said is known now; but what answers there is asked, and nobody does.
    with fails("served.no-answer"):
        monkey = pytest.MonkeyPatch()
        monkey.setattr(served, "TRIES", 1)
        try:
            run.evaluate(models, home / "data", Options(out_dir=tmp_path, **OPTIONS))
        finally:
            monkey.undo()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers serve", "llama.cpp"])
def test_a_server_without_log_probs_is_measured_by_what_it_says(home, results, tmp_path, kind):  # noqa: F811
    """Generation alone; llama.cpp takes `echo` and gives the log-probs of what it says."""
    original = str(home / "original")
    if kind == "llama.cpp":
        pytest.importorskip("xllamacpp")
        command = (str(TESTS / "llamacpp_server.py"), original, "PORT")
    else:
        from transformers.utils import is_serve_available

        if not is_serve_available():
            pytest.skip("`transformers serve` needs the package openai, which Axolotl 0.19 lacks")
        given = ("--host", "127.0.0.1", "--port", "PORT", "--device", "cpu", "--dtype", "float32")
        command = ("-m", "transformers.cli.transformers", "serve", original, *given)
    with serving(*command) as url:
        url += f"#{original}" if kind != "llama.cpp" else ""
        server = Served(url)
        assert not server.scores
        (found,) = run.evaluate([url], home / "data", Options(out_dir=tmp_path, **OPTIONS))
    local = results[0]
    assert found["name"] == "served" and found["cells"] == local["cells"]
    unmeasured = ("mia_auc", "mia_score", "utility", "aggregate", "membership")
    assert not any(found.get(name) for name in unmeasured)
    assert not found["likelihood"]["member_loss"] and not found["extraction"]["strength"]
    judgement = judged(json.loads((tmp_path / "results.json").read_text()))
    assert not any(one.good for one in judgement.values())


@pytest.mark.slow
def test_lm_evals_own_model_of_a_server_gives_the_numbers_of_the_weights(home):  # noqa: F811
    """``lm_eval --model local-completions``: the whole group as by ``--model hf``."""
    pytest.importorskip("tenacity", reason="the extra `served`: lm_eval[api]")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from axolotl_unlearn.evaluation.tasks import task_folder

    path = str(home / "original")
    metadata = {"data_dir": str(home / "data"), "min_members": 1, "tokenizer": path}
    manager = TaskManager(include_path=str(task_folder()), metadata=metadata)
    shared = {"tasks": ["semeval_unlearn"], "task_manager": manager, "bootstrap_iters": 0}
    local = simple_evaluate("hf", {"pretrained": path, "device": "cpu"}, limit=4, **shared)
    with serving(str(TESTS / "logprob_server.py"), path, "PORT") as url:
        given = {"model": "tiny", "base_url": f"{url}/completions", "num_concurrent": 2}
        given |= {"tokenizer": path, "tokenizer_backend": "huggingface"}
        given["tokenized_requests"] = False
        found = simple_evaluate("local-completions", given, limit=4, **shared)
    for task, numbers in local["results"].items():
        known = {name: x for name, x in numbers.items() if isinstance(x, float)}
        own = {name: found["results"][task][name] for name in known}
        assert own == pytest.approx(known, abs=1e-4, nan_ok=True), task


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1#a"])
def test_nobody_there_is_one_sentence(url, monkeypatch):
    monkeypatch.setattr(served, "TRIES", 2)
    with fails("served.no-answer"):
        Served(url)


@pytest.mark.parametrize("asked, device, there, alone, made", [
    (None, "cuda:1", True, True, None), ("transformers", "cuda", True, True, None),
    ("auto", "cuda:1", True, True, "vllm"), ("auto", "cpu", True, True, None),
    ("auto", "cuda", False, True, None), ("auto", "cuda", True, False, None),
    ("vllm", "cpu", True, True, "vllm"), ("vllm", "cuda", False, True, "eval.no-vllm"),
    ("vllm", "cuda", True, False, "eval.vllm-alone"),
])  # fmt: skip
def test_what_generates(monkeypatch, asked, device, there, alone, made):
    monkeypatch.setattr(in_vllm, "find_spec", lambda _: object() if there else None)
    if made and "." in made:
        with fails(made):
            in_vllm.backend(asked, device, alone)
        return
    assert in_vllm.backend(asked, device, alone) == made


def test_rows_of_vllm_are_those_of_transformers(home, tmp_path, capfd):  # noqa: F811
    """In CI it is not installed: `auto` says what generates."""
    kind = "auto" if find_spec("vllm") is None else "vllm"
    models, options = [str(home / "original")], {"out_dir": tmp_path, **OPTIONS}
    (local,) = run.evaluate(models, home / "data", Options(**options))
    options |= {"backend": kind, "progress": True}
    (found,) = run.evaluate(models, home / "data", Options(**options))
    assert found["cells"] == local["cells"]
    assert kind == "vllm" or "generation by transformers" in capfd.readouterr().err
