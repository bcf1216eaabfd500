"""``axolotl unlearn check my.yml``"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("check")
@click.argument("config", type=click.Path(path_type=Path))
def command(config: Path) -> None:
    """Find what is wrong with CONFIG before any GPU second is spent.

    Reads the config and the data files; loads no weights. All faults are listed at once, each with
    its cure; exit code 2 if there is one.

    \b
    Example:
      axolotl unlearn check examples/npo_over.yml
    """
    from axolotl_unlearn.preflight import check_config

    faults, summary = check_config(config)
    for line in summary:
        click.echo(line)
    for fault in faults:
        click.secho(f"  ✗ {fault}", fg="red", err=True)
    if faults:
        click.echo(f"{config}: {len(faults)} fault{'s' * (len(faults) > 1)}", err=True)
        raise SystemExit(2)
    click.secho(f"{config}: ready; run `axolotl train {config}`", fg="green")
