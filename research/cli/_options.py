"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable

from axolotl_unlearn.cli.attack import CONTROL, DEVICE, DTYPE


def attack_options(function: Callable) -> Callable:
    """``--control``, ``--device`` and ``--dtype`` of an attack, as those of `axolotl-unlearn`."""
    for option in (CONTROL, DEVICE, DTYPE):
        function = option(function)
    return function
