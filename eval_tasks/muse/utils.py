"""Functions that the YAML files of this folder name; the work is done in the package."""

from axolotl_unlearn.evaluation.lm_tasks import UnlearnTask  # noqa: F401
from axolotl_unlearn.evaluation.muse import (  # noqa: F401
    auc_members,
    knowmem_documents,
    privleak,
    privleak_documents,
    score_knowmem,
    score_privleak,
    score_verbmem,
    verbmem_documents,
)


def knowmem_forget_documents(**metadata):
    return knowmem_documents("forget", **metadata)


def knowmem_retain_documents(**metadata):
    return knowmem_documents("retain", **metadata)
