"""What the YAML file of this folder names; the work is done in the package."""

from axolotl_unlearn.evaluation.tofu import Tofu  # noqa: F401
