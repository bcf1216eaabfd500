"""Runs of a study: the stock commands on configs made of an example, each done once.

    runs = Runs(Path("out/study"), seed=1)
    original = runs.train("original", "memorise", {"datasets.0.path": data / "all.jsonl"})
    over = runs.train("over", "npo_over", {"base_model": original})
    merged = runs.merge("merged", "ties", original, [over, under])
    scores = runs.evaluate("eval", {"over": over, "merged": merged}, data)

A command is done again if its config, a file that the config names, a version or what it starts from
has changed; a training that was killed goes on from its last state. Commands run one at a time, or in
the processes of `in_parallel`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.device import emulates_bfloat16
from axolotl_unlearn.files import write, write_json
from axolotl_unlearn.requests.steps import end_with_parent
from axolotl_unlearn.store import content_key, file_digest, versions
from research.harness import become, python_words

ROOT = Path(__file__).resolve().parents[1]
_STEPS = re.compile(rb"\b(\d+)/(\d+) \[")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_DO_NOT_TRACK": "1",
    # Each worker of `datasets` imports Axolotl again (10 s): none for some thousand rows.
    "AXOLOTL_DATASET_NUM_PROC": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    # glibc gives every large tensor back to the system and asks for it again: half of the time of
    # a 135M model went into page faults.
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
#: The last state alone, until the run has ended.
RESUMED = {"save_strategy": "steps", "save_steps": 0.1, "save_total_limit": 1,
           "auto_resume_from_checkpoints": True}  # fmt: skip

#: One NPO for all rows and the retain side of it, as studies before the demo's split have them.
NPO = {"objective": "npo", "weight": 0.1, "reduction": "sum"}
KEEP = [{"objective": "nll", "weight": 1.0},
        {"objective": "kl", "weight": 0.5, "direction": "reverse"}]  # fmt: skip


def changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with values at dotted paths (``datasets.0.path``); None takes a key away."""
    for path, value in changes.items():
        *way, last = (int(word) if word.isdigit() else word for word in path.split("."))
        place: Any = config
        for step in way:
            place = place[step] if isinstance(step, int) else place.setdefault(step, {})
        if isinstance(last, int) and last == len(place):
            place.append(value)
        elif value is None:
            place.pop(last, None)
        else:
            place[last] = str(value) if isinstance(value, Path) else value
    return config


