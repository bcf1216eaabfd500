"""``axolotl-unlearn methods``"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axolotl_unlearn.cli._json import answer, read_json

if TYPE_CHECKING:
    from axolotl_unlearn.objectives import Objective


class _Methods(click.Group):
    """Any other word than a command's is the name of what is shown."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


@click.group("methods", cls=_Methods, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List the objectives and presets, show one of them whole, or choose among models.

    An objective is shown with its formula, parameters and source, a preset with the block that it
    stands for and the settings it was published with.

    \b
    Example:
      axolotl-unlearn methods
      axolotl-unlearn methods npo
      axolotl-unlearn methods choose out/demo/eval --risk 0.05
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(show)


@command.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--risk", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.05,
              help="Most that may be extracted of a forgotten document.")  # fmt: skip
@click.option("--delta", default=0.05, help="Chance to call one valid wrongly.")
def choose(folder: Path, risk: float, delta: float) -> None:
    """Which models of an evaluation (FOLDER) keep a stated risk, best kept first (experimental).

    The risk of a document is by how much more of it can be extracted than from the retrained model.
    After FROC (arXiv 2512.13337), whose calibration was not found: this is Learn then Test
    (2110.01052).
    """
    from axolotl_unlearn.experimental.choose import CONTROLS, chosen, risks

    models = read_json(folder / "results.json")["models"]
    kept = {one["name"]: one.get("utility") for one in models}
    found = chosen(risks(folder), kept, risk, delta)
    answer(models=found, risk=risk, delta=delta)
    for name, row in found.items():
        utility = "not measured" if row["kept"] is None else f"{row['kept']:.2f}"
        click.echo(
            f"{name}: {'valid' if row['valid'] else 'not shown'} (risk {row['risk']:.3f} of "
            f"{row['documents']} documents, p {row['p']:.2g} after Holm; utility {utility})"
        )
    if not any(row["valid"] for row in found.values()):
        click.echo(f"None is shown to keep a risk of {risk:g}.")
    click.echo(CONTROLS.format(risk=risk, delta=delta))


@command.command(hidden=True)
@click.argument("name", required=False)
def show(name: str | None = None) -> None:
    """One objective or preset whole, or the list of them."""
    from axolotl_unlearn.config.presets import preset_names, preset_text
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
        click.echo("More about one of them: axolotl-unlearn methods NAME")
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
    given = [f"{key}: {p.default}" for key, p in objective.parameters.items()]
    block = ", ".join([f"objective: {objective.name}", *given])
    side = "retain" if objective.side == "retain" else "forget"
    click.echo(f"\nunlearn:\n  {side}: {{{block}}}")


def _kind(annotation: str) -> str:
    """An annotation as the source has it, in words: ``Annotated[float, Gt(0)]`` -> float > 0."""
    for bound, sign in {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}.items():
        annotation = re.sub(rf",? {bound}\(([^)]*)\)", rf" {sign} \1", annotation)
    return re.sub(r"^Annotated\[(.*)\]$", r"\1", annotation)
