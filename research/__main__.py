"""``python -m research NAME``: the studies, the demo among them."""

from __future__ import annotations

import click

from axolotl_unlearn.cli import LazyGroup, quiet, say


class Studies(LazyGroup):
    package = "research.cli"


@click.group(cls=Studies, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Warnings of libraries, and whole tracebacks.")
def research(debug: bool) -> None:
    """Studies, leaderboards, probes and analyses around axolotl-unlearn."""
    if not debug:
        quiet()


research.result_callback()(say)

if __name__ == "__main__":
    research(prog_name="python -m research")
