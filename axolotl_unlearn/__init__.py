"""axolotl-unlearn: make a language model forget documents, merge, and prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = ["UnlearnPlugin", "__version__"]

if TYPE_CHECKING:
    from axolotl_unlearn.plugin import UnlearnPlugin


def __getattr__(name: str):
    # Lazy: importing the package must not import Axolotl or torch models.
    if name == "UnlearnPlugin":
        from axolotl_unlearn.plugin import UnlearnPlugin

        return UnlearnPlugin
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; "
        "the plugin is axolotl_unlearn.UnlearnPlugin"
    )
