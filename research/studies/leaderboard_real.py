"""``make leaderboard-real``: the leaderboard's table for SmolLM2 with LUME.

First the models that all methods share: the original, the retrained model, and a teacher as
`axolotl-unlearn teacher` makes it (`match` compares with it; the retrained model only judges).
"""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from research.harness.stages import Kind, Make, near
from research.studies.demo import MODEL, memories, plan_real, real_table
from research.studies.leaderboard import TRIALS, World, leaderboard
from research.studies.methods import RETAIN
from research.studies.never_seen_real import teacher_stage
from research.worlds.lume import RealSizes, add_halves

#: Twice the forget documents of demo-real, so that either half has 40 members and 60 non-members.
SIZES = RealSizes(
    stories=24, pii=20, facts_forget=80, facts_retain=50, background_facts=60, background_pii=20
)
#: Chosen before any of them was run here.
METHODS = "npo,npo + gu,npo-sam,simnpo,wga,tnpo,wtnpo,undial,rmu,match"
#: With `--small`, for two cores without bf16: demo-real's documents (20 members a half).
SMALL, FEWER = RealSizes(), 3
#: Four passes over all forget rows; RMU looks at half of the depth, its LoRA begins at layer 10.
CHANGES = {"num_epochs": 4, "max_steps": None}
LAYER = 15
#: The default of `axolotl-unlearn attack relearn`; the tiny model's 1e-3 wrecks this one.
RATE = 1e-4
#: Questions apart, as in the example: their few tokens drown in the documents'.
APART = [*({"objective": "nll", "kinds": kind} for kind in ("completion", "question")), *RETAIN[1:]]


def table(
    lume: Path, tofu: Path | None, sizes: RealSizes, out: Path, documents: int = 0
) -> dict[str, Kind]:
    """The stages before the methods; ``documents`` chooses LUME's."""
    stages = real_table(lume, tofu, sizes, out, documents)
    return {
        MODEL: stages[MODEL],
        "data": stages["data"],
        "halves": Make(
            lambda plan: add_halves(plan.data, documents),
            "data/test/forget.jsonl",
            title="choose the halves",
            needs=("data",),
        ),
        **memories(MODEL, "smollm2/memorise", merged=True, share=0.5),
        "teacher": teacher_stage(sizes, 0.5),
    }


def world_of(
    out: Path, data: Path, example: str = "smollm2/over", epochs: int | None = None
) -> World:
    """What the methods are compared on, once these stages have ended."""
    return World(
        example,
        epochs,
        *(out / name / "merged" for name in ("memorised", "retrained")),
        data,
        LAYER,
        {"model": near(out / MODEL), "adapter": near(out / "teacher")},
        changes=CHANGES,
        retain=APART,
        rate=RATE,
    )


def leaderboard_real(
    out: Path,
    methods: str = METHODS,
    *,
    sizes: RealSizes = SIZES,
    trials: int = TRIALS,
    epochs: int | None = None,
    seed: int = 42,
    documents: int = 0,
    threads: int | None = None,
    ray: str | None = None,
    console: Console | None = None,
    **places: Any,
) -> Path:
    """Both parts; the page. ``places`` are `plan_real`'s folders, ``seed`` is of all training."""
    plan = plan_real(
        out, threads=threads, ray=ray, sizes=sizes, console=console,
        stages=partial(table, documents=documents),
        name="leaderboard-real", **places,
    )  # fmt: skip
    plan.job.run()
    args: dict[str, Any] = {
        "documents": documents,
        "trials": trials,
        "epochs": epochs or CHANGES["num_epochs"],
    }
    if methods != METHODS:
        args["methods"] = shlex.quote(methods)
    words = " ".join(f"--{name} {value}" for name, value in args.items())
    return leaderboard(
        out / "leaderboard", [seed], methods, trials=trials, threads=threads, ray=ray,
        console=console, world=world_of(out, plan.data, epochs=epochs),
        command=f'make leaderboard-real ARGS="{words}{" --small" if sizes is SMALL else ""}"',
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/real-leaderboard"))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--epochs", type=int, help="of each run, 4 without")
    parser.add_argument("--small", action="store_true", help="fewer documents, fewer trials")
    parser.add_argument("--documents", type=int, default=0, help="chooses them")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ray", nargs="?", const="local", help="address of a cluster")
    given = vars(parser.parse_args())
    sizes, trials = (SMALL, FEWER) if given.pop("small") else (SIZES, TRIALS)
    given |= {"sizes": sizes, "trials": given["trials"] or trials}
    print(leaderboard_real(**given).read_text("utf-8"))


if __name__ == "__main__":
    main()
