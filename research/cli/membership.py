"""``python -m research membership``: `axolotl-unlearn attack membership` with research's attacks."""

from __future__ import annotations

import click

from axolotl_unlearn.cli.attack import membership
from research.attacks import EXTENSIONS

command = click.Command(
    "membership",
    params=membership.params,
    callback=membership.callback,
    help=membership.help,
)
for option in command.params:
    if option.name == "extensions":
        option.default = EXTENSIONS
