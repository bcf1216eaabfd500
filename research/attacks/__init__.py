"""More attacks in the product's registry (`axolotl_unlearn.attacks.registry`), a file each."""

from axolotl_unlearn.attacks.registry import attacks

EXTENSIONS = [f"{__name__}.{name}" for name in ("iam", "icp", "tables", "transfer")]
#: By name, those of the product along.
REGISTRY = attacks(EXTENSIONS)
