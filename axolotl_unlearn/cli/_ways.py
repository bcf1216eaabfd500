"""``axolotl unlearn request plan``: what each way of carrying out a request would cost."""

from __future__ import annotations

import os
from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer


@click.command("plan")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--limit-minutes", type=click.FloatRange(0, min_open=True), help="Of an exact way.")
def plan(folder: Path, limit_minutes: float | None) -> None:
    """Seconds, memory and what is shown, for each way that is open to the request in FOLDER.

    Seconds are those of the trainings, from what the last ones took; nothing is trained. `request
    run --way auto` takes the cheapest exact way, or `match` where both take longer than the limit.

    \b
    Example:
      axolotl unlearn request plan requests/2026-001
    """
    os.environ.setdefault("AXOLOTL_LOG_LEVEL", "WARNING")
    from rich.filesize import decimal

    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.ways.plan import choose
    from axolotl_unlearn.requests.ways.plan import plan as planned

    costs = planned(Request.load(folder))
    taken = choose(costs, limit_minutes and 60 * limit_minutes)
    answer(ways=[vars(cost) for cost in costs], auto=taken)
    for cost in costs:
        if cost.closed:
            click.echo(f"{cost.way:8}  not open: {cost.closed}")
            continue
        memory = decimal(cost.bytes) if cost.bytes else "unknown"
        click.echo(f"{cost.way:8}  {cost.seconds:.0f} s ({cost.by}), memory {memory}; {cost.shows}")
        if cost.pays_from:
            click.echo(
                f"{'':8}  less than retraining from {cost.pays_from:,} rows read in training"
            )
        if cost.measuring:
            click.echo(f"{'':8}  and {cost.measuring:.0f} s of tests, as in the last request")
    click.echo(f"auto      {taken}")
