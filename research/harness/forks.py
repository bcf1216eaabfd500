"""A `make` whose steps begin with what this process has imported, which takes ten seconds each.

    python -m research.harness.forks make -j3 out/eval/report.html

A step (`research.harness.step`) asks over the socket that ``STEP_FORKS`` names.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from research.harness.forkserver import IMPORTED, POLL_SECONDS, possible, start_fork

SOCKET = "STEP_FORKS"


class Asked:
    """A command as a fork of the process that listens; what `subprocess.Popen` is to others."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.returncode: int | None = None
        self._end = socket.socket(socket.AF_UNIX)
        self._end.connect(os.environ[SOCKET])
        request = {"words": words, "log": str(log.absolute()), "environment": dict(os.environ)}
        self._end.sendall(json.dumps(request).encode() + b"\n")
        self._end.setblocking(False)

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        if self.returncode is None:
            with suppress(BlockingIOError):  # nothing: the process that listens was killed
                self.returncode = int(self._end.recv(16) or -signal.SIGKILL)
        return self.returncode

    def wait(self) -> int:
        """Exit code, when it has ended."""
        while self.poll() is None:
            time.sleep(POLL_SECONDS)
        return self.returncode


def _import() -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for name in IMPORTED:
            importlib.import_module(name)
    gc.freeze()  # Axolotl collects five times a run


def main(words: list[str]) -> int:
    """The exit code of the command; its steps end with it."""
    if not possible(os.environ):
        return subprocess.call(words, close_fds=False)
    running: dict[int, socket.socket] = {}
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/forks")
        listener.listen()
        environment = os.environ | {SOCKET: f"{folder}/forks"}
        process = subprocess.Popen(words, env=environment, close_fds=False)  # make's job server
        try:
            while process.poll() is None:
                if select.select([listener], [], [], POLL_SECONDS)[0]:
                    client = listener.accept()[0]
                    request = json.loads(client.makefile().readline())
                    _import()  # once
                    running[start_fork(request, listener.fileno())] = client
                for pid, client in list(running.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        with running.pop(pid):
                            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except KeyboardInterrupt:
            pass
        finally:
            for pid in running:
                with suppress(OSError):
                    os.killpg(pid, signal.SIGTERM)
        return process.wait()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # at a usual exit some versions of triton print what they leak
