"""Does forgetting last, and what does it cost? The tiny world of `never_seen`, seed by seed.

    python -m research.studies.lasting 401            # > /work-folder/401; a second call goes on

Seed 401 is for development: recipes are chosen by its scores. Seeds 411 and 412 were named in a
commit before any of their models was made; no recipe is chosen by them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from research.harness.stages import Plan
from research.studies.demo import CPU
from research.studies.never_seen import table
from research.worlds.life import LifeSizes

DEVELOPMENT, FRESH = (401,), (411, 412)
#: What every recipe needs, and what judges it.
WORLD = ("data", "base", "original", "teacher", "retrained", "start")


def plan(out: Path, seed: int, *names: str, threads: int = 2) -> Plan:
    """The stages of these names, by the tables of `never_seen` and this study."""
    stages: dict[str, Any] = table(out, seed, LifeSizes(), full=True)
    chosen = {name: kind for name, kind in stages.items() if name in (*WORLD, *names)}
    return Plan(
        "lasting",
        out,
        chosen,
        seed=seed,
        threads=threads,
        environment=CPU,
    )


if __name__ == "__main__":
    folder, seed, *names = sys.argv[1:]
    plan(Path(folder) / seed, int(seed), *names).job.run()
