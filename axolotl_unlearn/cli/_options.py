"""What the options of several commands share. Defaults are shown: the group `unlearn` says so."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
COUNT = click.IntRange(1)
ABOVE_ZERO = click.FloatRange(0, min_open=True)
ATTACKED = "Folder for the results; the folder of `axolotl-unlearn eval` puts them into its report."


def data_option(says: str) -> Callable:
    """``--data``, the demo's by default."""
    default = Path("examples/demo")
    return click.option("--data", "data_dir", type=PATH, default=default, help=says)


def out_option(default: str, says: str = "Folder of the job.") -> Callable:
    """``--out``, a folder."""
    return click.option("--out", type=FOLDER, default=Path(default), help=says)


def lines(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[str]:
    """Values; ``@FILE`` stands for the lines of a file, ``@-`` for those of the standard input."""
    values: list[str] = []
    for text in given:
        if text.startswith("@@"):
            values.append(text[1:])
        elif text.startswith("@"):
            with click.open_file(text[1:], encoding="utf-8") as file:
                values += [line for line in file.read().splitlines() if line.strip()]
        else:
            values.append(text)
    return values


def one_value(context: click.Context, option: click.Parameter, given: str | None) -> str:
    """Likewise of an option that is given once; "" where it is not."""
    return " ".join(lines(context, option, (given or "",)))


def say(*said: str) -> None:
    for line in said:
        click.echo(line)


def fitted(line: str) -> str:
    """A line in lines that the terminal holds; as it is in a pipe."""
    context = click.get_current_context(silent=True)
    width = context.terminal_width if context else None
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size((80, 24)).columns
    if width is None or len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())] + "    "
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def show(*parts: Any) -> None:
    """Tables, and sentences, which may hold brackets of their own."""
    from rich.console import Console

    for part in parts:
        Console().print(part, markup=not isinstance(part, str), highlight=False)


def few_logs() -> None:
    """No config of hundreds of lines of Axolotl's."""
    os.environ.setdefault("AXOLOTL_LOG_LEVEL", "WARNING")
