"""Commands of Python as forks of a process that has imported the libraries already.

The start of `axolotl train` or `lm_eval` is some ten seconds of imports, and a job has dozens of
commands. Its fork server imports them once; a command then begins where that process is. It is a
process of one thread with the job's environment, which computes nothing itself.

`python -m research.harness.forkserver` reads requests, a JSON line each (``words``, ``log``,
``environment``), and answers with lines ``{"pid"}`` when a command has started and ``{"pid",
"code"}`` when it has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from axolotl_unlearn.requests.steps import end_with_parent

#: What commands import.
IMPORTED = (
    "axolotl.cli.main",
    "axolotl.cli.merge_lora",
    "axolotl.cli.train",
    "axolotl.core.builders",
    "mergekit.scripts.run_yaml",
    "transformers.trainer",
)
#: Seconds between two looks at what has ended.
POLL_SECONDS = 0.05


def possible(environment: Mapping[str, str]) -> bool:
    """Whether commands may be forks: on Linux, and no GPU, which a fork could not use."""
    no_gpu = environment.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists()
    return sys.platform == "linux" and no_gpu


def python_words(args: Sequence[str | Path], path: str | None = None) -> list[str] | None:
    """``["-m", module, ...]`` or ``[script, ...]`` of a command of Python; None of others.

    Args:
        path: Where commands are looked up; default ``PATH``.
    """
    first, *rest = map(str, args)
    if first == sys.executable:
        rest = rest[1:] if rest[:1] == ["-u"] else rest  # torchrun's: unbuffered
        script = bool(rest) and rest[0].endswith(".py")
        return rest if script or rest[:1] == ["-m"] else None
    found = shutil.which(first, path=path)
    if found is None or not Path(found).parent.samefile(Path(sys.executable).parent):
        return None
    with open(found, "rb") as file:
        head = file.readline()
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


def start_fork(request: Mapping[str, Any], answers: int) -> int:
    """A command in a process group of its own, without the server's end of the answers."""
    pid = os.fork()
    if pid:
        with suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        return pid
    end_with_parent()
    os.setpgid(0, 0)
    os.close(answers)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for end, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(end, target)
    os.environ.update(request["environment"])
    if threads := request["environment"].get("OMP_NUM_THREADS"):
        import torch  # has read the variable when it was imported

        torch.set_num_threads(int(threads))
    become(request["words"])


def serve() -> None:
    """Answer requests until standard input ends, then end what still runs."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # Axolotl collects five times a run
    end_with_parent(0)  # from here the end of the input says it, and whole groups are ended
    running, rest = set(), b""
    while True:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                for pid in running:  # started at the last moment: the parent does not know of it
                    with suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = start_fork(json.loads(line), answers.fileno())
                running.add(pid)
                answers.write(json.dumps({"pid": pid}) + "\n")
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                answers.write(json.dumps({"pid": pid, "code": code}) + "\n")


class Fork:
    """A command of a `ForkServer`; what `subprocess.Popen` is to others."""

    def __init__(self, server: ForkServer, args: list[str]) -> None:
        self.args, self.pid, self._server = args, 0, server

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self.pid)

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        self._server.read()
        return self.returncode

    def wait(self) -> int:
        """Exit code, when it has ended."""
        while self.poll() is None:
            time.sleep(POLL_SECONDS)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """The parent's end.

    Args:
        environment: Of the server and its commands.
        keep: File descriptors that both keep open.

    Attributes:
        codes: Process -> exit code of what has ended.
    """

    def __init__(self, environment: Mapping[str, str], keep: Sequence[int] = ()) -> None:
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "research.harness.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=keep,
            process_group=0,  # Ctrl-C is the job's
            preexec_fn=end_with_parent,
        )
        self._rest = b""

    def start(self, command: list[str], log: Path, environment: Mapping[str, str]) -> Fork | None:
        """The command with its output at the end of ``log``; None if the server has ended."""
        words = {"words": python_words(command), "log": str(log.absolute())}
        number = len(self._started)
        try:
            request = json.dumps({**words, "environment": dict(environment)}) + "\n"
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except OSError:
            return None
        while len(self._started) == number:
            if not self.read(None):
                return None
        fork = Fork(self, command)
        fork.pid = self._started[number]
        return fork

    def read(self, seconds: float | None = 0.0) -> bool:
        """Take the answers that are there, or wait for some; False if the server has ended."""
        end = self._process.stdout
        if not select.select([end], [], [], seconds)[0]:
            return True
        data = os.read(end.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for answer in map(json.loads, lines):
            if "code" in answer:
                self.codes[answer["pid"]] = answer["code"]
            else:
                self._started.append(answer["pid"])
                self.codes.pop(answer["pid"], None)  # of another that had this number
        if not data:  # it was killed, and nobody knows how its commands end
            for pid in self._started:
                self.codes.setdefault(pid, -signal.SIGKILL)
        return bool(data)

    def close(self) -> None:
        """Its commands have ended."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    serve()
