"""Does it matter in which order a model learned? Two orders of the same stages, unlearned alike.

    python -m research.studies.path_dependence out/path

arXiv 2510.16629 (whose models, data and measure are other ones): what local unlearning leaves
depends on the order of the training stages, so no method that does not know the order reaches the
retrained model from both. A base learns forget documents, then others, or the others first; the
same NPO run follows. Writes ``path-dependence.json``: AUC of the loss before and after of both orders. At this size the
models answer hardly any question, so no other score says anything.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from research.runs import KEEP, NPO, ROOT, Runs
from research.worlds.life import LifeSizes, make_life

RESULTS = ROOT / "research" / "results" / "path-dependence.json"
SIZES = LifeSizes(
    stories=6, pii=5, facts_forget=24, facts_retain=18, nonmembers=48, heldout=(1, 1, 1),
    background=(40, 30, 120), general=20, replay=0, replay_rows=0, base_passes=3,
)  # fmt: skip
PASSES = 12
ORDERED = {"curriculum_sampling": True, "shuffle_merged_datasets": False, "num_epochs": 1,
           "group_by_length": False}  # fmt: skip


def streams(data: Path, seed: int) -> None:
    """A stream of each side, ``PASSES`` passes of it, shuffled, 16 rows of like length a batch."""
    make_life(data, seed=seed, sizes=SIZES)
    for side in ("forget", "retain"):
        rng, rows = random.Random(f"{seed}/{side}"), read_json_lines(data / f"{side}.jsonl")
        order = [row for _ in range(PASSES) for row in rng.sample(rows, len(rows))]
        batches = []
        for start in range(0, len(order), 256):  # like lengths together, within a window
            window = sorted(order[start : start + 256], key=lambda r: len(r["input"] + r["output"]))
            batches += [window[i : i + 16] for i in range(0, len(window), 16)]
        rng.shuffle(batches)
        write_lines(data / f"{side}-stream.jsonl", (row for batch in batches for row in batch))


def models(runs: Runs, data: Path) -> dict[str, Path]:
    """Base; both orders; the retained documents alone; the same unlearning of both."""
    streams(data, runs.seed)

    def rows(name: str, type_: str) -> dict[str, str]:
        path = str(data / f"{name}.jsonl")
        return {"path": path, "ds_type": "json", "type": f"axolotl_unlearn.data.{type_}"}

    def learn(name: str, stream: str, base: Path | None = None) -> Path:
        changes = ORDERED | {"datasets": [rows(stream, "memorise")]}
        changes |= {"base_model": base, "reinit_weights": None} if base else {}
        return runs.train(name, "memorise", changes)

    base = learn("base", "base")
    forget, retained = (learn(s, f"{s}-stream", base) for s in ("forget", "retain"))
    found = {
        "forget_first": learn("forget_first", "retain-stream", forget),
        "forget_last": learn("forget_last", "forget-stream", retained),
        "retrained": retained,
    }
    for name in ("forget_first", "forget_last"):
        sides = [rows("forget", "forget"), rows("retain", "retain")]
        changes = {"base_model": found[name], "datasets": sides, "num_epochs": 4}
        changes |= {"unlearn.forget": NPO | {"beta": 0.1}, "unlearn.retain": KEEP}
        found[f"{name}_npo"] = runs.train(f"{name}_npo", "npo_under", changes)
    return found


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out/path")
    runs = Runs(out, seed=0)
    made = models(runs, out / "data")
    options = ("--original", "forget_last", "--min-members", "10")
    found = runs.evaluate("eval", made, out / "data", *options)
    auc = {name: [one["mia_auc"], *one["intervals"]["mia_auc"]] for name, one in found.items()}
    names = ("forget_first", "forget_first_npo", "forget_last", "forget_last_npo", "retrained")
    rows = [[name, "{:.2f} [{:.2f}, {:.2f}]".format(*auc[name])] for name in names]
    shown = {"columns": ["model", "AUC of the loss"], "rows": rows}
    command = "python -m research.studies.path_dependence"
    content = {"command": command, "passes": PASSES, "auc": auc}
    write_json(RESULTS, content | {"tables": {"path": shown}})


if __name__ == "__main__":
    main()
