"""A run over its checkpoints: scores (figure 2 of arXiv 2503.21088) and losses (figure 3)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.weights import read_json
from research.merging.lab import Lab, Score


def checkpoints(run: str | Path) -> dict[int, Path]:
    """Step -> folder of every ``checkpoint-N`` of a run, in order."""
    found = {
        int(match.group(1)): folder
        for folder in Path(run).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", folder.name)) and folder.is_dir()
    }
    if not found:
        raise UnlearnError(
            f"{run} holds no checkpoint-N folders: set save_steps (or saves_per_epoch) and a "
            "save_total_limit large enough, and train again."
        )
    return dict(sorted(found.items()))


def trajectory(
    base: str | Path,
    run: str | Path,
    score: Score,
    *,
    name: str | None = None,
    model: nn.Module | None = None,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Scores of the base (step 0) and of each checkpoint: rows ``{"run", "step", "scores"}``.

    The form that ``report.write_report(trajectory=...)`` draws.
    """
    folders = checkpoints(run)
    lab = Lab(base, list(folders.values()), force=force)
    model = model if model is not None else lab.resident_model()
    rows = []
    for index, step in enumerate([0, *folders]):
        lab.load(model, None if index == 0 else index - 1)
        rows.append({"run": name or Path(run).name, "step": step, "scores": dict(score(model))})
        log(f"step {step}")
    return rows


def losses(
    run: str | Path, keys: Sequence[str] | None = None
) -> dict[str, list[tuple[int, float]]]:
    """Logged curves of a run from its last trainer_state.json: name -> [(step, value)].

    ``keys``: default all that are losses or their parts (loss, forget/..., retain/..., kl, *_nll).
    """
    run = Path(run)
    states = [
        run / "trainer_state.json",
        *(
            folder / "trainer_state.json"
            for folder in sorted(
                run.glob("checkpoint-*"),
                key=lambda folder: int(folder.name.split("-")[-1]),
                reverse=True,
            )
        ),
    ]
    state = next((path for path in states if path.exists()), None)
    if state is None:
        raise UnlearnError(f"{run} holds no trainer_state.json: give the output folder of a run.")
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read_json(state).get("log_history", []):
        for key, value in row.items():
            wanted = key in keys if keys else _is_loss(key)
            if wanted and isinstance(value, int | float) and "step" in row:
                curves.setdefault(key, []).append((int(row["step"]), float(value)))
    return curves


def _is_loss(key: str) -> bool:
    return key in ("loss", "kl") or key.endswith("_nll") or key.startswith(("forget/", "retain/"))
