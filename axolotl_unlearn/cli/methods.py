"""``axolotl-unlearn methods``"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import click

from axolotl_unlearn.cli._options import Answer

if TYPE_CHECKING:
    from axolotl_unlearn.objectives import Objective


@click.command("methods")
@click.argument("name", required=False)
def command(name: str | None) -> Answer:
    """List the objectives and presets, or show one of them whole.

    An objective is shown with its formula, parameters and source, a preset with the block that it
    stands for and the settings it was published with.

    \b
    Example:
      axolotl-unlearn methods
      axolotl-unlearn methods npo
    """
    from axolotl_unlearn.config import nearest
    from axolotl_unlearn.config.presets import preset_names, preset_text
    from axolotl_unlearn.objectives import OBJECTIVES

    known, presets = OBJECTIVES, preset_names()
    if name and name not in known and name not in presets:
        near = nearest(name, [*known, *presets])
        raise click.UsageError(f"no objective or preset is called {name!r}{near}.")
    if name in presets:
        click.echo(preset_text(name).rstrip())
    elif name:
        _headline(known[name])
        _whole(known[name])
    else:
        click.secho("Objectives for `unlearn.forget` and `unlearn.retain`\n", bold=True)
        for each in sorted(known):
            _headline(known[each])
        click.echo("Presets, `unlearn: {preset: NAME}`: " + ", ".join(presets))
        click.echo("More about one of them: axolotl-unlearn methods NAME")
    objectives = [_facts(known[each]) for each in sorted(known) if name in (None, each)]
    shown = {each: preset_text(each) for each in presets if name in (None, each)}
    return Answer({"objectives": objectives, "presets": shown})


def _facts(objective: Objective) -> dict[str, Any]:
    names = ("name", "side", "sees", "summary", "source")
    said = {key: str(getattr(objective, key)) for key in names}
    parameters = {key: p.default for key, p in objective.parameters.items()}
    return said | {"reference": bool(objective.reference), "parameters": parameters}


def _headline(objective: Objective) -> None:
    parameters = ", ".join(f"{key}={p.default}" for key, p in objective.parameters.items())
    rows = {"both": "forget or retain rows"}.get(objective.side, f"{objective.side} rows")
    if objective.rows == "alternative":
        rows = "alternatives of forget rows"
    elif objective.sees == "pairs":
        rows += " and alternatives"
    needs = "with reference" if objective.reference else "no reference"
    click.secho(objective.name, bold=True, nl=False)
    click.echo(f"  ({rows}, {needs})" + (f"  {parameters}" if parameters else ""))
    click.echo(f"    {objective.summary.replace('``', '')}\n    {objective.source}\n")


def _whole(objective: Objective) -> None:
    """The docstring without its first line, and the block with all parameters."""
    text = (inspect.getdoc(objective.function) or "").partition("\n")[2].strip()
    click.echo(f"{text.replace('``', '')}\n" if text else f"Sees {objective.sees}.")
    given = [f"{key}: {p.default}" for key, p in objective.parameters.items()]
    block = ", ".join([f"objective: {objective.name}", *given])
    side = "retain" if objective.side == "retain" else "forget"
    click.echo(f"\nunlearn:\n  {side}: {{{block}}}")
