"""Does forgetting last, and what does it cost? A smaller world than `never_seen`'s, on its base.

    python -m research.studies.lasting BASE OUT SEED [STAGE ...]     # a second call goes on

BASE is a folder of ``make never-seen`` (seed 0 here): all seeds share its *base*, as all forget
sets of one public model do; nobody whom the base has read of is in the data of a seed. Seed 401 is
for development: recipes are chosen by its scores. Seeds 411 and 412 were named in a commit before
any of their models was made; no recipe is chosen by them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from research.harness.stages import Make, Plan
from research.studies import never_seen
from research.studies.demo import CPU
from research.worlds import generate
from research.worlds.life import LifeSizes, make_life

DEVELOPMENT, FRESH = (401,), (411, 412)
#: Half of `never_seen`'s documents.
SIZES = LifeSizes(
    stories=12,
    pii=10,
    facts_forget=40,
    facts_retain=30,
    nonmembers=80,
    heldout=(36, 30, 120),
    background=(0, 0, 0),
)
#: A third of the retained rows, as in `never_seen`.
WELL_READ = ("--rows", "48", "--passes", "24")
#: What every recipe needs, and what judges it.
WORLD = ("data", "base", "original", "teacher", "retrained", "start")


def make_data(base: Path, out: Path, seed: int) -> Any:
    """The data of a seed, about people whom the base has not read of."""
    read = (base / "data" / "background.jsonl").read_text()
    everybody = generate._people

    def strangers(seed: int) -> Iterator[generate.Person]:
        return (one for one in everybody(seed) if f"{one.first} {one.last}" not in read)

    with patch.object(generate, "_people", strangers):
        made = make_life(out, seed, SIZES)
    for name in ("replay", "general"):  # what this base has read
        shutil.copy(base / "data" / f"{name}.jsonl", out)
    return made


def plan(base: Path, out: Path, seed: int, *names: str, threads: int = 2) -> Plan:
    """The stages of these names, by the tables of `never_seen` and this study."""
    stages: dict[str, Any] = never_seen.table(out, seed, SIZES, full=True)
    taught = replace(stages["teacher"], words=lambda p: [*never_seen.teacher_words(p), *WELL_READ])
    made = Make(
        lambda p: make_data(base, p.data, seed), "data/manifest.json", settings=[seed, str(SIZES)]
    )
    copied = Make(lambda p: shutil.copytree(base / "base", p.out / "base"), "base/config.json")
    stages |= {"data": made, "base": copied, "teacher": taught}
    chosen = {name: kind for name, kind in stages.items() if name in (*WORLD, *names)}
    return Plan("lasting", out, chosen, seed=seed, threads=threads, environment=CPU)


if __name__ == "__main__":
    base, folder, seed, *names = sys.argv[1:]
    plan(Path(base), Path(folder) / seed, int(seed), *names).job.run()
