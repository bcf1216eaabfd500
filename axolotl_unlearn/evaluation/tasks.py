"""Where the lm-eval tasks of ``eval_tasks/`` are."""

from __future__ import annotations

from pathlib import Path

from axolotl_unlearn import __version__
from axolotl_unlearn.errors import UnlearnError

#: Version of the tasks: raised when a score of the same generations would change.
TASK_VERSION = "1.0"
#: What a result was made by.
CODE = f"{__version__}, tasks {TASK_VERSION}"
GROUP = "semeval_unlearn"


def task_folder() -> Path:
    """The folder to give to ``lm_eval --include_path`` (read by the ``lm_eval.tasks`` entry)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "eval_tasks", package.parent / "eval_tasks"):
        if (folder / GROUP).is_dir():
            return folder
    raise UnlearnError(
        "the folder eval_tasks is not beside the package; install axolotl-unlearn again.",
        code="tasks.no-folder",
    )
