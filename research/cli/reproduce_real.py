"""``python -m research reproduce-real``: the paper's tables on SmolLM2-135M, over seeds."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import FOLDER
from research.cli._options import as_typed


@click.command()
@click.option(
    "--source", type=FOLDER, default=Path("out/real"), show_default=True, help="A demo-real."
)
@click.option("--seeds", default="42 1 2", show_default=True, help="42 is demo-real's own.")
@click.option("--out", type=FOLDER, default=Path("out/reproduce-real"), show_default=True)
@click.option("--threads", type=int, help="Threads in all.  [default: one a core]")
@click.pass_context
def command(
    context: click.Context, source: Path, seeds: str, out: Path, threads: int | None
) -> None:
    """The paper's tables on the real model, after `python -m research demo-real`.

    Its memorised and its retrained model and its data serve all seeds; a seed is that of the
    forgetting runs. Finished stages are kept.
    """
    from research.studies.reproduce import reproduce

    numbers = [int(seed) for seed in seeds.split()]
    typed = as_typed(context)
    page = reproduce(out, numbers, command=typed, source=source, threads=threads)
    click.echo(f"{page}; figures in {out}/seed-*/reproduction")
