"""``axolotl unlearn methods``"""

from __future__ import annotations

import click


@click.command("methods")
def command() -> None:
    """List the objectives with their parameters and sources, and the presets.

    \b
    Example:
      axolotl unlearn methods
    """
    from axolotl_unlearn.args import preset_names
    from axolotl_unlearn.registry import objectives

    click.secho("Objectives for `unlearn.forget` and `unlearn.retain`\n", bold=True)
    for name, known in sorted(objectives().items()):
        parameters = ", ".join(f"{key}={p.default}" for key, p in known.parameters.items())
        rows = {"both": "forget or retain rows"}.get(known.side, f"{known.side} rows")
        needs = "with reference" if known.reference else "no reference"
        click.secho(name, bold=True, nl=False)
        click.echo(f"  ({rows}, {needs})" + (f"  {parameters}" if parameters else ""))
        click.echo(f"    {known.summary.replace('``', '')}")
        click.echo(f"    {known.source}\n")
    click.echo("Presets, `unlearn: {preset: NAME}`: " + ", ".join(preset_names()))
