"""Steps of a run in a row: each a block with a stamp, kept if an earlier run has done it.

A stamp says what the result depends on: settings, content of files, versions, the step before.
Half of a result is never taken for a whole one: the stamp goes before a step and comes after it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from axolotl_unlearn.config.reading import read_config
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import cores, fault
from axolotl_unlearn.store import Store, content_key, file_digest, versions

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Each worker of `datasets` imports Axolotl again (10 s); a request has some thousand rows.
    "AXOLOTL_DATASET_NUM_PROC": "0",
}
#: Of a log that a fault shows, without progress bars.
LOG_LINES, _NOISE = 15, re.compile(r"it/s\]|s/it\]|examples/s\]|^\s*$")
#: How often a training says how far it is, and what the Trainer logs of a step.
SAY_SECONDS, _EPOCH = 15.0, re.compile(r"\{'loss': .*'epoch': '?([\d.]+)'?\}")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def executable(name: str) -> str:
    """A command of this environment, even if the environment is not activated."""
    beside = Path(sys.executable).parent / name
    command = str(beside) if beside.exists() else shutil.which(name)
    if not command:
        says = f"the command `{name}` is missing; install the package with `make setup`."
        raise fault("requests.no-command", says)
    return command


@dataclass
class Steps:
    """Steps of a run.

    Attributes:
        folder: Holds ``logs/`` and ``stamps/``.
        lock: File descriptor that commands keep open, so that none runs beside a second start.
        environment: Of commands, above `ENVIRONMENT`.
        threads: Of each command.
        processes: Of each training, side by side on the rows of a step.
        key: Of the step before.
    """

    folder: Path
    lock: int
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = field(default_factory=cores)
    processes: int = 1
    key: str = ""
    _title: str = ""

    @contextmanager
    def step(
        self,
        name: str,
        title: str,
        *,
        output: Path | None = None,
        inputs: Iterable[Path] = (),
        settings: object = None,
    ) -> Iterator[bool]:
        """A step; False in the block if it was done on the same inputs, and its output is still
        there. It counts as done when the block ends without an error."""
        contents = [[path.name, file_digest(path)] for path in inputs]
        self.key = content_key(name, settings, contents, versions(), self.key)
        stamps, self._title = Store(self.folder / "stamps"), title
        stamp = stamps.get(name)
        if stamp and stamp["key"] == self.key and (output is None or output.exists()):
            self._say("unchanged, kept from an earlier run")
            yield False
            return
        stamps.put(name, {"key": None})
        again = " again from its beginning; an earlier start was stopped in it"
        self._say("started" + again * bool(stamp and not stamp["key"]))
        began = time.monotonic()
        yield True
        self._say(f"done ({time.monotonic() - began:.0f} s)")
        stamps.put(name, {"key": self.key})

    def command(
        self, name: str, words: Sequence[str], passes: float = 0.0, lines: str = ""
    ) -> None:
        """Run a program, which ends when this process does; what it prints is ``logs/NAME.log``.

        Args:
            passes: Of a training, to say how far it is.
            lines: Those that begin so are said as they come.

        Raises:
            UnlearnError: It failed; the sentence ends with the last lines of the log.
        """
        environment = {**os.environ, **ENVIRONMENT, **self.environment}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        # `torchrun` is looked for by Axolotl, also where no environment is activated.
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with self.log(name) as file:
            print("$", *words, file=file, flush=True)
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[self.lock],
                preexec_fn=end_with_parent,
                text=True,
                errors="replace",
            )
            last, told = deque[str](maxlen=LOG_LINES), time.monotonic()
            first: tuple[float, float] | None = None  # what comes before it is loading
            for line in process.stdout or ():
                print(line, end="", file=file, flush=True)
                if not _NOISE.search(line):
                    last.append(line)
                if lines and line.startswith(lines):
                    self._say(line.rstrip())
                elif time.monotonic() - told > SAY_SECONDS and (found := _EPOCH.search(line)):
                    told, done = time.monotonic(), float(found[1])
                    first = first or (told, done)
                    pace = (told - first[0]) / (done - first[1]) if done > first[1] else None
                    left = f", about {pace * (passes - done):.0f} s left" if pace else ""
                    self._say(f"pass {done:g} of {passes:g}{left}")
            process.wait()
        if process.returncode:
            raise UnlearnError(
                f"`{shlex.join(words)}` ended with exit code {process.returncode}; the log "
                f"{file.name} ends with:\n{''.join(last).rstrip()}",
                code="requests.command-failed",
            )

    def log(self, name: str) -> TextIO:
        """``logs/NAME.log``, opened."""
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")

    def train(self, name: str, config: Path, out: Path) -> None:
        """`axolotl train` in a process of its own, into an empty folder; without checkpoints, and
        without rows that an earlier start prepared: Axolotl knows them by the name of their file.

        Raises:
            UnlearnError: It failed, or wrote no weights.
        """
        for old in (out, self.folder / "prepared"):
            shutil.rmtree(old, ignore_errors=True)
        launcher = ["python"]
        if self.processes > 1:
            launcher = ["torchrun", "--", "--standalone", f"--nproc_per_node={self.processes}"]
        words = [executable("axolotl"), "train", str(config), "--launcher", *launcher]
        self.command(name, words, float(read_config(config).get("num_epochs") or 1))
        if not any(out.glob("*.safetensors")):
            raise fault("requests.no-weights", f"the run wrote no weights to {out}; see its log.")
        for path in out.glob("checkpoint-*"):
            shutil.rmtree(path)

    def _say(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._title}: {line}", flush=True)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Linux alone; elsewhere the folder's lock keeps a second start away. 0 takes it back."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
