"""As rank.py, under DeepSpeed, which Accelerate leaves out without a GPU.

Set by hand: the state says DeepSpeed where several CPUs are. What loads, asks the reference, steps,
saves and ends is Axolotl, Transformers, Accelerate, DeepSpeed and ours.
"""

import sys

import rank
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

import axolotl_unlearn.plugin

begin = AcceleratorState.__init__


def begin_with_deepspeed(self, *args, deepspeed_plugin=None, **kwargs):
    begun = bool(vars(self).get("deepspeed_plugins"))
    begin(self, *args, deepspeed_plugin=deepspeed_plugin, **kwargs)
    if deepspeed_plugin is not None and not begun:
        plugins = deepspeed_plugin
        for one in plugins.values() if isinstance(plugins, dict) else [plugins]:
            one.set_mixed_precision("no")
            one.select(_from_accelerator_state=True)
        self.distributed_type, self.deepspeed_plugins = DistributedType.DEEPSPEED, plugins
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED


if __name__ == "__main__":
    AcceleratorState.__init__ = begin_with_deepspeed
    axolotl_unlearn.plugin._refuse_on_cpu = lambda cfg: None
    path, sys.argv = sys.argv[1], ["axolotl"]
    rank.do_cli(config=path)