@dataclass
class Runs:
    """The commands of one seed, in one folder.

    Attributes:
        out: Folder of configs, logs, models and ``runs.json`` (seconds and keys of what is done).
        seed: Of every training; None leaves the example's own.
        threads: Of every command.
        forks: Commands are forks of this process, which has imported their libraries and used no GPU.
        device: ``cuda`` lets commands see the GPU.
    """

    out: Path
    seed: int | None = None
    threads: int = 2
    forks: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.out = Path(self.out)

    @property
    def dtype(self) -> str:
        """What models of an example with `bf16: true` are trained and read in here."""
        return "float32" if self.device == "cpu" and emulates_bfloat16() else "bfloat16"

    @property
    def done(self) -> dict[str, dict[str, Any]]:
        """Key and seconds of the commands that were done, by whichever process."""
        path = self.out / "runs.json"
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}

    def command(
        self, name: str, words: Sequence[Any], *depends: Any, makes: Path,
        replaces: Path | None = None,
    ) -> None:  # fmt: skip
        """Run a command of this environment, unless it was done with the same facts.

        Args:
            replaces: A folder that has to be gone before.

        Raises:
            SystemExit: it failed; the sentence names its log, and what it ends with.
        """
        key = content_key(list(map(str, words)), versions(), *depends)
        if self.done.get(name, {}).get("key") == key and makes.exists():
            return
        beside = Path(sys.executable).parent / str(words[0])
        words = [beside if beside.exists() else words[0], *words[1:]]
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if replaces is not None and replaces.exists():
            shutil.rmtree(replaces)
        begun = len(log.read_bytes()) if log.exists() else 0

        def say(seconds: float) -> None:
            steps = _STEPS.findall(log.read_bytes()[begun:][-4096:]) if seconds else ()
            done = ", {} of {} steps".format(*(one.decode() for one in steps[-1])) if steps else ""
            far = f": {seconds:.0f} s so far{done}" if seconds else ""
            print(f"{time.strftime('%H:%M:%S')} {self.out.name}: {name}{far}", flush=True)

        say(0)
        began = time.monotonic()
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(self.threads)}
        if self.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        code, processor = _run(list(map(str, words)), log, environment, self.forks, say)
        if code:
            last = "\n".join(log.read_text("utf-8", "replace")[begun:].splitlines()[-15:])
            raise SystemExit(f"{name} ended with exit code {code}; {log} ends with:\n{last}")
        took = {"seconds": round(time.monotonic() - began, 1), "processor": round(processor, 1)}
        with (self.out / "runs.lock").open("w") as lock:  # others of `in_parallel` write it too
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_json(self.out / "runs.json", self.done | {name: {"key": key, **took}})

    def key(self, model: Path | str) -> str:
        """What a model of these runs follows from; the path of another."""
        parts = Path(model)
        inside = self.out in parts.parents
        name = parts.relative_to(self.out).parts[0] if inside else str(model)
        return self.done.get(name, {}).get("key", name)

    def train(self, name: str, example: str, changes: Mapping[str, Any] | None = None) -> Path:
        """`axolotl train` on a changed example, and `merge-lora` after a LoRA; the whole model."""
        config = yaml.safe_load((ROOT / "examples" / f"{example}.yml").read_text("utf-8"))
        folder = self.out / name
        own = {"output_dir": folder, "dataset_prepared_path": self.out / "prepared" / name}
        if self.seed is not None:
            own["seed"] = self.seed
        if config.get("bf16") and self.dtype == "float32":
            own["bf16"] = False
        config = changed(config, RESUMED | own | dict(changes or {}))
        path = self.out / "configs" / f"{name}.yml"
        rows = [Path(entry["path"]) for entry in config["datasets"]]
        facts = [file_digest(row) for row in rows], self.key(config["base_model"])
        write(path, yaml.safe_dump(config, sort_keys=False))
        last = folder / ("adapter_config.json" if config.get("adapter") else "config.json")
        words = ["axolotl", "train", path, "--launcher", "python"]
        self.command(name, words, config, *facts, makes=last)
        for state in folder.glob("checkpoint-*"):
            shutil.rmtree(state)
        if not config.get("adapter"):
            return folder
        words = ["axolotl", "merge-lora", path, "--bf16=false"]
        self.command(f"{name}-merged", words, self.key(folder), makes=folder / "merged/config.json")
        return folder / "merged"

    def merge(self, name: str, recipe: str, base: Path, parents: Sequence[Path]) -> Path:
        """`mergekit-yaml` on a recipe of ``mergekit_configs`` with these models."""
        config = yaml.safe_load((ROOT / "mergekit_configs" / f"{recipe}.yml").read_text("utf-8"))
        config["base_model"] = str(base.resolve())
        for entry, parent in zip(config["models"], parents, strict=True):
            entry["model"] = str(parent.resolve())
        path = write(self.out / "configs" / f"{name}.yml", yaml.safe_dump(config, sort_keys=False))
        facts = [self.key(one) for one in (base, *parents)]
        made = self.out / name / "config.json"
        self.command(name, ["mergekit-yaml", path, made.parent], config, facts, makes=made)
        return made.parent

    def evaluate(
        self, name: str, models: Mapping[str, Path], data: Path, *options: Any
    ) -> dict[str, dict[str, Any]]:
        """`axolotl-unlearn eval`; model -> its entry of ``results.json``."""
        words = ["axolotl-unlearn", "eval", *(f"{key}={path}" for key, path in models.items())]
        words += ["--data", data, "--out", self.out / name, *options]
        facts = [self.key(path) for path in models.values()]
        made = self.out / name / "results.json"
        self.command(name, words, facts, makes=made)
        return {one["name"]: one for one in json.loads(made.read_text("utf-8"))["models"]}


def _run(
    words: list[str], log: Path, environment: dict[str, str], fork: bool,
    say: Callable[[float], None],
) -> tuple[int, float]:  # fmt: skip
    """Exit code and processor seconds of a command and what it started; ``say`` is told the seconds
    of those that take long."""
    script = python_words(words) if fork else None
    with log.open("ab") as file:
        if script is None:
            more = {"env": environment, "preexec_fn": end_with_parent}
            started = subprocess.Popen(words, stdout=file, stderr=file, **more)
            pid = started.pid
        elif not (pid := os.fork()):
            end_with_parent()
            for target, end in enumerate((os.open(os.devnull, os.O_RDONLY), *[file.fileno()] * 2)):
                os.dup2(end, target)
            os.environ.clear()
            os.environ.update(environment)
            become(script)
        began = said = time.monotonic()
        while not (ended := os.wait4(pid, os.WNOHANG))[0]:
            time.sleep(0.05)
            if (now := time.monotonic()) > said + 10 + (said - began) / 4:
                say(now - began)
                said = now
    _, status, used = ended
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def in_parallel(
    jobs: Mapping[str, tuple[Sequence[str], Callable[[], None]]], most: int, minutes: float
) -> dict[str, bool]:
    """Run jobs in forks, at most so many at once, in their order as soon as those that they name have
    ended, well or not; none begins or goes on after ``minutes``. Job -> whether it ended well."""
    ends, running, ended = time.monotonic() + 60 * minutes, {}, {}
    waiting = dict(jobs)
    try:
        while (waiting or running) and time.monotonic() < ends:
            ready = [n for n, (after, _) in waiting.items() if all(one in ended for one in after)]
            for name in ready[: max(0, most - len(running))]:
                _, work = waiting.pop(name)
                if not (pid := os.fork()):
                    end_with_parent()
                    os.setpgid(0, 0)
                    try:
                        work()
                    except BaseException as error:
                        print(f"{name}: {type(error).__name__}: {error}", flush=True)
                        os._exit(1)
                    os._exit(0)
                running[pid] = name
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                ended[running.pop(pid)] = status == 0
            else:
                time.sleep(0.05)
    finally:
        for pid, name in running.items():
            os.killpg(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            ended[name] = False
    return ended
