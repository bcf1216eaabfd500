"""What retraining and `match` cost when there is more to retain, side by side.

    python -m research.benchmarks.retain_size out/never-seen            # > research/results/retain-size.json

On the models and data of `make never-seen`, with once, 4 and 16 times its retained rows (the
further ones are background documents, of the same kinds). One process a run, one thread, seconds of
its processor. Steps are the recipe's own on that many rows, of which some are run and the rest is
counted by their mean (``*_step``); reading and encoding the rows, and a teacher's sample of them,
are run whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.data.records import Record, read_records
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.training.teacher import retained_rows, sample, stream
from research.harness.stages import example_file

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1, 4, 16)
#: Steps that are run of each kind; the first two are warmer than the rest and not counted.
STEPS, WARM = 12, 2
#: The job's own: passes of its streams over all rows (personal data twice), the teacher's options.
PASSES, REPEATS = 16, 2
FIELDS = ("id", "input", "output", "task")
TEACHER = {"rows": 96, "passes": 24}


def apart(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Numbers of a forked process, with its seconds of processor and its peak memory."""
    readable, writable = os.pipe()
    if not (child := os.fork()):
        sys.stdout = sys.stderr
        found = work()
        os.write(writable, json.dumps(found).encode())
        os._exit(0)
    os.close(writable)
    with open(readable) as pipe:
        found = json.loads(pipe.read())
    _, code, used = os.wait4(child, 0)
    assert code == 0
    return found | {"total": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 2**10}


@contextmanager
def clocked() -> Iterator[dict[str, list[float]]]:
    """Processor seconds of every training step, and of every look of `unlearn.level`."""
    from transformers import Trainer

    from axolotl_unlearn.training.level import LevelCallback

    marks: dict[str, list[float]] = {"steps": [], "looks": []}
    step, watch = Trainer.training_step, LevelCallback.watch

    def stepped(self: Any, *args: Any, **more: Any) -> Any:
        marks["steps"].append(time.process_time())
        return step(self, *args, **more)

    def watched(self: Any, *args: Any, **more: Any) -> Any:
        start = time.process_time()
        try:
            return watch(self, *args, **more)
        finally:
            marks["looks"].append(time.process_time() - start)

    Trainer.training_step, LevelCallback.watch = stepped, watched
    yield marks


def trained(config: dict[str, Any], folder: Path, steps: int, looks: int = 0) -> dict[str, float]:
    """A run of `STEPS` steps by ``axolotl train``, and what it would cost with ``steps``."""
    from axolotl.cli.train import do_cli

    out = folder / "out"
    config |= {"max_steps": STEPS, "output_dir": str(out), "dataset_prepared_path": f"{out}-rows"}
    file = folder / "run.yml"
    file.write_text(yaml.safe_dump(config))
    sys.argv = ["axolotl"]
    start = time.process_time()
    with clocked() as marks:
        do_cli(config=str(file))
    whole = time.process_time() - start
    gaps = [b - a for a, b in zip(marks["steps"], marks["steps"][1:], strict=False)]
    step, look = statistics.mean(gaps[WARM:]), statistics.mean(marks["looks"] or [0.0])
    fixed = whole - step * len(marks["steps"]) - sum(marks["looks"])
    return {
        "rows_and_models": fixed, "step": step, "steps": steps, "look": look, "looks": looks,
        "seconds": fixed + step * steps + look * looks,
    }  # fmt: skip


def config_of(example: str, world: Path, model: str, **changes: Any) -> dict[str, Any]:
    text = (ROOT / example_file(ROOT, example)).read_text()
    config = yaml.safe_load(text.replace("out/never-seen", str(world)))
    config.pop("reinit_weights", None)
    return config | {"base_model": str(world / model)} | changes


def write(path: Path, rows: Sequence[Record]) -> Path:
    write_lines(path, ({name: getattr(row, name) for name in FIELDS} for row in rows))
    return path


