"""``python -m research never-seen``: forgetting judged against a model that never saw the texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import out_option
from research.cli._options import jobs_option, seed_option


@click.command("never-seen")
@out_option("out/never-seen")
@seed_option
@click.option("--full", is_flag=True, help="Also the rivals.")
@click.option("--no-pair", is_flag=True, help="Without the paper's two runs and their merge.")
@click.option(
    "--recipe",
    type=click.Choice(["match", "smollm2/match"]),
    default="match",
    help="Example by which `match` is trained: all weights, or a LoRA as on SmolLM2.",
)
@jobs_option
def command(out: Path, seed: int, full: bool, no_pair: bool, recipe: Any, jobs: int | None) -> None:
    """Forget towards a level and let attacks compare with a model trained without the data.

    A tiny OLMo reads background documents (base), is tuned on forget and retain rows (original),
    beside it on the retain rows alone (retrained, which only judges). `match` brings the forget
    rows to the level of a teacher: the base after passes over some retain rows. Beside it stand
    the demo's over and under merged by TIES. A second call goes on where the first one ended.

    \b
    python -m research never-seen
    python -m research never-seen --seed 3 --full --out out/never-seen-3
    """
    from research.studies.never_seen import plan_never_seen

    plan_never_seen(out, seed, full=full, pair=not no_pair, recipe=recipe, threads=jobs).show()
