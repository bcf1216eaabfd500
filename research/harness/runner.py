"""Run the stages of a job side by side as subprocesses: order, progress, resume, clear failures.

A stage runs when the stages it needs are done and threads are free. It is kept when a stamp of an
earlier run carries the same key (command, input files, versions, keys of the stages before it; not
the number of threads) and its output is still there. Commands of Python are forks of a process that
has imported the libraries once (`research.harness.forkserver`), where that can be.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.steps import last_lines
from axolotl_unlearn.store import Store, content_key, file_digest, versions
from research.harness.forkserver import Fork, ForkServer, python_words
from research.harness.forkserver import possible as forks_possible

POLL_SECONDS = 0.2
#: How long a start waits for what a killed run of the same folder has left.
LOCK_SECONDS = 20.0
#: How often a training stage says how far it is where there is no terminal.
SAY_SECONDS = 15.0
# Steps of a training run as tqdm prints them; the bars of tokenisation come before this line.
_TRAINING = b"Starting trainer"
_STEPS = re.compile(rb"(\d+)/(\d+) \[")


@dataclass
class Stage:
    """One command of a job.

    Attributes:
        name: Also names log and stamp.
        command: Arguments of a subprocess, or a function that returns them at the start, or None
            for a stage that is only `action`.
        output: File that must exist afterwards.
        inputs: Files whose content is part of the key, or a function that returns them.
        needs: Names of stages that must have ended (done, kept or left out).
        before: Called in this process just before the command.
        resumes: The command goes on from what an earlier start with the same key has left, so that
            `before` is not called again.
        action: Called in this process instead of, or after, the command.
        skip_if: Called when the stage could start; a sentence means that it is left out.
        settings: Further facts that the result depends on.
        threads: Of the command; no part of the key.
    """

    name: str
    title: str
    command: list[str] | Callable[[], list[str]] | None
    output: Path
    inputs: Iterable[Path] | Callable[[], Iterable[Path]] = ()
    needs: list[str] = field(default_factory=list)
    before: Callable[[], None] | None = None
    resumes: bool = False
    action: Callable[[], None] | None = None
    skip_if: Callable[[], str | None] | None = None
    settings: object = None
    threads: int = 1


@dataclass
class Outcome:
    """How a stage ended: ``done``, ``kept`` or ``left out``; its key and wall-clock seconds."""

    state: str
    key: str
    seconds: float
    reason: str = ""


@dataclass
class _Running:
    stage: Stage
    process: subprocess.Popen | Fork
    key: str
    started: float
    log: Path


def stage_key(stage: Stage, command: list[str] | None, before: Iterable[str]) -> str:
    """Hash of all that a stage depends on; see the head of this file."""
    paths = stage.inputs() if callable(stage.inputs) else stage.inputs
    contents = [[path.name, file_digest(path)] for path in paths]
    return content_key(command, stage.settings, contents, versions(), sorted(before))


def training_progress(log: Path) -> tuple[int, int] | None:
    """Steps done and in total, read from the end of a training log; None before the first."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            tail = file.read()
    except OSError:
        return None
    found = _STEPS.findall(tail.rpartition(_TRAINING)[2])
    if not found or (_TRAINING not in tail and size <= 4096):
        return None
    return int(found[-1][0]), int(found[-1][1])


