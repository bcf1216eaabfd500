"""Is a text still known? Attacks behind one protocol (`base`), a file each; `run` makes those that
are asked for and corrects for their number."""

from research.attacks import (  # noqa: F401 (each registers its attacks)
    dataset_inference,
    detectors,
    gdrift,
    iam,
    icp,
    likelihood,
    tables,
    transfer,
)
from research.attacks.base import REGISTRY, Attack, Target

__all__ = ["REGISTRY", "Attack", "Target"]
