"""Run every test file in a pytest process of its own, two at a time.

Axolotl, lm-eval, mergekit and bitsandbytes all change global state when they are imported (logging,
start methods, thread pools). In a single process pytest ends early with "lost sys.stderr" once some
of the files are collected together; which import does it was not found.

    python tests/each_file.py [pytest options]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
NO_TESTS = 5  # pytest's exit code when a filter leaves nothing


def run(path: Path) -> tuple[Path, int, str]:
    command = [sys.executable, "-m", "pytest", str(path), *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    return path, done.returncode, done.stdout + done.stderr


def is_slow(path: Path) -> bool:
    return "pytest.mark.slow" in path.read_text("utf-8")


def main() -> int:
    # Files with slow tests last: a fault that shows in seconds should not wait for them.
    files = sorted(HERE.glob("test_*.py"), key=lambda p: (is_slow(p), p))
    totals = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}
    bad = []
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for done in as_completed([pool.submit(run, file) for file in files]):
            path, code, said = done.result()
            last = said.strip().splitlines()[-1] if said.strip() else ""
            for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last):
                totals[kind] += int(count)
            print(f"{path.name:<36} {last}", flush=True)
            if code not in (0, NO_TESTS):
                bad.append(path.name)
                print(said[-6000:], flush=True)
    failed = totals["failed"] + totals["error"] + (0 if not bad else int(not totals["failed"]))
    if bad:
        print("failed: " + " ".join(bad))
    print(f"{totals['passed']} passed, {failed} failed, {totals['skipped']} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
