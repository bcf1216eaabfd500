"""``axolotl train CONFIG`` as one of several processes on the CPU.

Axolotl asks a torch that is built for CUDA about peers; without a GPU that ends in an error, where
a build for the CPU raises what Axolotl expects.
"""

import sys

import torch
from axolotl.cli.train import do_cli


def no_peers(*_):
    raise AssertionError("Torch not compiled with CUDA enabled")


if not torch.cuda.is_available():
    torch.cuda.can_device_access_peer = no_peers
if __name__ == "__main__":
    path, sys.argv = sys.argv[1], ["axolotl"]
    do_cli(config=path)
