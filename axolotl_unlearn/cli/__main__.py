"""``python -m axolotl_unlearn.cli eval ...``: the commands without Axolotl's own start-up."""

from axolotl_unlearn.cli import unlearn

unlearn(prog_name="axolotl-unlearn")
