"""``axolotl train CONFIG`` with ``use_ray: true`` on workers without GPUs.

Axolotl's `do_cli` asks Ray for GPUs whatever ``resources_per_worker`` says (``use_gpu=True``). Here
that argument follows the config; all else is Axolotl's (see also rank.py).
"""

import os
import sys

import axolotl.cli.train
import ray
import ray.train

asked = ray.train.ScalingConfig


def as_configured(*, use_gpu, resources_per_worker, **settings):
    use_gpu = resources_per_worker.get("GPU", 0) > 0
    return asked(use_gpu=use_gpu, resources_per_worker=resources_per_worker, **settings)


def in_worker(given: dict) -> None:
    import torch
    from axolotl.cli.train import ray_train_func
    from rank import no_peers

    torch.cuda.can_device_access_peer = no_peers
    ray_train_func(given)


if __name__ == "__main__":
    kept = {k: v for k, v in os.environ.items() if k.startswith(("HF_", "AXOLOTL_", "OMP_"))}
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), os.environ["PYTHONPATH"]])
    ray.init(runtime_env={"env_vars": kept | {"PYTHONPATH": path}})
    ray.train.ScalingConfig, axolotl.cli.train.ray_train_func = as_configured, in_worker
    config, sys.argv = sys.argv[1], ["axolotl"]
    axolotl.cli.train.do_cli(config=config)
