"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

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
