"""What belongs beside results.json in a report: training logs, trajectories, attacks, configs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.results import Results, load_results
from axolotl_unlearn.metrics.verdict import views_of, whole


def find_inputs(
    results: Results | Mapping[str, Any],
    folder: str | Path,
    *,
    logs: Iterable[str] = (),
    configs: Iterable[str | Path] = (),
    attacks: str | Path | None = None,
) -> dict[str, Any]:
    """Keyword arguments for `write_report`, found beside the models and the results.

    Training logs of all but the original and the retrained model: the newest
    trainer_state.json in the model's folder or its checkpoints, or in the run it lies in (a merged
    adapter is saved inside its run). In the results' folder: trajectory.json; there, of a job in
    its ``eval``: depth.json with uds.json and (or in `attacks`) attacks.json with one file an
    attack.
    `logs` are NAME=PATH and come first.
    """
    from axolotl_unlearn.attacks.results import sentence

    home = folder_of(folder)
    found: dict[str, Path] = {}
    for entry in logs:
        name, equals, path = entry.partition("=")
        if not equals or not path:
            raise UnlearnError(f"--log {entry!r} should be NAME=PATH, e.g. over=out/over.")
        log = _newest_state(Path(path))
        if log is None:
            raise UnlearnError(f"--log {entry!r}: no trainer_state.json at {path}.")
        found[name] = log
    used = set(found.values())
    for model in load_results(results).models:
        if model.part != "candidate":  # memorisation and retraining are no unlearning runs
            continue
        log = None if model.name in found else _log_beside(model.model)
        if log is not None and log not in used:
            found[model.name] = log
            used.add(log)
    extras: dict[str, Any] = {}
    beside = home / "eval" if "job" in load_results(results).more else home
    if (beside / "depth.json").is_file():
        extras["depth"] = _json(beside / "depth.json")
        if (beside / "uds.json").is_file():
            found_depth = _json(beside / "uds.json").get("models") or {}
            extras["depth_sentences"] = {
                name: figures["sentence"]
                for name, figures in found_depth.items()
                if "sentence" in figures
            }
    if (home / "audit.jsonl").is_file():
        extras["audit"] = read_json_lines(home / "audit.jsonl")
    place = Path(attacks) if attacks else beside
    if (place / "attacks.json").is_file():
        extras["attacks"] = _json(place / "attacks.json")
        attacked = extras["attack_results"] = attack_results(place)
        extras["attack_sentences"] = {
            f"{one['attack']} on {one['model']}": sentence(one)
            for one in attacked
            if whole(one.get("rows")) or views_of(one)
        }
    elif attacks:
        raise UnlearnError(
            f"--attacks {place}: no attacks.json there; `axolotl unlearn attack ... --out {place}` "
            "makes it."
        )
    texts = {}
    for path in map(Path, configs):
        if not path.is_file():
            raise UnlearnError(f"--config {path} does not exist.")
        texts[path.name] = path.read_text(encoding="utf-8")
    if texts:
        extras["configs"] = texts
    trajectory = None
    if (home / "trajectory.json").is_file():
        trajectory = _json(home / "trajectory.json")
    return {"training_logs": found, "trajectory": trajectory, "extras": extras}


def folder_of(results: str | Path) -> Path:
    """The folder of an evaluation, given as itself or as its results.json."""
    path = Path(results)
    return path if path.is_dir() else path.parent


def attack_results(folder: Path, but: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """What each attack wrote into a file of its own, ``but`` those files.

    Half a file too: the verdict does not pass over it.
    """
    found = map(_json, sorted({*folder.glob("*-*.json")} - {*but}))
    return [
        one for one in found if isinstance(one, dict) and {"attack", "title", "model"} <= set(one)
    ]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as fault:
        raise UnlearnError(f"{path} is not valid JSON ({fault}); remove or remake it.") from fault


def _log_beside(model: str) -> Path | None:
    """Training log of a model path or of the adapter in "base+adapter"."""
    if not model:
        return None
    path = Path(model.rpartition("+")[2])
    for place in (path, *list(path.parents)[:1]):
        # A model's parent is its run only when it is one: out/over/merged, not out/merged.
        log = _newest_state(place) if place == path or _is_run(place) else None
        if log is not None:
            return log
    return None


def _is_run(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file()


def _newest_state(path: Path) -> Path | None:
    """trainer_state.json of this folder, else of its latest checkpoint; a file is itself."""
    if path.is_file():
        return path
    if (path / "trainer_state.json").is_file():
        return path / "trainer_state.json"
    states = [
        (int(match[1]), state)
        for state in path.glob("checkpoint-*/trainer_state.json")
        if (match := re.fullmatch(r"checkpoint-(\d+)", state.parent.name))
    ]
    return max(states)[1] if states else None
