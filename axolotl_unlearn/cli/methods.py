"""``axolotl unlearn methods``"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import click

from axolotl_unlearn.cli._json import answer

if TYPE_CHECKING:
    from axolotl_unlearn.objectives import Objective


@click.command("methods")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the objectives and presets, or show one of them whole.

    An objective is shown with its formula, parameters and source, a preset with the block that it
    stands for and the settings it was published with.

    \b
    Example:
      axolotl unlearn methods
      axolotl unlearn methods npo
      axolotl unlearn methods tofu-npo
    """
    from axolotl_unlearn.config import preset_names, preset_text
    from axolotl_unlearn.registry import objectives

    known = objectives()
    answer(
        objectives=[_facts(known[each]) for each in sorted(known) if name in (None, each)],
        presets={each: preset_text(each) for each in preset_names() if name in (None, each)},
    )
    if name is None:
        click.secho("Objectives for `unlearn.forget` and `unlearn.retain`\n", bold=True)
        for each in sorted(known):
            _headline(known[each])
        click.echo("Presets, `unlearn: {preset: NAME}`: " + ", ".join(preset_names()))
        click.echo("More about one of them: axolotl unlearn methods NAME")
    elif name in known:
        _headline(known[name])
        _whole(known[name])
    elif name in preset_names():
        click.echo(preset_text(name).rstrip())
    else:
        from axolotl_unlearn.config import nearest

        names = [*known, *preset_names()]
        raise click.UsageError(f"no objective or preset is called {name!r}{nearest(name, names)}.")


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
    click.echo(f"    {objective.summary.replace('``', '')}")
    click.echo(f"    {objective.source}\n")


def _whole(objective: Objective) -> None:
    """The docstring without its first line, and each parameter with its type and range."""
    text = (inspect.getdoc(objective.function) or "").partition("\n")[2].strip()
    if text:
        click.echo(text.replace("``", "") + "\n")
    sees = {
        "labels": "the log-probs of the labels",
        "pairs": "the log-probs of the labels of each row and of its alternative",
        "distributions": "the whole distribution at each label",
        "hidden": "the hidden states of a layer",
        "features": "features of each row, and where those of held-out rows lie",
        "profiles": "mean and spread of each row's hidden states, and those of held-out rows",
        "gradients": "the norms of each row's gradients, and those of held-out rows",
    }
    click.echo(f"Sees {sees[objective.sees]}.")
    for key, parameter in objective.parameters.items():
        click.echo(f"  {key}: {_kind(str(parameter.annotation))}, default {parameter.default}")
    block = ", ".join([f"objective: {objective.name}", *_given(objective)])
    side = "retain" if objective.side == "retain" else "forget"
    click.echo(f"\nunlearn:\n  {side}: {{{block}}}")


def _kind(annotation: str) -> str:
    """An annotation as the source has it, in words: ``Annotated[float, Gt(0)]`` -> float > 0."""
    for bound, sign in {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}.items():
        annotation = re.sub(rf",? {bound}\(([^)]*)\)", rf" {sign} \1", annotation)
    return re.sub(r"^Annotated\[(.*)\]$", r"\1", annotation)


def _given(objective: Objective) -> list[str]:
    return [f"{key}: {p.default}" for key, p in objective.parameters.items()]
