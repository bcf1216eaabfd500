"""Run the stages of a job side by side as subprocesses: order, progress, resume, clear failures.

A stage runs when the stages it needs are done and threads are free. It is kept when a stamp of an
earlier run carries the same key (command, input files, versions, keys of the stages before it; not
the number of threads) and its output is still there. Commands of Python are forks of a process that
has imported the libraries once (`research.harness.forkserver`), where that can be.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import held
from axolotl_unlearn.requests.steps import end_with_parent, last_lines
from axolotl_unlearn.store import Store, content_key, file_digest, versions
from research.harness.cluster import along, connect
from research.harness.forkserver import Fork, ForkServer, python_words
from research.harness.forkserver import possible as forks_possible

POLL_SECONDS = 0.2
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
    process: subprocess.Popen | Fork | Task
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


def _begin(command: list[str], log: Path, environment: Mapping[str, str], **more: Any):
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C is the job's
            preexec_fn=end_with_parent,
            **more,
        )


class _Machine:
    """Commands as processes of this machine, which end with this one; as forks where they can.

    Args:
        environment: Of all commands.
        lock: They keep this file open, so that no second start runs beside them.
    """

    def __init__(self, environment: Mapping[str, str], lock: int) -> None:
        self.environment, self.lock = environment, lock
        self._server: ForkServer | None = None
        self._before = _cpu_of_children()

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str], threads: int
    ) -> subprocess.Popen | Fork:
        """The command, its output at the end of ``log``, with these variables added."""
        words = python_words(command, self.environment.get("PATH"))
        if words is not None and forks_possible(self.environment):
            if self._server is None:
                self._server = ForkServer(self.environment, keep=[self.lock])
            if fork := self._server.start(command, log, environment):
                return fork
        environment = {**self.environment, **environment}
        return _begin(command, log, environment, pass_fds=[self.lock])

    def cpu_seconds(self) -> float:
        return _cpu_of_children() - self._before

    def close(self, cut: Iterable[subprocess.Popen | Fork]) -> None:
        """Ends what commands that were terminated have left in their groups."""
        for process in cut:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._server is not None:
            self._server.close()


class Task:
    """A command as a task of Ray; what `subprocess.Popen` is to others."""

    def __init__(self, ray: Any, ref: Any, args: Sequence[str]) -> None:
        self.args, self.returncode, self.seconds = args, None, 0.0
        self._ray, self._ref = ray, ref

    def poll(self) -> int | None:
        if self.returncode is None and self._ray.wait([self._ref], timeout=0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        try:
            self.returncode, self.seconds = self._ray.get(self._ref)
        except self._ray.exceptions.RayError:  # its worker has died, or it was cancelled
            self.returncode = -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        self._ray.cancel(self._ref)


class _Cluster:
    """Commands as tasks of Ray, on machines that share the working folder and the environment.

    Args:
        address: `local`, `auto`, HOST:PORT or ray://.
    """

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self._ray, self.environment = connect(address), environment
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        sizes = [int(node.get("CPU", 0)) for node in nodes]
        self.cores, self._widest = sum(sizes), max(sizes)
        self._tasks: list[Task] = []

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str], threads: int
    ) -> Task:
        """With so many cores, and a GPU if there are any that it may see."""
        gpu = self._ray.cluster_resources().get("GPU", 0) > 0
        gpu = gpu and self.environment.get("CUDA_VISIBLE_DEVICES") != ""
        cores = max(1, min(threads, self._widest))
        task = self._ray.remote(num_cpus=cores, num_gpus=int(gpu), max_retries=0)(_in_worker)
        given = along() | {**self.environment, **environment}
        place = os.getcwd(), str(log.absolute())
        self._tasks.append(Task(self._ray, task.remote(command, *place, given), command))
        return self._tasks[-1]

    def cpu_seconds(self) -> float:
        return sum(task.seconds for task in self._tasks)

    def close(self, cut: Iterable[Task]) -> None:
        """Ray ends tasks, and the processes of workers, itself."""


def _in_worker(
    command: list[str], folder: str, log: str, environment: dict[str, str]
) -> tuple[int, float]:
    """Exit code and seconds of the processor."""
    before = _cpu_of_children()
    process = _begin(command, Path(log), {**os.environ, **environment}, cwd=folder)
    try:  # with a limit it looks again and again, as a cancelled task has to
        return process.wait(1e9), _cpu_of_children() - before
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Job:
    """Stages, their stamps and logs under one folder.

    Args:
        folder: Holds ``logs/`` and ``stamps/``.
        threads: How many may compute at a time; a stage that wants more gets all of them.
        environment: Variables added to the subprocesses' environment.
        ray: Address of a cluster of Ray whose tasks the commands are; None is this machine.
        console: Where progress goes; default standard output.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        ray: str | None = None,
        console: Console | None = None,
    ) -> None:
        self.folder = folder
        self._cluster = _Cluster(ray, environment or {}) if ray else None
        cores = self._cluster.cores if self._cluster else os.cpu_count()
        self.threads = max(1, threads or cores or 1)
        self.environment = {**os.environ, **(environment or {})}
        self.console = console or Console()
        self.outcomes: dict[str, Outcome] = {}
        self.stages: list[Stage] = []
        self.started = time.monotonic()
        self._stamps = Store(folder / "stamps")
        self._running: list[_Running] = []
        self._machine: _Machine | _Cluster | None = self._cluster

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
        return self._machine.cpu_seconds() if self._machine else 0.0

    def run(self) -> dict[str, Outcome]:
        """Run all stages.

        Raises:
            UnlearnError: A command failed; the sentence ends with the last lines of its log. Or
            another run of the folder goes on.
        """
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        display = _Display(self.console, self.stages)
        with held(self.folder) as lock:
            self._machine = self._cluster or _Machine(self.environment, lock)
            try:
                with _end_on_sigterm(), display.bars:
                    while len(self.outcomes) < len(self.stages):
                        self._turn(display)
            finally:  # after an error, Ctrl-C or a termination
                for entry in self._running:
                    entry.process.terminate()
                for entry in self._running:
                    entry.process.wait()
                self._machine.close([entry.process for entry in self._running])
        return self.outcomes

    def _turn(self, display: _Display) -> None:
        """Start what can start, end what has ended, or wait a little."""
        started = [self._start(stage, display) for stage in self._ready()]
        ended = [entry for entry in self._running if entry.process.poll() is not None]
        for entry in self._running:
            display.step(entry.stage, training_progress(entry.log))
        for entry in ended:
            self._running.remove(entry)
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
            process = self._spawn(stage, command, log, wanted)
            self._running.append(_Running(stage, process, key, began, log))
            display.start(stage, log)
        return True

    def _spawn(self, stage: Stage, command: list[str], log: Path, threads: int):
        environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        log.write_text("$ " + " ".join(command) + "\n", "utf-8")
        try:
            return self._machine.start(command, log, environment, threads)
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
