"""``axolotl-unlearn agent-docs``"""

from __future__ import annotations

from importlib import resources

import click

from axolotl_unlearn.cli._json import answer


@click.command("agent-docs")
def command() -> None:
    """Print a reference for coding agents, as `axolotl agent-docs` does for Axolotl."""
    text = (resources.files("axolotl_unlearn") / "agents.md").read_text("utf-8")
    answer(text=text)
    click.echo(text)
