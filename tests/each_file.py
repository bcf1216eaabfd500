"""Run every test file in a process of its own, two at a time: `make test`.

Axolotl, lm-eval, mergekit and bitsandbytes all change global state when they are used (logging,
plug-ins, patched classes), so that files do not share a process. Their import alone takes 10 s;
this process does it once and forks a child per file, which costs nothing.

    python tests/each_file.py [tests/test_a.py ...] [pytest options]
"""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import importlib
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

import offline  # noqa: F401  the environment, before any of them is imported

HERE = Path(__file__).parent
FOLDERS = (HERE, HERE.parent / "research" / "tests")
NO_TESTS = 5  # pytest's exit code when a filter leaves nothing
NO_SUMMARY = "ended without a summary"
LANES = min(2, len(os.sched_getaffinity(0)))

#: Imported once, before the forks. Only other people's modules, and only those whose import starts
#: no thread of computation and no CUDA.
PRELOADED = (
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.olmo.modeling_olmo",
    "datasets",
    "scipy.stats",
    "sklearn.metrics",
    "pandas",
    "peft",
    "mergekit.merge",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "trl",
    "axolotl.core.builders",
    "axolotl.cli.train",
)

#: The longest files, longest first; then the other files with slow tests.
LONGEST = (
    "test_performance_distributed",
    "test_eval_parity",
    "test_jobs_tofu",
    "test_jobs_demo",
    "test_train_axolotl",
    "test_merging_tune",
    "test_eval_run",
    "test_stock_commands",
    "test_every_method",
    "test_fuzz",
)


def remember_for_lm_eval() -> None:
    """What lm-eval finds out anew in every evaluation: its 12 000 task files (6 s), pip's list."""
    from lm_eval import tasks
    from torch.utils import collect_env

    home = os.path.dirname(os.path.abspath(tasks.__file__)) + "/"
    read = tasks.TaskManager._get_task_and_group

    @functools.cache
    def own(changed: int) -> dict:
        return read(tasks.TaskManager(include_defaults=False), home)

    def remembered(self: tasks.TaskManager, folder: str) -> dict:
        at_home = folder == home
        return copy.deepcopy(own(os.stat(home).st_mtime_ns)) if at_home else read(self, folder)

    tasks.TaskManager._get_task_and_group = remembered
    tasks.TaskManager()
    collect_env.get_pip_packages = functools.cache(collect_env.get_pip_packages)
    collect_env.get_pip_packages(collect_env.run)


def leave(code: int) -> NoReturn:
    """End without taking apart all that was imported: 4 s, and nanobind complains of leaks."""
    atexit._run_exitfuncs()  # pytest clears its temporary folders there
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(path: Path, output: int, options: list[str]) -> int:
    """A child that runs the file's tests and writes to the descriptor; its process id."""
    child = os.fork()
    if child:
        return child
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Of pytest's plug-ins, which are there already.
    quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    sys.argv = ["pytest", "-W", quiet, str(path), *options]
    import pytest

    leave(int(pytest.main(sys.argv[1:])))


def is_slow(path: Path) -> bool:
    return path.stem in LONGEST or "pytest.mark.slow" in path.read_text("utf-8")


def order(files: list[Path]) -> tuple[deque[Path], deque[Path]]:
    """Files with slow tests, the longest first, and the others."""
    slow = [path for path in files if is_slow(path)]
    slow.sort(key=lambda path: LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST))
    return deque(slow), deque(path for path in files if path not in slow)


def summary(said: str) -> str:
    """pytest's last line; libraries may print more when they end."""
    lines = [line for line in said.splitlines() if re.search(r" in [\d.]+s( \(.*\))?$", line)]
    return lines[-1].strip(" =") if lines else NO_SUMMARY


def main() -> int:
    began = time.monotonic()
    os.chdir(HERE.parent)
    sys.path[0] = str(HERE.parent)  # as `python -m pytest` has it
    for name in PRELOADED:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    remember_for_lm_eval()
    gc.collect()
    gc.freeze()  # the children share these objects instead of walking through them
    totals = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}
    bad, processor = [], 0.0
    # One lane takes the long files first, lest one of them is alone at the end; the other the quick
    # ones, whose faults show early. A lane without files of its own helps the other.
    named = [Path(word).resolve() for word in sys.argv[1:] if word.endswith(".py")]
    options = [word for word in sys.argv[1:] if not word.endswith(".py")]
    slow, quick = order(
        named or sorted(path for folder in FOLDERS for path in folder.glob("test_*.py"))
    )
    lanes = deque([(quick, slow), (slow, quick)][:LANES])
    running: dict[int, tuple] = {}
    while running or slow or quick:
        while lanes and (slow or quick):
            lane = lanes.popleft()
            path = (lane[0] or lane[1]).popleft()
            output = tempfile.TemporaryFile()
            running[start(path, output.fileno(), options)] = (path, output, lane)
        child, status, used = os.wait4(-1, 0)
        path, output, lane = running.pop(child)
        lanes.append(lane)
        code = os.waitstatus_to_exitcode(status)
        output.seek(0)
        with output:
            said = output.read().decode("utf-8", errors="replace")
        last = f"killed by {signal.Signals(-code).name}" if code < 0 else summary(said)
        for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last):
            totals[kind] += int(count)
        seconds = used.ru_utime + used.ru_stime
        processor += seconds
        print(f"{path.name:<36} {last}, {seconds:.0f} s of processor", flush=True)
        if code not in (0, NO_TESTS) or last == NO_SUMMARY:
            bad.append(path.name)
            print(said[-6000:], flush=True)
    failed = totals["failed"] + totals["error"] + (0 if not bad else int(not totals["failed"]))
    if bad:
        print("failed: " + " ".join(bad))
    print(f"{(time.monotonic() - began) / 60:.1f} minutes, {processor / 60:.1f} of processor")
    print(f"{totals['passed']} passed, {failed} failed, {totals['skipped']} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    leave(main())
