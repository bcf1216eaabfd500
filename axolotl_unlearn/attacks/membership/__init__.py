"""Is a text still known? Attacks behind one protocol (`base`), a file each; `run` makes those that
are asked for and corrects for their number."""

from axolotl_unlearn.attacks.membership import (  # noqa: F401 (each registers its attacks)
    dataset_inference,
    detectors,
    gdrift,
    iam,
    icp,
    likelihood,
    tables,
    transfer,
)
from axolotl_unlearn.attacks.membership.base import REGISTRY, Attack, Target

__all__ = ["REGISTRY", "Attack", "Target"]
