"""Where the lm-eval tasks of ``eval_tasks/`` are, and how they get into an installed lm-eval."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from axolotl_unlearn import __version__
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json

#: Version of the tasks: raised when a score of the same generations would change.
TASK_VERSION = "1.0"
#: What a result was made by.
CODE = f"{__version__}, tasks {TASK_VERSION}"
GROUP = "semeval_unlearn"
MARKER = ".axolotl-unlearn.json"


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


def installed_task_folder() -> Path:
    """``lm_eval/tasks`` of the installed lm-eval, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UnlearnError(
            "lm-eval is not installed; run `pip install lm_eval==0.4.11`.", code="tasks.no-lm-eval"
        )
    return Path(spec.origin).parent / "tasks"


def _sources() -> Iterator[tuple[Path, list[Path]]]:
    """Folders of tasks and their files."""
    for folder in sorted(path for path in task_folder().iterdir() if path.is_dir()):
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.name[0] != ".")
        if any(path.suffix == ".yaml" for path in files):
            yield folder, files


def register_tasks(target: Path | None = None) -> list[Path]:
    """Copy our tasks into the installed lm-eval, so that `lm_eval --tasks semeval_unlearn` works.

    A marker file lists what was copied, so that `unregister_tasks` removes exactly that. Returns
    the files written.

    Raises:
        UnlearnError: The folder is someone else's, or cannot be written.
    """
    target = installed_task_folder() if target is None else target
    written: list[Path] = []
    try:
        for source, files in _sources():
            home = target / source.name
            if home.exists():
                _remove(home)
            home.mkdir(parents=True)
            written += [Path(shutil.copyfile(path, home / path.name)) for path in files]
            names = [path.name for path in files]
            by = "axolotl-unlearn tasks register"
            write_json(home / MARKER, {"by": by, "version": TASK_VERSION, "files": names})
    except OSError as error:
        raise UnlearnError(
            f"{target} cannot be written ({error.strerror}); run lm_eval with "
            "`--include_path eval_tasks` instead.",
            code="tasks.read-only",
        ) from error
    return written


def unregister_tasks(target: Path | None = None) -> list[Path]:
    """Remove what `register_tasks` copied; returns the folders removed."""
    target = installed_task_folder() if target is None else target
    homes = [target / source.name for source, _ in _sources() if (target / source.name).exists()]
    for home in homes:
        _remove(home)
    return homes


def _remove(home: Path) -> None:
    """Remove a folder of ours; refuse one without our marker or with more in it."""
    marker = home / MARKER
    if not marker.is_file():
        raise UnlearnError(
            f"{home} exists but was not made by `axolotl-unlearn tasks register`; move it away.",
            code="tasks.not-ours",
        )
    ours = {*json.loads(marker.read_text(encoding="utf-8"))["files"], MARKER, "__pycache__"}
    others = sorted(path.name for path in home.iterdir() if path.name not in ours)
    if others:
        raise UnlearnError(
            f"{home} holds {others[0]!r}, which is not ours; move it away first.",
            code="tasks.not-ours",
        )
    shutil.rmtree(home)
