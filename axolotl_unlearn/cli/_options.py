"""Options that several commands have."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

FOLDER = click.Path(file_okay=False, path_type=Path)
ATTACKED = "Folder for the results; the folder of `axolotl unlearn eval` puts them into its report."


def data_option(says: str) -> Callable:
    """``--data``, the demo's by default."""
    default = Path("examples/demo")
    kind = click.Path(path_type=Path)
    return click.option(
        "--data", "data_dir", type=kind, default=default, show_default=True, help=says
    )


def out_option(default: str, says: str = "Folder of the job.") -> Callable:
    """``--out``, a folder."""
    return click.option("--out", type=FOLDER, default=Path(default), show_default=True, help=says)


def jobs_option(function: Callable) -> Callable:
    """``--jobs``."""
    says = "Commands side by side [one for each core]."
    return click.option("--jobs", type=int, help=says)(function)


def seed_option(function: Callable) -> Callable:
    """``--seed`` of a job on made-up data."""
    says = "Seed of data, weights and orders."
    return click.option("--seed", default=0, show_default=True, help=says)(function)


def as_typed(context: click.Context) -> str:
    """The command with the options that were given, for results to say what they are from.

    Without paths and numbers of processes or threads: they are a machine's and change no result.
    """
    words = context.command_path.split()
    for option in context.command.params:
        given = context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if not given or isinstance(option.type, click.Path) or option.name in ("jobs", "threads"):
            continue
        words += [option.opts[0], *([] if option.is_flag else [str(context.params[option.name])])]
    return shlex.join(words)


def lines(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[str]:
    """Values; ``@FILE`` stands for the lines of a file, ``@-`` for those of the standard input."""
    found: list[str] = []
    for text in given:
        if text.startswith("@@"):
            found.append(text[1:])
        elif text.startswith("@"):
            with click.open_file(text[1:], encoding="utf-8") as file:
                found += [line for line in file.read().splitlines() if line.strip()]
        else:
            found.append(text)
    return found


def one_value(context: click.Context, option: click.Parameter, given: str) -> str:
    """Likewise of an option that is given once."""
    return " ".join(lines(context, option, (given,)))
