"""Commands of Python as forks of the test's process, which has imported the libraries already.

The start of `axolotl train`, `lm_eval` or `mergekit-yaml` is ten seconds of imports, and a job of
the package starts a dozen. `Fork` is `subprocess.Popen` for all that the standard library and the
package do with it (pipes, groups, signals, exit codes, environment), but a console script or a
``python -m`` begins where this process is. Other commands are started as ever, and
test_stock_commands, test_jobs_runner and others start them for real.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import os
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

#: What commands import, if this process has not.
IMPORTED = (
    "axolotl.cli.main",
    "axolotl.cli.merge_lora",
    "axolotl.cli.train",
    "axolotl.core.builders",
    "mergekit.scripts.run_yaml",
    "transformers.trainer",
)


def python_words(args: list[str], path: str | None) -> list[str] | None:
    """``["-m", module, ...]`` or ``[script, ...]`` of a command of Python; None of others."""
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


def run(words: list[str], given: dict) -> NoReturn:
    """What the child does: streams, group and environment as asked for, then the command."""
    code = 1
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
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        sys.stdin = open(0, closefd=False)
        for name, target in (("stdout", 1), ("stderr", 2)):
            stream = open(target, "w", buffering=1, errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update(given["env"])
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
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
