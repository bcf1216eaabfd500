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
from research.harness.stages import Evaluate, Kind, Make, Plan, Train
from research.studies.demo import CPU, MEMBERS
from research.worlds.life import LifeSizes, make_life

RESULTS = Path(__file__).parents[1] / "results" / "path-dependence.json"
SIZES = LifeSizes(
    stories=6, pii=5, facts_forget=24, facts_retain=18, nonmembers=48, heldout=(1, 1, 1),
    background=(40, 30, 120), general=20, replay=0, replay_rows=0, base_passes=3,
)  # fmt: skip
PASSES = 12


def streams(plan: Plan) -> Path:
    """A stream of each side, ``PASSES`` passes of it, shuffled, 16 rows of like length a batch."""
    make_life(plan.data, seed=plan.seed, sizes=SIZES)
    for side in ("forget", "retain"):
        rng, rows = (
            random.Random(f"{plan.seed}/{side}"),
            read_json_lines(plan.data / f"{side}.jsonl"),
        )
        order = [row for _ in range(PASSES) for row in rng.sample(rows, len(rows))]
        batches = []
        for start in range(0, len(order), 256):  # like lengths together, within a window
            window = sorted(order[start : start + 256], key=lambda r: len(r["input"] + r["output"]))
            batches += [window[i : i + 16] for i in range(0, len(window), 16)]
        rng.shuffle(batches)
        write_lines(plan.data / f"{side}-stream.jsonl", (row for batch in batches for row in batch))
    return plan.data / "manifest.json"


def table() -> dict[str, Kind]:
    """Base; both orders; the retained documents alone; the same unlearning of both."""

    def stage(base: str, side: str) -> Train:
        path = {"datasets.0.path": f"{side}-stream.jsonl", "reinit_weights": None}
        return Train("memorise", base, path)

    stages: dict[str, Kind] = {
        "data": Make(streams, "data/manifest.json", settings=PASSES),
        "base": Train("memorise", "examples/tiny-olmo", {"datasets.0.path": "base.jsonl"}),
        "forget": stage("base", "forget"),
        "retrained": stage("base", "retain"),
        "forget_first": stage("forget", "retain"),
        "forget_last": stage("retrained", "forget"),
    }
    plain = {"save_strategy": "no", "save_total_limit": None, "num_epochs": 4}
    for name in ("forget_first", "forget_last"):
        stages[f"{name}_npo"] = Train("npo_under", name, plain, merged=True)
    models = {"original": "forget_last", "forget_first": "forget_first", "retrained": "retrained"}
    models |= {name: name for name in stages if name.endswith("_npo")}
    return stages | {"eval": Evaluate(models, options=MEMBERS)}


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out/path")
    found = Plan("path dependence", out, table(), seed=0, environment=CPU).run()
    models = {
        model["name"]: [model["mia_auc"], *model["intervals"]["mia_auc"]]
        for model in found["models"]
    }
    models["forget_last"] = models.pop("original")
    names = ("forget_first", "forget_first_npo", "forget_last", "forget_last_npo", "retrained")
    rows = [[name, "{:.2f} [{:.2f}, {:.2f}]".format(*models[name])] for name in names]
    shown = {"columns": ["model", "AUC of the loss"], "rows": rows}
    command = "python -m research.studies.path_dependence"
    content = {"command": command, "passes": PASSES, "auc": models}
    write_json(RESULTS, content | {"tables": {"path": shown}})


if __name__ == "__main__":
    main()
