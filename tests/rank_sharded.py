"""As rank.py, with the weights in parts (FSDP2), which Accelerate and Axolotl do on a GPU alone.

Set by hand: the state says FSDP where several CPUs are, meshes are of CPUs, Accelerate prepares the
model (Axolotl's own way goes through CUDA), and trained weights are written whole. What starts,
asks the reference, steps and ends is Axolotl, Transformers, Accelerate and ours.
"""

import os
import sys
from pathlib import Path

import axolotl.monkeypatch.accelerate.fsdp2 as axolotl_fsdp2
import axolotl.train
import rank
import torch.distributed.fsdp._fully_shard._fully_shard as torch_fsdp2
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import axolotl_unlearn.plugin
from axolotl_unlearn.reference.sharded import is_part, whole

begin, build = AcceleratorState.__init__, ParallelismConfig.build_device_mesh


def begin_sharded(self, *args, fsdp_plugin=None, **kwargs):
    begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    fsdp_plugin = fsdp_plugin or vars(self).get("fsdp_plugin")
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


def save(cfg, trainer, model):
    kinds = {name: is_part(parameter) for name, parameter in trainer.model.named_parameters()}
    assert all(kinds.values()), kinds
    weights = {name: whole(p).detach().clone() for name, p in trainer.model.named_parameters()}
    if trainer.is_world_process_zero():
        save_file(weights, Path(cfg.output_dir) / "model.safetensors")


if __name__ == "__main__":
    AcceleratorState.__init__ = begin_sharded
    ParallelismConfig.build_device_mesh = lambda self, device: build(self, "cpu")
    mesh = (int(os.environ["WORLD_SIZE"]),)
    for name in ("_init_default_mesh", "_init_default_fully_shard_mesh"):  # by version
        if hasattr(torch_fsdp2, name):
            setattr(torch_fsdp2, name, lambda *_, **__: init_device_mesh("cpu", mesh))
    axolotl_fsdp2.patch_accelerate_fsdp2 = lambda: None
    axolotl_unlearn.plugin._refuse_on_cpu = lambda cfg: None
    axolotl.train.save_trained_model = save
    path, sys.argv = sys.argv[1], ["axolotl"]
    rank.do_cli(config=path)
