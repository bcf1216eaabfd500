"""Commands of Python as forks of the test's process, which has imported the libraries already.

The start of `axolotl train`, `lm_eval` or `mergekit-yaml` is ten seconds of imports, and a job of
the package starts a dozen. `Fork` is `subprocess.Popen` for all that the standard library and the
package do with it (pipes, groups, signals, exit codes, environment), but a console script or a
``python -m`` begins where this process is. Other commands are started as ever, and
test_stock_commands, test_jobs_runner and others start them for real.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import NoReturn

from research.harness import IMPORTED, become, python_words


class Fork(subprocess.Popen):
    """A process that begins with what this one has imported."""

    def _execute_child(self, *values):
        given = inspect.signature(super()._execute_child).bind(*values).arguments
        args, env = given["args"], given["env"]
        words = None
        if not given["shell"] and not isinstance(args, (str, bytes)):
            words = python_words(args, (os.environ if env is None else env).get("PATH"))
        if words is None:
            return super()._execute_child(*values)
        for name in IMPORTED:
            importlib.import_module(name)
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            stream.flush()
        gc.freeze()  # Axolotl collects five times a run
        self.pid = os.fork()
        if not self.pid:
            run(words, given)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))


def execvpe(file: str, args: list[str], env: Mapping[str, str]) -> NoReturn:
    """`os.execvpe`: `axolotl train --launcher` becomes torchrun by it."""
    if words := python_words(args, env.get("PATH")):
        become(words)
    os.execve(shutil.which(file, path=env.get("PATH")) or file, args, env)


def run(words: list[str], given: dict) -> NoReturn:
    """What the child does: streams, group and environment as asked for, then the command."""
    try:
        if given["start_new_session"]:
            os.setsid()
        elif given["process_group"] >= 0:
            os.setpgid(0, given["process_group"])
        streams = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        kept = {target: os.dup(end) for target, end in streams.items() if end != -1}
        for target, end in kept.items():
            os.dup2(end, target)
        low = 3
        for kept_open in sorted(given["pass_fds"]):
            os.closerange(low, kept_open)
            low = kept_open + 1
        os.closerange(low, 4096)
        for one in (ref() for ref in logging._handlerList):
            if type(one) is logging.StreamHandler:  # of pytest's files, which are closed by now
                one.setStream(open(1, "w", buffering=1, errors="replace", closefd=False))
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update(given["env"])
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        if given["preexec_fn"] is not None:
            given["preexec_fn"]()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    become(words)
