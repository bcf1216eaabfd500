"""``python -m research demo``: the whole job on embedded data."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import out_option
from research.cli._options import jobs_option, seed_option


@click.command()
@out_option("out/demo")
@seed_option
@click.option(
    "--full",
    is_flag=True,
    help="With a single run in between, an exact deletion, and scores on the way.",
)
@click.option("--force", is_flag=True, help="Merge parents that have lost the retain set.")
@jobs_option
def command(out: Path, seed: int, full: bool, force: bool, jobs: int | None) -> None:
    """Memorise, forget too much and too little, merge, evaluate and report.

    A tiny OLMo memorizes made-up stories, personal data and facts; two NPO runs forget a
    part of them too deeply and not deeply enough; TIES merges the two. Beside them stand one run
    tuned in between and a model that never saw the forget set. A second call goes on where the
    first one ended. The logs of the commands lie in OUT/logs.

    \b
    python -m research demo
    python -m research demo --seed 3 --full --out out/demo-3
    """
    from research.studies.demo import plan_demo

    plan = plan_demo(out, seed, full=full, force=force, threads=jobs)
    reason = plan.show()["left_out"].get("merged")
    if reason:
        plan.console.print(f"Not merged: {reason}", style="red", soft_wrap=True)
        click.get_current_context().exit(1)
