"""Methods without a promise of stability; extensions of a run are loaded where a config asks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axolotl_unlearn.config import UnlearnArgs
    from axolotl_unlearn.training.extensions import Extension

#: Config key -> module and class of the extension that it asks for, in the order of their hooks.
EXTENSIONS = {
    "level": ("training.level", "LevelCallback"),
    "watch": ("training.guard", "CollapseWatch"),
    "twins": ("experimental.twins", "AskTwins"),
    "leave_out": ("experimental.retain_filter", "RetainFilter"),
    "attribution": ("experimental.attribution", "RowWeights"),
    "constraint": ("experimental.duals", "Duals"),
    "saliency": ("experimental.saliency", "Saliency"),
    "sharpness": ("experimental.sharpness", "Sharpness"),
    "flatten": ("experimental.flatten", "Flatten"),
}


def extensions(args: UnlearnArgs) -> list[type[Extension]]:
    """What a config asks for."""
    inside = {
        "twins": [source.twins for source in args.references()],
        "leave_out": [phase.leave_out for phase in args.phases or ()],
        "constraint": [entry.constraint for _, entry in args.entries()],
    }
    return [
        getattr(importlib.import_module(f"axolotl_unlearn.{module}"), name)
        for key, (module, name) in EXTENSIONS.items()
        if any(inside.get(key) or [getattr(args, key, None)])
    ]
