"""The steps of `make demo`: forks of one process that has imported the libraries.

    python -m research.harness make -j3 out/eval/report.html   serve the steps of this command
    python -m research.harness step NAME COMMAND ...           be a step, with its output in out/logs/NAME.log

The imports of `axolotl train` take ten seconds, and the demo has a dozen of such commands. A step asks
over the socket that ``STEP_FORKS`` names; without one it starts its command as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SOCKET = "STEP_FORKS"
IMPORTED = (
    *("axolotl.cli.main", "axolotl.cli.merge_lora", "axolotl.cli.train", "axolotl.core.builders"),
    *("mergekit.scripts.run_yaml", "transformers.trainer"),
)
_STEPS = re.compile(rb"\b(\d+)/(\d+) \[")
_PR_SET_PDEATHSIG = 1


def python_words(args: Sequence[str | Path], path: str | None = None) -> list[str] | None:
    """``["-m", module, ...]`` or ``[script, ...]`` of a command of Python; None of others."""
    first, *rest = map(str, args)
    if first == sys.executable:
        rest = rest[1:] if rest[:1] == ["-u"] else rest  # torchrun's: unbuffered
        return rest if rest[:1] == ["-m"] or (rest and rest[0].endswith(".py")) else None
    found = shutil.which(first, path=path)
    if found is None or not Path(found).parent.samefile(Path(sys.executable).parent):
        return None
    head = Path(found).read_bytes().partition(b"\n")[0]
    return [found, *rest] if head.startswith(b"#!") and b"python" in head else None


def become(words: Sequence[str]) -> NoReturn:
    """Run a command in this process, whose streams and environment are set, and leave."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        sys.stdin = open(0, closefd=False)
        for name, target in (("stdout", 1), ("stderr", 2)):
            stream = open(target, "w", buffering=1, errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)
        sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


class Asked:
    """A command as a fork of the process that listens; what `subprocess.Popen` is to others."""

    def __init__(self, words: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self._end = socket.socket(socket.AF_UNIX)
        self._end.connect(environment[SOCKET])
        asked = {"words": words, "log": str(log.absolute()), "environment": dict(environment)}
        self._end.sendall(json.dumps(asked).encode() + b"\n")

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; `subprocess.TimeoutExpired` as Popen's."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("step", timeout)
            # nothing: the process that listens was killed
            self.returncode = int(self._end.recv(16) or -signal.SIGKILL)
        return self.returncode


def _start(asked: Mapping, ends: Sequence[socket.socket]) -> int:
    """The process of a command, in a group of its own; it ends with this one."""
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, 0)
    for end in ends:  # a fork that held them would keep a step waiting
        end.close()
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for end, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(end, target)
    os.environ.update(asked["environment"])
    if threads := asked["environment"].get("OMP_NUM_THREADS"):
        import torch  # has read the variable when it was imported

        torch.set_num_threads(int(threads))
    become(asked["words"])


def serve(words: list[str]) -> int:
    """The exit code of a command; its steps end with it."""
    if sys.platform != "linux" or os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return subprocess.call(words, close_fds=False)  # a fork could not use a GPU
    running: dict[int, socket.socket] = {}
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path := os.environ.get(SOCKET) or f"{folder}/forks")
        listener.listen()
        environment = os.environ | {SOCKET: path}
        process = subprocess.Popen(words, env=environment, close_fds=False)  # make's job server
        try:
            while process.poll() is None:
                if select.select([listener], [], [], 0.05)[0]:
                    client = listener.accept()[0]
                    asked = json.loads(client.makefile().readline())
                    for name in IMPORTED:  # once
                        importlib.import_module(name)
                    gc.freeze()  # Axolotl collects five times a run
                    running[_start(asked, (listener, client, *running.values()))] = client
                for pid in list(running):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        with running.pop(pid) as client:
                            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except KeyboardInterrupt:
            pass
        finally:
            for pid in running:
                with suppress(OSError):
                    os.killpg(pid, signal.SIGTERM)
        return process.wait()


def step(name: str, command: list[str], folder: Path = Path("out/logs")) -> int:
    """The exit code of a command; a line every ten seconds says how far it is."""

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {name}: {line}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    began = time.monotonic()
    say(f"started, log {log}")
    with log.open("wb") as file:
        words = python_words(command) if SOCKET in os.environ else None
        process = (
            Asked(words, log, os.environ)
            if words
            else subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        )
        while True:
            try:
                code = process.wait(10)
                break
            except subprocess.TimeoutExpired:
                steps = [(int(n), int(of)) for n, of in _STEPS.findall(log.read_bytes()[-4096:])]
                done = f", {steps[-1][0]} of {steps[-1][1]} steps" if steps else ""
                say(f"{time.monotonic() - began:.0f} s so far{done}")
            except KeyboardInterrupt:  # the command has it too
                return process.wait() or 130
    if code:
        say(f"`{' '.join(command)}` ended with exit code {code}; {log} ends with:")
        print("\n".join(log.read_text("utf-8", "replace").splitlines()[-15:]), flush=True)
    else:
        say(f"done ({time.monotonic() - began:.0f} s)")
    return code


if __name__ == "__main__":
    code = step(*sys.argv[2:3], sys.argv[3:]) if sys.argv[1] == "step" else serve(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code & 0xFF)  # at a usual exit some versions of triton print what they leak