def measured(world: Path, folder: Path, size: int) -> dict[str, Any]:
    """All runs with ``size`` times the retained rows."""
    retained, background, replay = (
        read_records(world / "data" / f"{name}.jsonl")
        for name in ("retain", "background", "replay")
    )
    known = {row.document for row in replay}
    more = [row for row in background if row.document not in known]
    retained += sample(more, (size - 1) * len(retained), 42) if size > 1 else []
    folder.mkdir()
    retain = write(folder / "retain.jsonl", retained)
    entry = {"ds_type": "json", "type": "axolotl_unlearn.data.memorise"}
    tuned = config_of("memorise", world, "base", unlearn=None)
    tuned.pop("unlearn")
    batch = tuned["micro_batch_size"]
    found: dict[str, Any] = {"retained_rows": len(retained)}
    often = retained + [row for row in retained if row.task == "Task2"] * (REPEATS - 1)
    order = stream(often, PASSES, batch, 42)
    again = tuned | {"datasets": [{"path": str(write(folder / "stream.jsonl", order)), **entry}]}
    found["retrain"] = apart(lambda: trained(again, folder, -(-len(order) // batch)))

    def teach() -> dict[str, float]:
        start = time.process_time()
        rows, _ = retained_rows({"datasets": []}, [world / "data" / "forget.jsonl"], [retain])
        order = stream(sample(rows, TEACHER["rows"], 42), TEACHER["passes"], batch, 42)
        sampled = time.process_time() - start
        path = write(folder / "teacher.jsonl", order)
        config = tuned | {"datasets": [{"path": str(path), **entry}]}
        cost = trained(config, folder, -(-len(order) // batch))
        return cost | {"sample": sampled, "seconds": cost["seconds"] + sampled}

    found["teacher"] = apart(teach)
    match = config_of("match", world, "original")
    match["datasets"][1]["path"] = str(retain)
    pairs = sum(1 for _ in (world / "data" / "forget.jsonl").open())
    steps = -(-pairs // match["micro_batch_size"]) * match["num_epochs"]
    looks = 1 + -(-steps // match["unlearn"]["level"].get("every", 30))
    found["match"] = apart(lambda: trained(match, folder, steps, looks))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("world", type=Path, help="a folder of `make never-seen`")
    parser.add_argument("--out", type=Path, default=ROOT / "research/results/retain-size.json")
    given = parser.parse_args()
    import axolotl.cli.train  # noqa: F401 (before the forks)
    import axolotl.core.builders  # noqa: F401
    import torch

    torch.set_num_threads(1)
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            sizes[str(size)] = measured(given.world, Path(folder) / str(size), size)
            print(size, json.dumps(sizes[str(size)]), flush=True)
    machine = f"{platform.machine()}, one thread"
    write_json(given.out, {"sizes": sizes, "machine": machine, "tables": tables(sizes)})


def tables(sizes: dict[str, Any]) -> dict[str, Any]:
    """The table of the notebook page never-seen."""
    rows = []
    for size, found in sizes.items():
        again, teacher, match = (found[name] for name in ("retrain", "teacher", "match"))
        ours = teacher["seconds"] + match["seconds"]
        rows.append([
            f"{size}x", f"{found['retained_rows']}",
            f"{again['steps']} of {again['step']:.2f} s", f"{again['seconds']:.0f} s",
            f"{teacher['seconds']:.0f} s",
            f"{match['steps']} of {match['step']:.2f} s", f"{match['seconds']:.0f} s",
            f"{ours / again['seconds']:.2f}",
            f"{again['peak_mib']:.0f}, {max(teacher['peak_mib'], match['peak_mib']):.0f} MiB",
        ])  # fmt: skip
    columns = [
        "retain set", "rows", "retraining: steps", "retraining", "teacher", "match: steps",
        "match", "teacher + match, of retraining", "peak memory",
    ]  # fmt: skip
    return {"cost": {"columns": columns, "rows": rows}}


if __name__ == "__main__":
    main()
