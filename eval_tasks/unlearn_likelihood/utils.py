"""Functions that the YAML file of this folder names; the work is done in the package."""

from axolotl_unlearn.evaluation.lm_tasks import UnlearnTask  # noqa: F401
from axolotl_unlearn.evaluation.tasks import (  # noqa: F401
    likelihood_documents,
    mean_of_present,
    score_likelihood,
)
