"""Is a text still known? Attacks behind one protocol (`base`), a file each.

likelihood          log-probabilities of a text's tokens: those of `axolotl unlearn eval`
detectors           detectors of machine text: Binoculars, Fast-DetectGPT
dataset_inference   a test of a set of texts that combines many scores
icp                 in-context probing: how much a hint at the text helps
tables              a row of a table in other encodings
iam                 interpolation between a model that knows and one that does not
transfer            a classifier that learned on other models
gdrift              a gradient step against the text
run                 all that are asked for, on models, corrected for their number
"""

from axolotl_unlearn.attacks.membership import (
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

__all__ = [
    "REGISTRY",
    "Attack",
    "Target",
    "dataset_inference",
    "detectors",
    "gdrift",
    "iam",
    "icp",
    "likelihood",
    "tables",
    "transfer",
]
