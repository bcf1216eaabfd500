"""Collectives of processes that each have a pretended device: gloo's, on the same memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed as dist

from pretend_device import NAME, start


def _host(value: Any) -> Any:
    """Tensors of the host on the same memory, in lists of any depth. What is on the host already
    is refused, as NCCL does."""
    if isinstance(value, list | tuple):
        return [_host(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_cpu:
        raise RuntimeError("No backend type associated with device type cpu")
    return torch.ops.pretend.host(value.detach())


def _collective(name: str) -> Callable:
    """One that has ended when it returns."""

    def call(self: Group, *given: Any, **options: Any) -> Any:
        getattr(self.gloo, name)(*map(_host, given), **options).wait()
        done = torch.futures.Future()
        done.set_result(given[0] if given else None)
        return torch._C._distributed_c10d._create_work_from_future(done)

    return call


class Group(dist.ProcessGroup):
    """Processes that send what is on a device, and objects by way of it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    for name in "allreduce allgather _allgather_base broadcast gather scatter barrier".split():
        vars()[name] = _collective(name)
    del name


def join() -> int:
    """This process is one of several, by the environment of torchrun, on the device of its number.

    Accelerate knows no processes of an unknown device: for it they are those of a host that compute
    elsewhere.
    """
    start()
    index = int(os.environ["LOCAL_RANK"])
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{NAME}:{index}"
    torch.accelerator.set_device_index(index)
    theirs = PartialState.__init__
    PartialState.__init__ = lambda self, cpu=True, **options: theirs(self, True, **options)
    dist.Backend.register_backend(NAME, Group, devices=[NAME])
    dist.distributed_c10d._get_object_coll_device = lambda group=None: NAME
    dist.init_process_group(NAME)
    return index
