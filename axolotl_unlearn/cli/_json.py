"""``--json``, of every command: one JSON object on standard output, all else on standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic_core import to_json

_KEY = "axolotl_unlearn.answer"


@dataclass(frozen=True)
class Answer:
    """What a command found: it returns one, and `printed` prints it for programs or readers.

    Attributes:
        facts: For ``--json``.
        lines: In words.
        exit: Exit code.
    """

    facts: Mapping[str, Any]
    lines: Iterable[str] = ()
    exit: int = 0


def printed(found: Answer) -> None:
    """The one printer. The lines are said all the same: with ``--json`` on standard error."""
    answer(**found.facts)
    say(found.lines)
    if found.exit:
        raise SystemExit(found.exit)


def say(lines: Iterable[str]) -> None:
    """What comes from a file, its name too, forges no line of ours."""
    for line in lines:
        click.echo("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


def answer(**facts: Any) -> None:
    """What a command found, for ``--json``; said in words all the same."""
    context = click.get_current_context(silent=True)
    if context is not None and _KEY in context.meta:
        context.meta[_KEY].update(facts)


def wanted() -> bool:
    """Whether the answer will be printed."""
    context = click.get_current_context(silent=True)
    return context is not None and _KEY in context.meta


def read_json(path: Path) -> dict[str, Any]:
    """What a command has written."""
    return json.loads(path.read_text("utf-8"))


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
