"""Unlearning objectives: pure functions of tensors and their registry.

Adding one is a function in one of these files under ``@objective(...)``, its name in
`base.MODULES`, a row in docs/objectives.md, and a test with the arithmetic worked by hand.
"""

from axolotl_unlearn.objectives.base import OBJECTIVES, LabelScores, Objective, Terms, objective

__all__ = ["OBJECTIVES", "LabelScores", "Objective", "Terms", "objective"]
