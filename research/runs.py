"""Runs of a study: the stock commands on configs made of an example, each done once.

    runs = Runs(Path("out/study"), seed=1)
    original = runs.train("original", "memorise", {"datasets.0.path": data / "all.jsonl"})
    over = runs.train("over", "npo_over", {"base_model": original})
    merged = runs.merge("merged", "ties", original, [over, under])
    scores = runs.evaluate("eval", {"over": over, "merged": merged}, data)

A command is done again if its config, a file that the config names, a version or what it starts from
has changed; a training that was killed goes on from its last state. Commands run one at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.files import write, write_json
from axolotl_unlearn.store import content_key, file_digest, versions

ROOT = Path(__file__).resolve().parents[1]
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
    """

    out: Path
    seed: int | None = None
    threads: int = 2
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        if (self.out / "runs.json").is_file():
            self.done = json.loads((self.out / "runs.json").read_text("utf-8"))

    def command(self, name: str, words: Sequence[Any], *depends: Any, makes: Path) -> None:
        """Run a command of this environment, unless it was done with the same facts.

        Raises:
            SystemExit: it failed; the sentence names its log.
        """
        key = content_key(list(map(str, words)), versions(), *depends)
        if self.done.get(name, {}).get("key") == key and makes.exists():
            return
        beside = Path(sys.executable).parent / str(words[0])
        words = [beside if beside.exists() else words[0], *words[1:]]
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{time.strftime('%H:%M:%S')} {self.out.name}: {name}", flush=True)
        began, before = time.monotonic(), os.times()
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(self.threads)}
        with log.open("ab") as file:
            code = subprocess.call(list(map(str, words)), stdout=file, stderr=file, env=environment)
        if code:
            raise SystemExit(f"{name} ended with exit code {code}; see {log}")
        after = os.times()
        cpu = after.children_user + after.children_system
        cpu -= before.children_user + before.children_system
        seconds = {"seconds": round(time.monotonic() - began, 1), "processor": round(cpu, 1)}
        self.done[name] = {"key": key, **seconds}
        write_json(self.out / "runs.json", self.done)

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
