"""What the host knows of a batch, so that no step waits for the device.

Lengths, masks and labels decide which rows and positions are computed. Read from a GPU, each of
them makes the host wait for all that it started there. The collator's own values travel beside the
batch instead (`know`); a tensor that came without them is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from axolotl_unlearn.device import may_be_pinned, pinned

#: Tensor -> its version, and its values at that version.
_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def know(tensor: Tensor, values: NDArray) -> Tensor:
    """Keep the values of a tensor for as long as it lives unchanged; returns it."""
    if not tensor.is_inference():  # such a tensor has no version
        _KNOWN[tensor] = tensor._version, values
    return tensor


def on_host(tensor: Tensor) -> NDArray:
    """The values of a tensor; of one that is not known, by a copy for which the host waits."""
    known = None if tensor.is_inference() else _KNOWN.get(tensor)
    if known is None or known[0] != tensor._version:  # written in place since?
        values = tensor.detach().cpu().numpy()
        know(tensor, values)
        return values
    return known[1]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, for all of which the host waits once."""
    if not any(may_be_pinned(tensor.device) for tensor in tensors):
        return [tensor.cpu() for tensor in tensors]
    copied = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.accelerator.current_stream(tensors[0].device).synchronize()
    return copied


def to_device(values: NDArray, device: torch.device) -> Tensor:
    """A copy for which the host does not wait."""
    made = torch.from_numpy(np.asarray(values, order="C"))
    return pinned(made, device).to(device, non_blocking=True)


def sent(values: NDArray, device: torch.device) -> Tensor:
    """`to_device`, and known."""
    return know(to_device(values, device), values)


def known_batch(batch: dict[str, Any]) -> dict[str, Tensor]:
    """Take what the collator says of its tensors (``host``) out of a batch, wherever they are."""
    for name, values in batch.pop("host", {}).items():
        know(batch[name], values)
    return batch


def indices(mask: Tensor) -> tuple[Tensor, ...]:
    """``mask.nonzero(as_tuple=True)`` from what the host knows."""
    return to_device(np.stack(on_host(mask).nonzero()), mask.device).unbind()
