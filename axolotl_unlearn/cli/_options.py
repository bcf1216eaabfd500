"""What commands share: their options, and how they answer. Defaults are shown: the group `unlearn`
says so. With ``--json`` of any command one JSON object goes to standard output, and all else to
standard error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic_core import to_json

from axolotl_unlearn.errors import plain

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


def fitted(line: str) -> str:
    """A `plain` line in lines that the terminal holds; as one in a pipe, and if to be copied."""
    line = plain(line)
    context = click.get_current_context(silent=True)
    width = context.terminal_width if context else None
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size((80, 24)).columns
    if width is None or len(line) <= width or line.startswith(("Next: ", "Results: ")):
        return line
    how = {"break_long_words": False, "break_on_hyphens": False}
    indent = line[: len(line) - len(line.lstrip())] + "    "
    return textwrap.fill(line, width, subsequent_indent=indent, **how)


def show(*parts: Any) -> None:
    """Lines and tables. What comes from a file, its name too, forges no line of ours."""
    from rich.console import Console
    from rich.segment import Segments

    console = Console(markup=False, emoji=False)  # names are no marks
    for part in parts:
        if isinstance(part, str):
            click.echo(fitted(part))
            continue
        made = [*console.render(part)]
        texts = ("\n".join(map(plain, one.text.split("\n"))) for one in made)
        console.print(Segments(one._replace(text=x) for one, x in zip(made, texts, strict=True)))


def few_logs() -> None:
    """No config of hundreds of lines of Axolotl's, nor warnings of kernels that nobody asks for."""
    os.environ.setdefault("AXOLOTL_LOG_LEVEL", "WARNING")
    # What is deleted is nobody's business; without a network it also waits for ever at the end.
    os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
    logging.disable(logging.WARNING)  # `axolotl-unlearn` has read the level already
    click.get_current_context().call_on_close(lambda: logging.disable(logging.NOTSET))


# --- answers -------------------------------------------------------------------------------------

_KEY = "axolotl_unlearn.answer"


@dataclass(frozen=True)
class Answer:
    """What a command found: it returns one, which is printed for programs or readers.

    Attributes:
        facts: For ``--json``.
        lines: In words, and tables.
        exit: Exit code.
    """

    facts: Mapping[str, Any]
    lines: Iterable[Any] = ()
    exit: int = 0


def answer(**facts: Any) -> None:
    """What a command found, for ``--json``; said in words all the same."""
    context = click.get_current_context(silent=True)
    if context is not None and _KEY in context.meta:
        context.meta[_KEY].update(facts)


@contextlib.contextmanager
def one_object(context: click.Context) -> Iterator[None]:
    """Whatever is printed in the block, by programs that it starts too, goes to standard error; at
    its end the answer follows on standard output, with ``exit``, the exit code."""
    context.meta[_KEY] = {}
    code = 0
    with _away(), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except click.exceptions.Exit as error:
            code = error.exit_code
        except click.ClickException as error:
            error.show()
            answer(error=error.format_message())
            code = error.exit_code
        except SystemExit as error:
            code = error.code or 0
    said = {"exit": code, **context.meta[_KEY]}
    click.echo(to_json(said, indent=1, inf_nan_mode="null", fallback=str))  # JSON has no NaN
    context.exit(code)


@contextlib.contextmanager
def _away() -> Iterator[None]:
    """The descriptor of standard output leads to that of standard error."""
    try:
        number = sys.stdout.fileno()
    except io.UnsupportedOperation:  # in a test it is no file
        yield
        return
    sys.stdout.flush()
    kept = os.dup(number)
    os.dup2(sys.stderr.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, number)
        os.close(kept)
