"""What an objective sees: a class a view, chosen by ``sees=`` of the objective's registration.

A view is one entry looking at one batch. It alone decides which positions it looks at, what it
needs of the policy and of the reference, and which values follow.
"""

from axolotl_unlearn.engine.views.base import View
from axolotl_unlearn.engine.views.distributions import Distributions
from axolotl_unlearn.engine.views.hidden import Hidden
from axolotl_unlearn.engine.views.labels import Labels

VIEWS: dict[str, type[View]] = {
    "labels": Labels,
    "distributions": Distributions,
    "hidden": Hidden,
}

__all__ = ["VIEWS", "Distributions", "Hidden", "Labels", "View"]
