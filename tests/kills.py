"""SIGKILL at a moment that is drawn, in a fork of the test's process.

Moments are calls of Python, those of functions in C (write, fsync, rename) among them, and not
seconds: a busy machine would always be killed while it begins.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def forked(work: Callable[[], Any]) -> int:
    """Does it in a fork; the exit code: what it returns, or 1 after an error."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        code = int(work() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _fork(work: Callable[[], Any], at: float, seen: Path) -> int:
    calls = 0

    def event(frame: Any, what: str, value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    def profiled() -> None:
        sys.setprofile(event)
        try:
            work()
        finally:
            sys.setprofile(None)
        seen.write_text(str(calls))

    return forked(profiled)


def moments(work: Callable[[], Any], folder: Path) -> int:
    """Runs ``work`` to its end; how many moments there are to kill it."""
    seen = folder / "moments"
    assert _fork(work, float("inf"), seen) == 0
    return int(seen.read_text())


def kill_at(work: Callable[[], Any], at: int, folder: Path) -> bool:
    """Runs ``work`` and kills it there; False where it came to its end before."""
    code = _fork(work, at, folder / "moments")
    assert code in (0, -signal.SIGKILL), code
    return bool(code)


def files(folder: Path, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Everything below a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }


def same(whole: dict[str, bytes], again: dict[str, bytes]) -> bool:
    """Bit for bit."""
    return whole == again
