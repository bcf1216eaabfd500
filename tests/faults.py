"""Run the tests of faults and print what they did: `make test-faults`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
FILES = (
    "test_files",
    "test_fuzz",
    "test_requests_ledger",
    "../research/tests/test_jobs_runner",
    "test_requests_steps",
    "test_training_resume",
    "test_requests_run",
    # The tests of kills alone.
    "test_merging_run kill_9",
    "test_performance_reference kill_9",
    "test_training_augment kill_9",
    "test_training_level killed",
    "test_jobs_demo killed",
    "test_jobs_reproduce kill_9",
)
NAMES = ("faults injected", "bad inputs tried", "runs killed and resumed", "differences found")


def main() -> int:
    failed, counts = [], Counter(dict.fromkeys(NAMES, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts"
        environment = {**os.environ, "FAULT_COUNTS": str(path)}
        for name in FILES:
            file, *only = name.split()
            command = [sys.executable, "-m", "pytest", "-q", str(HERE / f"{file}.py")]
            command += ["-k", *only] if only else []
            if subprocess.run(command, env=environment, cwd=HERE.parent).returncode:
                failed.append(name)
        for line in path.read_text().splitlines() if path.exists() else ():
            counts.update(json.loads(line))
    for name in NAMES:
        print(f"{name:<26} {counts[name]:>8}")
    print(f"{'files with failed tests':<26} {len(failed):>8} {' '.join(failed)}")
    return 1 if failed or counts["differences found"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