class _Display:
    """Bars on a terminal; elsewhere (a log file, CI) lines: start, progress, end."""

    def __init__(self, console: Console, stages: Iterable[Stage]) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        hidden = not console.is_terminal
        self.bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=hidden)
        self.tasks = {s.name: self.bars.add_task(s.title, total=None, start=False) for s in stages}
        self.said: dict[str, tuple[int, float, float]] = {}  # first step seen, when, last line

    def say(self, line: str, always: bool = False) -> None:
        if always or not self.console.is_terminal:
            line = f"{time.strftime('%H:%M:%S')} {line}"
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def start(self, stage: Stage, log: Path | None = None) -> None:
        self.bars.start_task(self.tasks[stage.name])
        self.say(f"{stage.title}: started" + (f", log {log}" if log else ""))

    def step(self, stage: Stage, steps: tuple[int, int] | None) -> None:
        if not steps:
            return
        done, total = steps
        self.bars.update(self.tasks[stage.name], completed=done, total=total)
        now = time.monotonic()
        first, began, last = self.said.setdefault(stage.name, (done, now, now))
        if first < done < total and now - last >= SAY_SECONDS:
            left = (total - done) * (now - began) / (done - first)
            self.say(f"{stage.title}: step {done} of {total}, about {left:.0f} s left")
            self.said[stage.name] = first, began, now

    def end(self, stage: Stage, outcome: Outcome) -> None:
        seconds = f"done ({outcome.seconds:.0f} s)"
        kept = "unchanged, kept from an earlier run"
        state = {"done": seconds, "kept": kept}.get(outcome.state, f"left out. {outcome.reason}")
        task, done = self.tasks[stage.name], 0 if outcome.reason else 1
        title = f"{stage.title}: {'left out' if outcome.reason else state}"
        self.bars.update(task, total=1, completed=done, description=title)
        self.bars.stop_task(task)
        self.say(f"{stage.title}: {state}", always=bool(outcome.reason))


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _end_on_sigterm():
    """Let SIGTERM unwind the stack, so that no command outlives us."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _alone(folder: Path, console: Console) -> Iterator[int]:
    """The right to a job's folder: a lock that lasts as long as anybody has it open.

    Commands and their watcher inherit it, so that it outlives a process that was killed until
    nothing of it writes any more.

    Raises:
        UnlearnError: Somebody else keeps it.
    """
    with (folder / ".lock").open("a") as file:
        end, said = time.monotonic() + LOCK_SECONDS, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UnlearnError(
                        f"{folder} is being run by another process; wait until it has ended, or "
                        "take another folder."
                    ) from None
                if not said:
                    console.print(f"waiting for another run of {folder}", soft_wrap=True)
                said = True
                time.sleep(POLL_SECONDS)
            except OSError:  # a file system without locks
                break
        yield file.fileno()


#: Reads the numbers of process groups, each when it starts and again when it has ended. Its input
#: ends when the job's process does, however that dies: what is left is killed, and waited for.
_WATCH = """
import os, signal, sys, time
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
end = time.monotonic() + 10
for number in (signal.SIGKILL, 0):
    for group in groups:
        try:
            os.killpg(group, number)
            while not number and time.monotonic() < end:
                time.sleep(0.01)
                os.killpg(group, 0)
        except OSError:
            pass
"""


class _Groups:
    """Commands in process groups of their own, none of which outlives this process.

    A process of its own in a session of its own watches: after SIGKILL nobody else is left to.

    Args:
        environment: Of all commands. Where it can, a fork server starts those of Python.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._watch: subprocess.Popen | None = None
        self._server: ForkServer | None = None
        self.lock = -1

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen | Fork:
        """The command, its output at the end of ``log``, with these variables added."""
        if self._watch is None:
            self._watch = subprocess.Popen(
                [sys.executable, "-ISc", _WATCH],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,
                pass_fds=[self.lock],
            )
        process = self._fork(command, log, environment)
        if process is None:
            with log.open("ab") as file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**self.environment, **environment},
                    process_group=0,
                    pass_fds=[self.lock],
                )
        self._tell(process.pid)
        return process

    def _fork(self, command: list[str], log: Path, environment: Mapping[str, str]) -> Fork | None:
        path = self.environment.get("PATH")
        if not forks_possible(self.environment) or python_words(command, path) is None:
            return None
        if self._server is None:
            self._server = ForkServer(self.environment, keep=[self.lock])
            self._tell(self._server.pid)
        return self._server.start(command, log, environment)

    def end(self, process: subprocess.Popen | Fork) -> None:
        """It has ended by itself."""
        self._tell(process.pid)

    def _tell(self, group: int) -> None:
        self._watch.stdin.write(f"{group}\n")
        self._watch.stdin.flush()

    def close(self) -> None:
        """Ends what still runs."""
        if self._server is not None:
            self._server.close()
        if self._watch is not None:
            if self._server is not None:
                self._tell(self._server.pid)
            self._watch.stdin.close()
            self._watch.wait()
            self._watch = None


