"""What the forks of each_file.py share: the imports (10 s), and what the libraries find out in
every command. lm-eval: its 12 000 task files (6 s), pip's list. Axolotl: the class of a config with
the keys of its plugins (a second). No GPU is looked at: no fork could use it."""

import copy
import functools
import os

import offline  # noqa: F401  the environment that the libraries read

from research.harness import import_libraries

OTHERS = """pytest torch.distributed.fsdp transformers.models.olmo.modeling_olmo sklearn.metrics
transformers.models.llama.modeling_llama transformers.trainer mergekit.merge lm_eval.evaluator
lm_eval.models.huggingface trl axolotl.core.builders axolotl.cli.train hypothesis
axolotl_unlearn.cli axolotl_unlearn.plugin axolotl_unlearn.training.trainer
axolotl_unlearn.requests.run axolotl_unlearn.evaluation.run""".split()
import_libraries(always=OTHERS)


def _remember_configs() -> None:
    from axolotl.cli.config import prepare_plugins
    from axolotl.integrations.base import PluginManager
    from axolotl.utils import config as axolotl_config
    from axolotl.utils.dict import DictDefault

    plugin, merge = "axolotl_unlearn.UnlearnPlugin", axolotl_config.merge_input_args
    merged = functools.cache(lambda *names: merge())
    axolotl_config.merge_input_args = lambda: merged(*PluginManager.get_instance().get_input_args())
    prepare_plugins(DictDefault(plugins=[plugin]))
    axolotl_config.merge_input_args()
    del PluginManager.get_instance().plugins[plugin]


def _remember_tasks() -> None:
    from lm_eval import tasks
    from torch.utils import collect_env

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


_remember_configs()
_remember_tasks()
