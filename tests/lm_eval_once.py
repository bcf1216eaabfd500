"""What lm-eval finds out in every evaluation, once: its 12 000 task files (6 s), pip's list."""

import copy
import functools
import os

from lm_eval import tasks
from torch.utils import collect_env


def _remember() -> None:
    home = os.path.dirname(os.path.abspath(tasks.__file__)) + "/"
    read = tasks.TaskManager._get_task_and_group

    @functools.cache
    def own(changed: int) -> dict:
        return read(tasks.TaskManager(include_defaults=False), home)

    def remembered(self: tasks.TaskManager, folder: str) -> dict:
        at_home = folder == home
        return copy.deepcopy(own(os.stat(home).st_mtime_ns)) if at_home else read(self, folder)

    tasks.TaskManager._get_task_and_group = remembered
    tasks.TaskManager()
    collect_env.get_pip_packages = functools.cache(collect_env.get_pip_packages)
    collect_env.get_pip_packages(collect_env.run)


_remember()
