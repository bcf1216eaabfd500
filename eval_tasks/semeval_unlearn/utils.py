"""Functions that the YAML files of this folder name; the work is done in the package."""

from axolotl_unlearn.evaluation.lm_tasks import UnlearnTask  # noqa: F401
from axolotl_unlearn.evaluation.tasks import (  # noqa: F401
    above_gate,
    auc_of_pairs,
    cells_with_rows,
    forget_cell,
    harmonic_mean_of_cells,
    mean_of_present,
    mia_documents,
    mia_score_of_pairs,
    mmlu_documents,
    score_document,
    score_option,
    score_task_row,
    tasks_documents,
)
