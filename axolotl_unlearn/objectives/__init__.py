"""Unlearning objectives: pure functions of tensors and their registry.

Adding one is a function under ``@objective(...)`` in a file here or in a module of your own
(`unlearn.extensions`), see docs/add-objective.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from axolotl_unlearn.objectives.base import OBJECTIVES, LabelScores, Objective, Terms, objective

__all__ = ["OBJECTIVES", "LabelScores", "Objective", "Terms", "objective"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
