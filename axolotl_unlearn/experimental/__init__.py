"""Methods without a promise of stability, loaded where a config asks for them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axolotl_unlearn.config import UnlearnArgs
    from axolotl_unlearn.training.extensions import Extension

#: Config key -> module and class of the extension that it asks for, in the order of their hooks.
EXTENSIONS = {
    "twins": ("twins", "AskTwins"),
    "leave_out": ("retain_filter", "RetainFilter"),
    "attribution": ("attribution", "RowWeights"),
    "constraint": ("duals", "Duals"),
    "saliency": ("saliency", "Saliency"),
    "sharpness": ("sharpness", "Sharpness"),
    "flatten": ("flatten", "Flatten"),
}


def extensions(args: UnlearnArgs) -> list[type[Extension]]:
    """What a config asks for."""
    inside = {
        "twins": [source.twins for source in args.references()],
        "leave_out": [phase.leave_out for phase in args.phases or ()],
        "constraint": [entry.constraint for _, entry in args.entries()],
    }
    return [
        getattr(importlib.import_module(f"{__name__}.{module}"), name)
        for key, (module, name) in EXTENSIONS.items()
        if any(inside.get(key) or [getattr(args, key, None)])
    ]
