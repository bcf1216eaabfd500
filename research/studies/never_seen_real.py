"""``make never-seen-real``: `match` on SmolLM2 and LUME, on top of demo-real's models.

Its stages are those of demo-real (kept, where that job has run in the same folder), held-out rows,
the teacher and `match`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from research.harness.stages import Evaluate, Kind, Make, Merge, Plan, Run, Train, near
from research.studies.demo import MODEL, REAL_MODELS, plan_real, real_table
from research.studies.never_seen import (
    PAIR,
    attacked_words,
    attacks,
    match_changes,
    start_stage,
)
from research.worlds.lume import RealSizes, add_heldout

#: A third of the 134 retained rows; as many passes as the original had (`never_seen.WELL_READ`).
ROWS = 45
#: Asking all 164 rows takes minutes: relearning at the step that is judged, the others of fewer.
#: The tiny model's learning rate would wreck this one.
FEWER = {
    "relearn": ("--source", "forget", "--rows", "20", "--lr", "1e-4", "--steps", "5"),
    "quantise": ("--limit", "60"),
    "prompt": ("--limit", "60"),
    "depth": ("--limit", "60"),
    "inside": (),
}
#: As in examples/match.yml.
GRADIENTS = {"objective": "gradient_norm_matching", "kinds": "completion", "weight": 0.05}


def teacher_words(plan: Plan, passes: int) -> list[str | Path]:
    """The command that makes the teacher from the original's own config."""
    words = [
        *("axolotl", "unlearn", "teacher", near(plan.out / "configs" / "memorised.yml")),
        *("--rows", str(ROWS), "--passes", str(passes)),
        *("--forget", near(plan.data / "forget.jsonl")),
        *("--retain", near(plan.data / "retain.jsonl"), "--out", near(plan.out / "teacher")),
    ]
    return [*words, "--no-bf16"] if "--bf16=false" in plan.train_options else words


def teacher_stage(sizes: RealSizes, share: float) -> Run:
    return Run(
        lambda plan: teacher_words(plan, sizes.passes),
        "teacher/adapter_model.safetensors",
        title="teacher",
        needs=(MODEL, "data"),
        share=share,
    )


def table(
    lume: Path,
    tofu: Path | None,
    sizes: RealSizes,
    out: Path,
    heldout: Sequence[int],
    seed: int = 0,
    pair: bool = True,
    gradients: bool = False,
) -> dict[str, Kind]:
    """The stages: demo-real's without its evaluation, and ours.

    Args:
        heldout: Held-out documents of each task.
        seed: Chooses the documents.
        pair: Also the paper's two runs and their merge.
        gradients: `match` has `gradient_norm_matching` too.
    """
    stages = real_table(lume, tofu, sizes, out, seed)
    judged = {name: stage for name, stage in REAL_MODELS.items() if pair or stage not in PAIR}
    stages = {name: kind for name, kind in stages.items() if pair or name not in PAIR}
    del stages["eval"]
    # What a teacher that never saw the texts is away from the retrained model is how much two such
    # models differ.
    judged |= {"teacher": "whole-teacher", "match": "match"}
    teacher = {"model": near(out / MODEL), "adapter": near(out / "teacher")}
    match = match_changes(out, out / "memorised" / "merged", teacher)
    if gradients:
        match["unlearn.forget.6"] = GRADIENTS
    stages |= {
        "heldout": Make(
            lambda plan: add_heldout(lume, plan.data, heldout, sizes, seed),
            "data/heldout.jsonl",
            settings=[*heldout, *([seed] if seed else [])],
            title="choose held-out documents",
            needs=("data",),
        ),
        "teacher": teacher_stage(sizes, 1),
        "whole-teacher": Merge(
            MODEL, ("teacher",), options=("--method", "linear"), title="merge the teacher"
        ),
        "start": start_stage(MODEL, "memorised"),
        "match": Train(
            "smollm2/match",
            "start",
            match,
            merged=True,
            title="match",
            needs=("teacher", "heldout"),
            share=1,
        ),
        "eval": Evaluate(judged, title="score all models", share=1),
        "attacked": Run(
            lambda plan: attacked_words(plan, judged, MODEL),
            "attacked.json",
            title="attack all models",
            needs=(MODEL, *judged.values()),
            share=1,
        ),
    }
    return stages | attacks(["match"], "memorised", FEWER, share=1)


def plan_never_seen_real(
    *places: Any,
    heldout: Sequence[int] = (12, 10, 40),
    seed: int = 0,
    pair: bool = True,
    gradients: bool = False,
    **options: Any,
) -> Plan:
    """The job, not yet started; ``places`` and ``options`` are those of `plan_real`."""
    stages = partial(table, heldout=heldout, seed=seed, pair=pair, gradients=gradients)
    return plan_real(*places, stages=stages, name="never-seen-real", **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/real"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0, help="chooses the documents")
    parser.add_argument("--no-pair", action="store_true", help="not the paper's runs and merge")
    parser.add_argument(
        "--gradients", action="store_true", help="match with gradient_norm_matching"
    )
    given = vars(parser.parse_args())
    pair = not given.pop("no_pair")
    plan_never_seen_real(given.pop("out"), pair=pair, **given).show()


if __name__ == "__main__":
    main()
