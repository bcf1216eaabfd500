"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable

import click

from axolotl_unlearn.cli.attack import DTYPES, device


def attack_options(function: Callable) -> Callable:
    """``--control``, ``--device`` and ``--dtype`` of an attack, as those of `axolotl-unlearn`."""
    for option in (
        click.option("--control", help="A model that never saw the forget set, attacked alike."),
        click.option("--device", callback=device, help="[default: cuda if there is one]"),
        click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True),
    ):
        function = option(function)
    return function
