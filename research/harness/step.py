"""One command of `make demo`: its output goes to a log, and lines say how far it is.

    python -m research.harness.step memorise axolotl train examples/memorise.yml

The log is ``out/logs/NAME.log``; a command that fails ends with its last lines and its exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from axolotl_unlearn.requests.steps import last_lines
from research.harness.forks import SOCKET, Asked
from research.harness.forkserver import python_words
from research.harness.runner import training_progress

SAY_SECONDS = 10.0
BAR = 20


def progress(steps: tuple[int, int], seconds: float) -> str:
    """A bar with an estimate; ``seconds`` are those since the first step."""
    done, total = steps
    full = BAR * done // total
    left = seconds * (total - done) / max(1, done)
    return f"[{'#' * full}{'.' * (BAR - full)}] {done} of {total} steps, about {left:.0f} s left"


def main(name: str, command: list[str], folder: Path = Path("out/logs")) -> int:
    """The exit code of ``command``."""

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {name}: {line}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name.replace(' ', '-')}.log"
    began = said = time.monotonic()
    first = total = None
    say(f"started, log {log}")
    with log.open("w") as file:
        words = python_words(command) if SOCKET in os.environ else None
        process = (
            Asked(words, log)
            if words
            else subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        )
        while process.poll() is None:
            try:
                time.sleep(0.2)
            except KeyboardInterrupt:  # the command has it too
                return process.wait() or 130
            now, steps = time.monotonic(), training_progress(log)
            if steps and steps[1] != total:
                first, total = now, steps[1]
            if now - said >= SAY_SECONDS:
                said = now
                counted = steps and total > 1  # a single file is no progress
                say(progress(steps, now - first) if counted else f"{now - began:.0f} s so far")
    if process.returncode:
        say(f"`{' '.join(command)}` ended with exit code {process.returncode}; {log} ends with:")
        print(last_lines(log), flush=True)
    else:
        say(f"done ({time.monotonic() - began:.0f} s)")
    return process.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
