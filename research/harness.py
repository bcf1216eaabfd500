"""Commands of Python as forks of a process that has imported their libraries (ten seconds each)."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

IMPORTED = (
    *("axolotl.cli.main", "axolotl.cli.merge_lora", "axolotl.cli.train", "axolotl.core.builders"),
    *("mergekit.scripts.run_yaml", "transformers.trainer"),
)


def import_libraries(*more: str, always: Iterable[str] = IMPORTED) -> None:
    """What commands import, without a look at the GPU: no fork could use it afterwards."""
    import torch

    with ExitStack() as stack:
        for where, look in (torch._C, "_cuda_getDeviceCount"), (torch.cuda, "_device_count_nvml"):
            if hasattr(where, look):  # a build for CPUs has not the first
                stack.enter_context(patch.object(where, look, lambda: 0))
        for name in (*always, *more):
            importlib.import_module(name)
    for one in gc.get_objects():  # "is there a GPU?"; dynamo holds what it has registered
        if isinstance(one, functools._lru_cache_wrapper) and "_dynamo" not in str(one.__module__):
            one.cache_clear()
    gc.freeze()  # Axolotl collects five times a run


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
        torch = sys.modules.get("torch")
        if torch and (threads := os.environ.get("OMP_NUM_THREADS")):
            torch.set_num_threads(int(threads))  # it has read the variable when it was imported
        # The process before has looked at the GPU; or for one, which counts the same
        if torch and torch.cuda._is_in_bad_fork() and torch.cuda.device_count():
            os.execv(sys.executable, [sys.executable, *map(str, words)])
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
