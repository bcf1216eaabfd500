"""Weights in parts: of FSDP2 and ZeRO-3, over processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_part(parameter: Tensor) -> bool:
    """Whether this process holds a part of the weight only (FSDP2 or ZeRO-3)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "placements")


def whole(parameter: Tensor) -> Tensor:
    """The weight without its parts' borders; all processes ask at once, and each gets all of it."""
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed  # `deepspeed.zero` is no module

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward gathers weights from other processes (FSDP, ZeRO-3)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return any(is_part(p) for p in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


def anyone(mine: bool, device: torch.device) -> bool:
    """Whether any process says yes."""
    flag = torch.tensor(float(mine), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)
