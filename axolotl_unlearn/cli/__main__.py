"""``python -m axolotl_unlearn.cli eval ...``: the commands without Axolotl's own start-up."""

from axolotl_unlearn.cli import unlearn

if __name__ == "__main__":
    unlearn(prog_name="axolotl-unlearn")
