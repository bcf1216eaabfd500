"""The one exception that users of axolotl-unlearn meet, and how sentences count."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UnlearnError(ValueError):
    """A fault in what the user gave: one sentence naming file, row or key, and the cure.

    The command line prints it as ``Error: ...`` and exits with code 2.

    Args:
        message: the sentence.
        code: names the kind of fault for programs and tests, as ``room.what-is-wrong``
            (``"config.unknown-key"``). It stays when the sentence is put in other words.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def plain(text: str) -> str:
    """With every character that moves the cursor, breaks the line or turns the order as an escape.

    What comes from a file could else forge a line of ours.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printed(error: object) -> str:
    """An error as it is printed: its own lines, each `plain`."""
    return "\n".join(map(plain, str(error).split("\n")))


def counted(count: int, one: str, more: str = "") -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {one if count == 1 else more or one + 's'}"


@contextmanager
def exit_with_sentence() -> Iterator[None]:
    """End the process with code 2 and the sentence of an `UnlearnError`, for hooks of Axolotl."""
    try:
        yield
    except UnlearnError as error:
        print(f"\nError: {printed(error)}\n", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def show_as_sentences() -> None:
    """Print an uncaught `UnlearnError` as one sentence instead of a traceback.

    For code that Axolotl runs, where we do not own the command line.
    """
    before = sys.excepthook
    if getattr(before, "shows_sentences", False):
        return

    def hook(kind, error, trace) -> None:
        if issubclass(kind, UnlearnError):
            print(f"\nError: {printed(error)}\n", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    hook.shows_sentences = True
    sys.excepthook = hook