class Job:
    """Stages, their stamps and logs under one folder.

    Args:
        folder: Holds ``logs/`` and ``stamps/``.
        threads: How many may compute at a time; a stage that wants more gets all of them.
        environment: Variables added to the subprocesses' environment.
        console: Where progress goes; default standard output.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        console: Console | None = None,
    ) -> None:
        self.folder = folder
        self.threads = max(1, threads or os.cpu_count() or 1)
        self.environment = {**os.environ, **(environment or {})}
        self.console = console or Console()
        self.outcomes: dict[str, Outcome] = {}
        self.stages: list[Stage] = []
        self.started = time.monotonic()
        self._stamps = Store(folder / "stamps")
        self._running: list[_Running] = []
        self._groups = _Groups(self.environment)
        self._cpu_before = _cpu_of_children()

    def add(self, stage: Stage) -> None:
        """Add a stage; the order of adding is the order of preference for free threads."""
        unknown = set(stage.needs) - {s.name for s in self.stages}
        if unknown:
            raise ValueError(f"stage {stage.name} needs unknown stages {sorted(unknown)}")
        self.stages.append(stage)

    def seconds(self) -> float:
        """Wall clock since the job was made."""
        return time.monotonic() - self.started

    def total_seconds(self) -> float:
        """Wall clock of the run, or the sum over its stages if earlier calls did some of them."""
        if any(outcome.state == "kept" for outcome in self.outcomes.values()):
            return sum(outcome.seconds for outcome in self.outcomes.values())
        return self.seconds()

    def cpu_seconds(self) -> float:
        """CPU time of the commands, after `run`; tells more than `seconds` on a busy machine."""
        return _cpu_of_children() - self._cpu_before

    def run(self) -> dict[str, Outcome]:
        """Run all stages.

        Raises:
            UnlearnError: A command failed; the sentence ends with the last lines of its log. Or
            another run of the folder goes on.
        """
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        display = _Display(self.console, self.stages)
        with _alone(self.folder, self.console) as self._groups.lock:
            try:
                with _end_on_sigterm(), display.bars:
                    while len(self.outcomes) < len(self.stages):
                        self._turn(display)
            finally:  # after an error, Ctrl-C or a termination
                for entry in self._running:
                    entry.process.terminate()
                for entry in self._running:
                    entry.process.wait()
                self._groups.close()
        return self.outcomes

    def _turn(self, display: _Display) -> None:
        """Start what can start, end what has ended, or wait a little."""
        started = [self._start(stage, display) for stage in self._ready()]
        ended = [entry for entry in self._running if entry.process.poll() is not None]
        for entry in self._running:
            display.step(entry.stage, training_progress(entry.log))
        for entry in ended:
            self._running.remove(entry)
            self._groups.end(entry.process)
            self._finish(entry, display)
        if not any(started) and not ended:
            time.sleep(POLL_SECONDS)

    def _ready(self) -> list[Stage]:
        begun = {*self.outcomes, *(entry.stage.name for entry in self._running)}
        waiting = [stage for stage in self.stages if stage.name not in begun]
        return [s for s in waiting if all(name in self.outcomes for name in s.needs)]

    def _start(self, stage: Stage, display: _Display) -> bool:
        """Start, keep or leave out a stage that is ready; False if it has to wait for threads."""
        wanted = min(stage.threads, self.threads)
        busy = sum(min(entry.stage.threads, self.threads) for entry in self._running)
        if stage.command is not None and busy + wanted > self.threads:
            return False
        began = time.monotonic()
        reason = stage.skip_if() if stage.skip_if else None
        if reason:
            self._end(stage, Outcome("left out", "", 0.0, reason), display)
            return True
        command = stage.command() if callable(stage.command) else stage.command
        key = stage_key(stage, command, [self.outcomes[name].key for name in stage.needs])
        stamp = self._stamps.get(stage.name)
        if stage.output.exists() and stamp and stamp["key"] == key:
            self._end(stage, Outcome("kept", key, stamp["seconds"]), display)
            return True
        # Gone before the start: half an output is never taken for a whole one.
        goes_on = stage.resumes and stamp and stamp.get("begun") == key
        self._stamps.put(stage.name, {"key": None, "begun": key})
        if stage.before is not None and not goes_on:
            stage.before()
        if command is None:
            display.start(stage)
            stage.action()
            self._done(stage, key, began, display)
        else:
            log = self.folder / "logs" / f"{stage.name}.log"
            process = self._spawn(stage, command, log, str(wanted))
            self._running.append(_Running(stage, process, key, began, log))
            display.start(stage, log)
        return True

    def _spawn(self, stage: Stage, command: list[str], log: Path, threads: str):
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        log.write_text("$ " + " ".join(command) + "\n", "utf-8")
        try:
            return self._groups.start(command, log, environment)
        except OSError as error:
            raise UnlearnError(
                f"{stage.title}: cannot start `{command[0]}` ({error.strerror}); install the "
                "package into this environment."
            ) from error

    def _finish(self, entry: _Running, display: _Display) -> None:
        stage, code = entry.stage, entry.process.returncode
        if code == 0 and stage.action is not None:
            stage.action()
        if code != 0 or not stage.output.exists():
            what = f"ended with exit code {code}" if code else f"did not write {stage.output}"
            raise UnlearnError(
                f"{stage.title}: `{' '.join(entry.process.args)}` {what}; the log {entry.log} "
                f"ends with:\n{last_lines(entry.log)}"
            )
        self._done(stage, entry.key, entry.started, display)

    def _done(self, stage: Stage, key: str, began: float, display: _Display) -> None:
        seconds = round(time.monotonic() - began, 1)
        self._stamps.put(stage.name, {"key": key, "seconds": seconds})
        self._end(stage, Outcome("done", key, seconds), display)

    def _end(self, stage: Stage, outcome: Outcome, display: _Display) -> None:
        self.outcomes[stage.name] = outcome
        display.end(stage, outcome)
