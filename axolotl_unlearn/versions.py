"""What differs between the versions of Axolotl that we run on (0.19 to 0.21).

Nothing else asks which version is installed.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points, version
from typing import Any


def __getattr__(name: str) -> Any:
    """Axolotl's `DictDefault`, which six of our files use: imported where it is asked for."""
    if name != "DictDefault":
        raise AttributeError(name)
    from axolotl.utils.dict import DictDefault

    return DictDefault


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@cache
def axolotl() -> tuple[int, int]:
    """Major and minor version of the installed Axolotl; (0, 21) where none is."""
    from importlib.metadata import PackageNotFoundError

    try:
        return _pair(version("axolotl"))
    except PackageNotFoundError:
        return 0, 21


def within(since: str) -> bool:
    """Whether the installed Axolotl is this version or a later one."""
    return axolotl() >= _pair(since)


def loads_us_unasked() -> bool:
    """Axolotl 0.21 loads every plugin that an installed package registers, in every run; before, a
    config has to name it under `plugins:`."""
    return within(since="0.21") and any(
        point.value.startswith("axolotl_unlearn:")
        for point in entry_points(group="axolotl.plugins")
    )
