"""Options that several commands have."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import click
from click.core import ParameterSource

from axolotl_unlearn.cli.attack import DTYPES, device


def jobs_option(function: Callable) -> Callable:
    """``--jobs``."""
    says = "Commands side by side [one for each core]."
    return click.option("--jobs", type=int, help=says)(function)


def seed_option(function: Callable) -> Callable:
    """``--seed`` of a job on made-up data."""
    says = "Seed of data, weights and orders."
    return click.option("--seed", default=0, show_default=True, help=says)(function)


def attack_options(function: Callable) -> Callable:
    """``--control``, ``--device`` and ``--dtype`` of an attack, as those of `axolotl-unlearn`."""
    for option in (
        click.option("--control", help="A model that never saw the forget set, attacked alike."),
        click.option("--device", callback=device, help="[default: cuda if there is one]"),
        click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True),
    ):
        function = option(function)
    return function


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
