"""`axolotl unlearn request`: delete rows from a fine-tuned model, step by step."""

from __future__ import annotations

import click

from axolotl_unlearn.cli._requests import COMMANDS


@click.group("request")
def command() -> None:
    """Deletion requests: asked for, carried out, erased (docs/deleting-data.md)."""


for _one in COMMANDS:
    command.add_command(_one)
