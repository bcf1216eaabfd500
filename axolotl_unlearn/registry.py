"""The registry of objectives for those who compute nothing: read without torch where it can be.

Loading torch takes most of the time of ``axolotl-unlearn check``, and names, sides and parameters
need none of it. So the modules of `axolotl_unlearn.objectives` are run once with a stand-in for
torch and then forgotten, so that a later import gets the real ones.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axolotl_unlearn.objectives import Objective

_PACKAGE = "axolotl_unlearn.objectives"
_TORCH = ("torch", "torch.nn", "torch.nn.functional")


def objectives() -> dict[str, Objective]:
    """Name -> objective; its function may be called only if torch had been loaded before."""
    if "torch" in sys.modules or _PACKAGE in sys.modules:
        return importlib.import_module(_PACKAGE).OBJECTIVES
    return _read_without_torch()


class _Anything(type):
    """What a stand-in module holds: a class (for annotations), a decorator, any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if args else cls


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


@cache
def _read_without_torch() -> dict[str, Objective]:
    sys.modules.update({name: _StandIn(name) for name in _TORCH})
    try:
        return dict(importlib.import_module(_PACKAGE).OBJECTIVES)
    except Exception:  # a module computes as it is imported: slow, but right
        pass
    finally:
        for name in [*_TORCH, *(m for m in sys.modules if m.startswith(_PACKAGE))]:
            del sys.modules[name]
        vars(sys.modules["axolotl_unlearn"]).pop("objectives", None)
    return importlib.import_module(_PACKAGE).OBJECTIVES
