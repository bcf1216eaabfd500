"""Run the stages of a job side by side as subprocesses: order, progress, resume, clear failures.

A stage is a command with its inputs. It runs when the stages it needs are done and a slot is
free; it is skipped when a stamp from an earlier run carries the same key (command, input files,
keys of the stages before it) and its output is still there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError

LOG_LINES = 15
POLL_SECONDS = 0.2
# Steps of a training run as tqdm prints them; the bars of tokenisation come before this line.
_TRAINING = b"Starting trainer"
_STEPS = re.compile(rb"(\d+)/(\d+) \[")
_NOISE = re.compile(r"it/s\]|s/it\]|examples/s\]|^\s*$")


@dataclass
class Stage:
    """One command of a job.

    Attributes:
        name: Short name; also names log and stamp.
        title: What the progress bar says.
        command: Arguments of a subprocess, or a function that returns them at the start, or None
            for a stage that is only `action`.
        output: File or folder that must exist afterwards.
        inputs: Files whose content is part of the key.
        needs: Names of stages that must have ended (done, reused or left out).
        after: Names of stages to wait for although nothing of theirs is used.
        before: Called in this process just before the command.
        action: Called in this process instead of, or after, the command.
        skip_if: Called when the stage could start; a sentence means that it is left out.
        settings: Further facts that the result depends on.
    """

    name: str
    title: str
    command: list[str] | Callable[[], list[str]] | None
    output: Path
    inputs: list[Path] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    before: Callable[[], None] | None = None
    action: Callable[[], None] | None = None
    skip_if: Callable[[], str | None] | None = None
    settings: object = None


@dataclass
class Outcome:
    """How a stage ended: ``done``, ``reused`` or ``left out``; its key and wall-clock seconds."""

    state: str
    key: str
    seconds: float
    reason: str = ""


@dataclass
class _Running:
    stage: Stage
    process: subprocess.Popen
    key: str
    started: float
    log: Path


def stage_key(stage: Stage, command: list[str] | None, before: Iterable[str]) -> str:
    """Hash of all that a stage depends on: command, settings, input contents, keys before it."""
    digest = hashlib.sha256()
    facts = [command, stage.settings, sorted(before)]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in stage.inputs:
        digest.update(str(path.name).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def last_lines(log: Path, count: int = LOG_LINES) -> str:
    """The end of a log without progress bars."""
    if not log.exists():
        return ""
    text = log.read_text("utf-8", errors="replace").replace("\r", "\n")
    lines = [line for line in text.split("\n") if not _NOISE.search(line)]
    return "\n".join(lines[-count:])


def training_progress(log: Path) -> tuple[int, int] | None:
    """Steps done and in total, read from the end of a training log; None before the first."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            tail = file.read()
    except OSError:
        return None
    tail = tail.rpartition(_TRAINING)[2] if _TRAINING in tail else tail
    found = _STEPS.findall(tail) if size > 4096 or _TRAINING in log.read_bytes() else []
    if not found:
        return None
    done, total = map(int, found[-1])
    return done, total


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end_on_sigterm() -> Callable[[], None]:
    """Let SIGTERM unwind the stack, so that no command outlives us; returns the way back."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    return lambda: signal.signal(signal.SIGTERM, before) and None


class Job:
    """Stages, their stamps and logs under one folder.

    Args:
        folder: Holds ``logs/`` and ``stamps/``.
        slots: How many commands run at a time.
        environment: Variables added to the subprocesses' environment.
        say: Receives one line of text for the user.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        environment: Mapping[str, str],
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.slots = max(1, slots)
        self.environment = {**os.environ, **environment}
        self.say = say
        self.outcomes: dict[str, Outcome] = {}
        self.stages: list[Stage] = []
        self.started = time.monotonic()
        self._cpu_before = _cpu_of_children()

    def add(self, stage: Stage) -> None:
        """Add a stage; the order of adding is the order of preference for a free slot."""
        unknown = {*stage.needs, *stage.after} - {s.name for s in self.stages}
        if unknown:
            raise ValueError(f"stage {stage.name} needs unknown stages {sorted(unknown)}")
        self.stages.append(stage)

    def seconds(self) -> float:
        """Wall clock since the job was made."""
        return time.monotonic() - self.started

    def total_seconds(self) -> float:
        """Wall clock of the run, or the sum over its stages if earlier calls did some of them."""
        if any(outcome.state == "reused" for outcome in self.outcomes.values()):
            return sum(outcome.seconds for outcome in self.outcomes.values())
        return self.seconds()

    def cpu_seconds(self) -> float:
        """CPU time of the commands that have ended; tells more than `seconds` on a busy machine."""
        return _cpu_of_children() - self._cpu_before

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _stamp(self, name: str) -> Path:
        return self.folder / "stamps" / f"{name}.json"

    def run(self, progress=None) -> dict[str, Outcome]:
        """Run all stages.

        Args:
            progress: A started `rich.progress.Progress`, or None.

        Raises:
            UnlearnError: A command failed; the sentence ends with the last lines of its log.
        """
        for name in ("logs", "stamps"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        bars = {}
        if progress is not None:
            bars = {
                s.name: progress.add_task(s.title, total=None, start=False) for s in self.stages
            }
        waiting = list(self.stages)
        running: list[_Running] = []
        restore = _end_on_sigterm()
        try:
            while waiting or running:
                started_any = self._start_ready(waiting, running, progress, bars)
                for entry in list(running):
                    self._show(entry, progress, bars)
                    if entry.process.poll() is not None:
                        running.remove(entry)
                        self._finish(entry)
                        self._close(entry.stage.name, progress, bars)
                        started_any = True
                if not started_any:
                    time.sleep(POLL_SECONDS)
        finally:
            restore()
            for entry in running:  # after an error, Ctrl-C or a termination
                entry.process.terminate()
            for entry in running:
                entry.process.wait()
        return self.outcomes

    def _start_ready(self, waiting, running, progress, bars) -> bool:
        changed = False
        for stage in list(waiting):
            if any(name not in self.outcomes for name in (*stage.needs, *stage.after)):
                continue
            if stage.command is not None and len(running) >= self.slots:
                continue
            waiting.remove(stage)
            changed = True
            reason = stage.skip_if() if stage.skip_if else None
            if reason:
                self.outcomes[stage.name] = Outcome("left out", "", 0.0, reason)
                self.say(f"{stage.title}: left out. {reason}")
                self._close(stage.name, progress, bars)
                continue
            command = stage.command() if callable(stage.command) else stage.command
            before = [self.outcomes[name].key for name in stage.needs]
            key = stage_key(stage, command, before)
            stamp = self._stamp(stage.name)
            if stage.output.exists() and stamp.exists():
                known = json.loads(stamp.read_text())
                if known.get("key") == key:
                    self.outcomes[stage.name] = Outcome("reused", key, known["seconds"])
                    self.say(f"{stage.title}: unchanged, kept from an earlier run.")
                    self._close(stage.name, progress, bars)
                    continue
            stamp.unlink(missing_ok=True)
            if progress is not None:
                progress.start_task(bars[stage.name])
            if command is None:
                began = time.monotonic()
                stage.action()
                self._done(stage, key, time.monotonic() - began)
                self._close(stage.name, progress, bars)
            else:
                running.append(self._spawn(stage, command, key))
        return changed

    def _spawn(self, stage: Stage, command: list[str], key: str) -> _Running:
        log = self.log(stage.name)
        if stage.before is not None:
            stage.before()
        with log.open("wb") as file:
            file.write(("$ " + " ".join(command) + "\n").encode())
            file.flush()
            try:
                process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                )
            except OSError as error:
                raise UnlearnError(
                    f"{stage.title}: cannot start `{command[0]}` ({error.strerror}); install the "
                    "package into this environment."
                ) from error
        return _Running(stage, process, key, time.monotonic(), log)

    def _finish(self, entry: _Running) -> None:
        stage, code = entry.stage, entry.process.returncode
        if code == 0 and stage.action is not None:
            stage.action()
        if code != 0 or not stage.output.exists():
            what = f"ended with exit code {code}" if code else f"did not write {stage.output}"
            raise UnlearnError(
                f"{stage.title}: `{' '.join(entry.process.args)}` {what}; the log {entry.log} "
                f"ends with:\n{last_lines(entry.log)}"
            )
        self._done(stage, entry.key, time.monotonic() - entry.started)

    def _done(self, stage: Stage, key: str, seconds: float) -> None:
        self.outcomes[stage.name] = Outcome("done", key, round(seconds, 1))
        stamp = {"key": key, "seconds": round(seconds, 1)}
        self._stamp(stage.name).write_text(json.dumps(stamp) + "\n")

    def _show(self, entry: _Running, progress, bars) -> None:
        if progress is not None:
            steps = training_progress(entry.log)
            if steps:
                progress.update(bars[entry.stage.name], completed=steps[0], total=steps[1])

    def _close(self, name: str, progress, bars) -> None:
        if progress is not None:
            outcome = self.outcomes[name]
            seconds = f" ({outcome.seconds:.0f} s)" if outcome.state == "done" else ""
            title = next(s.title for s in self.stages if s.name == name)
            progress.update(
                bars[name],
                total=1,
                completed=0 if outcome.state == "left out" else 1,
                description=f"{title}: {outcome.state}{seconds}",
            )
            progress.stop_task(bars[name])
