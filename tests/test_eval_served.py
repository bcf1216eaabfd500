"""Servers of a model, and what generates."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from fault_codes import fails
from test_eval_run import OPTIONS, home  # noqa: F401

from axolotl_unlearn.evaluation import in_vllm, run, served
from axolotl_unlearn.evaluation.measurement import Options
from axolotl_unlearn.evaluation.served import Served

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


@contextmanager
def answering(reply):
    """The address of a server, and how many of its requests were open at once, each time one came.

    Args:
        reply: Status and answer to what is asked, {} of a GET, and its key.
    """
    now, open_at_once = [], []

    class Server(BaseHTTPRequestHandler):
        def answer(self) -> None:
            now.append(1)
            open_at_once.append(len(now))
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            time.sleep(0.02)
            now.pop()
            status, said = reply(asked, self.headers.get("Authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: object) -> None: ...

        do_GET = do_POST = answer  # noqa: N815 (the names of http.server)

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", open_at_once
        server.shutdown()


def vllm(model: Path):
    """vLLM's server of the environment that its command is in; it has heads of 32 or more."""
    command = shutil.which("vllm") or pytest.skip("the command `vllm`")
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "PORT"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    python = str(Path(command).resolve().parent / "python")
    return serving(*words, python=python, VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH="")


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


def test_what_the_page_says_of_a_server(monkeypatch):
    """The key as a bearer token; several models; a busy one is asked five times; how many at once;
    how long it is waited for."""
    keys, statuses = [], []

    def two(_, key):
        keys.append(key)
        said = {"data": [{"id": "a"}, {"id": "b"}], "choices": [{"text": "x"}]}
        return statuses.pop() if statuses else 200, said

    monkeypatch.setattr(served.random, "uniform", lambda *_: 0.0)  # waits between tries
    for name, value in ((served.KEY, "secret"), (served.AT_ONCE, "1"), (served.SECONDS, "7")):
        monkeypatch.setenv(name, value)
    assert (served.KEY, served.AT_ONCE, served.SECONDS) == (
        "OPENAI_API_KEY", "UNLEARN_SERVED_CONCURRENCY", "UNLEARN_SERVED_TIMEOUT",
    )  # fmt: skip
    with answering(two) as (url, most):
        with fails("served.several-models"):
            Served(url)
        with fails("served.several-models"):
            Served(f"{url}#c")  # whatever the server does with a name that it does not list
        statuses += [503] * 4  # while it starts: the first question was asked twice
        asked = Served(f"{url}#b")
        assert asked.client.timeout.read == 7 and not asked.scores
        statuses += [503] * 4
        made = []
        asked.generate(["q"] * 6, 1, lambda _, texts: made.extend(texts))
        assert made == ["x"] * 6 and not statuses
        statuses += [503] * 5
        with fails("served.no-answer"):
            asked.generate(["q"], 1, lambda *_: None)
        assert not statuses
    assert {*keys} == {"Bearer secret"} and max(most) == 1


def test_an_answer_without_end_ends_and_a_password_is_nobodys(monkeypatch):
    """It filled the memory, or one byte a minute was waited for for ever; each sentence of a
    server told the password of its address, also in the log of a CI."""
    ends, client = iter([50, 10**9, 10**9, 50]), httpx.Client

    def answer(request):
        if number := next(ends, 0):  # blanks before a value are JSON
            return httpx.Response(200, content=(time.sleep(0.01) or b" " for _ in range(number)))
        return httpx.Response(404)

    monkeypatch.setattr(httpx, "Client", lambda **how: client(
        transport=httpx.MockTransport(answer), **how
    ))  # fmt: skip
    monkeypatch.setattr(served.random, "uniform", lambda *_: 0.0)  # waits between tries
    monkeypatch.setattr(served, "LARGEST", 100)
    for seconds in ("60", "0.1"):
        monkeypatch.setenv(served.SECONDS, seconds)
        with fails("served.no-answer") as caught:
            Served("http://me:secret@host/v1")
        assert "http://host/v1/models" in str(caught.value)
    assert next(ends, None) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1#a"])
def test_nobody_there_is_one_sentence(url, monkeypatch, tmp_path):
    monkeypatch.setattr(served, "TRIES", 2)
    monkeypatch.setattr(served.random, "uniform", lambda *_: 0.0)  # waits between tries
    with fails("served.no-answer"):
        Served(url)
    with fails("models.server"):
        run.evaluate([url], options=Options(out_dir=tmp_path))


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
