"""Does forgetting last? What relearning brings back, at the attacker's best rate, beside retraining.

    python -m research.studies.lasting DATA OUT retrained=MODEL match=MODEL npo=MODEL ... [--to NAME]

Each model is fine-tuned on other forget documents and asked about the rest, up to 500 steps, at the best
of five learning rates for it, chosen on one half of the documents and read on the other. The table has
the mean over documents and its 95 % interval; *retrained* is the mark. Resumable; ``--to`` writes
research/results/NAME.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from axolotl_unlearn.attacks.relearn import Training, scores_after, split_forget
from axolotl_unlearn.attacks.target import make_subjects, read_side
from axolotl_unlearn.device import device_name
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from axolotl_unlearn.store import Store
from research.analysis.seeds import facts
from research.runs import ROOT

STEPS, ROWS = (5, 20, 100, 500), 20
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)


def relearned(store: Store, name: str, model: Path, data: Path) -> dict[str, Any]:
    """What comes back at the rate that brings back most of the other half (of equals the lowest); a
    training that diverges is no candidate."""
    trained, asked = split_forget(read_side(data, "forget")[1], ROWS)
    documents = sorted({record.document for record in asked})
    half = set(documents[::2])
    first = [record.id for record in asked if record.document in half]
    second = [record.id for record in asked if record.document not in half]
    subject, _ = make_subjects(f"{name}={model}", asked, device=device_name())
    recalled, tries = {}, {}
    for rate in RATES:
        try:
            scores = scores_after(subject, store, trained, asked, STEPS, Training(rate))
        except UnlearnError:  # NaN in the loss, or in what it says
            continue
        recalled[rate] = fmean(fmean(scores[step].only(first).recalled) for step in STEPS)
        tries[rate] = [{"x": step, **one.only(second).figures()} for step, one in scores.items()]
    best = max(recalled, key=recalled.__getitem__)
    return {"model": name, "training": {"rate": best}, "rates": recalled, "rows": tries[best]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--to")
    given = parser.parse_args()
    store, found = Store(given.out / ".scores"), {}
    for word in given.models:
        name, _, model = word.partition("=")
        found[name] = relearned(store, name, Path(model), given.data)
    content = facts("python -m research.studies.lasting DATA OUT NAME=MODEL ...")
    content["relearned"] = found
    write_json(given.out / "lasting.json", content)
    if given.to:
        write_json(ROOT / "research" / "results" / f"{given.to}.json", content)


if __name__ == "__main__":
    main()
