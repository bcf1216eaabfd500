"""`make demo`: the commands of examples/README.md, up to three at a time, with logs in out/logs.

A command is done again only if its config, the demo's rows or what it stands on has changed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

from axolotl_unlearn.store import file_digest
from research.harness import import_libraries
from research.runs import Runs, in_parallel

OUT, PAGE = Path("out"), Path("examples/README.md")
#: In the order of the page: the names before each, and what it makes.
STEPS = {
    "memorise": ("", "memorised/model.safetensors"),
    "retrain": ("", "retrained/model.safetensors"),
    "forget-over": ("memorise", "over/adapter_model.safetensors"),
    "forget-under": ("memorise", "under/adapter_model.safetensors"),
    "adapter-over": ("forget-over", "over/merged/model.safetensors"),
    "adapter-under": ("forget-under", "under/merged/model.safetensors"),
    "merge": ("memorise adapter-over adapter-under", "merged/model.safetensors"),
    "request": ("memorise", "deletion/demo/request.json"),
    "delete": ("request", "deletion/demo/record.json"),
    "score": ("merge delete retrain", "eval/results.json"),
    "report": ("score", "eval/report.html"),
}
#: These end when nothing else runs. The number of threads does not change the weights.
ALONE = ("memorise", "score")
FORKS = sys.platform == "linux"


def commands() -> list[list[str]]:
    """Those of the page, without comments."""
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def work(name: str, words: list[str]) -> None:
    after, makes = STEPS[name]
    runs = Runs(OUT, threads=2 if name in ALONE else 1, forks=FORKS)
    done, before = runs.done, after.split()
    if lacking := [n for n in before if n not in done or not (OUT / STEPS[n][1]).exists()]:
        raise SystemExit(f"{name} needs {', '.join(lacking)}")
    read = [*Path("examples/demo").glob("*.jsonl"), *(Path(w) for w in words if w.endswith(".yml"))]
    facts = [done[one]["key"] for one in before], [*map(file_digest, sorted(read))]
    stale = OUT / "deletion" if name == "request" else None
    runs.command(name, words, facts, makes=OUT / makes, replaces=stale)


def main() -> None:
    if FORKS:  # what they say while they are imported is not of the demo
        (OUT / "logs").mkdir(parents=True, exist_ok=True)
        kept = os.dup(1), os.dup(2)
        with (OUT / "logs/imports.log").open("w") as log:
            for target in (1, 2):
                os.dup2(log.fileno(), target)
            try:
                import_libraries()
            finally:
                for target, end in enumerate(kept, 1):
                    os.dup2(end, target)
    *chain, report = [(name, words) for name, words in zip(STEPS, commands(), strict=False)]
    jobs = {name: (STEPS[name][0].split(), partial(work, name, words)) for name, words in chain}
    try:
        ended = in_parallel(jobs, 3, 60)
    except KeyboardInterrupt:
        raise SystemExit("stopped; `make demo` goes on") from None
    raise SystemExit(subprocess.call(report[1]) if all(ended.values()) else 1)


if __name__ == "__main__":
    main()
