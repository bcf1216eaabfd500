"""Does forgetting last? What relearning brings back, at the attacker's best rate, beside retraining.

    python -m research.studies.lasting DATA OUT retrained=MODEL match=MODEL npo=MODEL ... [--to NAME]

Each model is fine-tuned on other forget documents and asked about the rest, up to 500 steps, at the best
of five learning rates for it, chosen on one half of the documents and read on the other
(`axolotl-unlearn attack relearn --lr best-of-five`). The table has the mean over documents and its 95 %
interval; *retrained* is the mark. Resumable; ``--to`` writes research/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_json
from research.analysis.seeds import facts
from research.runs import ROOT, Runs

STEPS = "5,20,100,500"


def relearned(runs: Runs, name: str, model: Path, data: Path) -> dict[str, Any]:
    """What the attack writes of one model."""
    out = runs.out / name
    words = ["axolotl-unlearn", "attack", "relearn", f"{name}={model}", "--data", data]
    words += ["--out", out, "--source", "forget", "--steps", STEPS, "--lr", "best-of-five"]
    runs.command(f"relearn-{name}", words, makes=out / "relearn.json")
    return json.loads((out / "relearn.json").read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--to")
    given = parser.parse_args()
    runs, found = Runs(given.out), {}
    for word in given.models:
        name, _, model = word.partition("=")
        found[name] = relearned(runs, name, Path(model), given.data)
    content = facts("python -m research.studies.lasting DATA OUT NAME=MODEL ...")
    content["relearned"] = found
    write_json(given.out / "lasting.json", content)
    if given.to:
        write_json(ROOT / "research" / "results" / f"{given.to}.json", content)


if __name__ == "__main__":
    main()
