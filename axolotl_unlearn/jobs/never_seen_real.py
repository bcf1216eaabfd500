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

from axolotl_unlearn.demo.lume import RealSizes, add_heldout
from axolotl_unlearn.jobs.demo import MODEL, REAL_MODELS, plan_real, real_table
from axolotl_unlearn.jobs.never_seen import attacked_words, match_changes, relearn
from axolotl_unlearn.jobs.stages import Evaluate, Kind, Make, Plan, Run, Train, near

#: A third of the 134 retained rows; as many passes as the original had (`never_seen.WELL_READ`).
ROWS = 45


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
    lume: Path, tofu: Path | None, sizes: RealSizes, out: Path, heldout: Sequence[int]
) -> dict[str, Kind]:
    """The stages: demo-real's without its evaluation, and ours."""
    stages = real_table(lume, tofu, sizes, out)
    del stages["eval"]
    teacher = {"model": near(out / MODEL), "adapter": near(out / "teacher")}
    return stages | {
        "heldout": Make(
            lambda plan: add_heldout(lume, plan.data, heldout, sizes),
            "data/heldout.jsonl",
            settings=list(heldout),
            title="choose held-out documents",
            needs=("data",),
        ),
        "teacher": teacher_stage(sizes, 1),
        "match": Train(
            "smollm2/match",
            "memorised",
            match_changes(out, teacher),
            merged=True,
            title="match",
            needs=("teacher", "heldout"),
            share=1,
        ),
        "eval": Evaluate({**REAL_MODELS, "match": "match"}, title="score all models", share=1),
        "attacked": Run(
            lambda plan: attacked_words(plan, {**REAL_MODELS, "match": "match"}, MODEL),
            "attacked.json",
            title="attack all models",
            needs=(MODEL, *REAL_MODELS.values(), "match"),
            share=1,
        ),
        "relearn-match": relearn("match", share=1),
    }


def plan_never_seen_real(
    *places: Any, heldout: Sequence[int] = (12, 10, 40), **options: Any
) -> Plan:
    """The job, not yet started; ``places`` and ``options`` are those of `plan_real`."""
    stages = partial(table, heldout=heldout)
    return plan_real(*places, stages=stages, name="never-seen-real", **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/real"))
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    plan_never_seen_real(given.out, threads=given.threads).show()


if __name__ == "__main__":
    main()
