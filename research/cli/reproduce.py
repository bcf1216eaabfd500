"""``python -m research reproduce``: the paper's tables and figures, and the merge search."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import FOLDER
from research.cli._options import as_typed, jobs_option


@click.command()
@click.option("--seeds", default="0", show_default=True, help='Seeds, as in "0 1 2".')
@click.option("--out", type=FOLDER, default=Path("out/reproduce"), show_default=True)
@click.option("--trials", default=24, show_default=True, help="Candidates of a search.")
@click.option(
    "--tables", default=3, show_default=True, help="So many seeds with tables and figures."
)
@click.option("--pairs", default=0, show_default=True, help="So many also merge other pairs.")
@click.option(
    "--retain-per-forget", default=2, show_default=True, help="Retain rows beside a forget row."
)
@click.option("--forget-eos", is_flag=True, help="End of sequence on forget rows too.")
@click.option(
    "--held-out", default=0, show_default=True, help="Relations of which no fact is replayed."
)
@click.option("--equal", is_flag=True, help="Single runs are searched too; a retrained twin.")
@jobs_option
@click.pass_context
def command(context: click.Context, seeds: str, out: Path, jobs: int | None, **options) -> None:
    """The paper's tables and figures and the merge search on the tiny model, over seeds.

    Finished stages are kept, so the command may be stopped and repeated.

    \b
    python -m research reproduce --seeds "101 102 103 104 105" --held-out 2 --equal
    """
    from research.studies.reproduce import reproduce

    numbers = [int(seed) for seed in seeds.split()]
    page = reproduce(out, numbers, command=as_typed(context), threads=jobs, **options)
    click.echo(f"{page}; figures in {out}/seed-*/reproduction")
