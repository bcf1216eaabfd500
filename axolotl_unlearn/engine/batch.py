"""A batch, and what the host knows of it, so that no step waits for the device.

Lengths, masks and labels decide which rows and positions are computed. Read from a GPU, each of
them makes the host wait for all that it started there. So masks are arrays on the host, and the
collator's own values travel with its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axolotl_unlearn.device import may_be_pinned, pinned


class Batch(dict[str, Tensor]):
    """Rows as tensors by name: ``input_ids``, ``attention_mask``, ``labels`` ``[R, T]``, facts
    ``[R]``. A tensor is put in anew (``|``), and not written in place.

    Args:
        tensors: Of `PairCollator` with its ``host``, or any others.
        host: Values of some of them; those of another are read when `on_host` is asked for them.
    """

    def __init__(self, tensors: Mapping[str, Any], host: Mapping[str, NDArray] | None = None):
        super().__init__(tensors)
        self.host: dict[str, NDArray] = {**self.pop("host", {}), **(host or {})}

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Batch:
        """The same, or one of these tensors."""
        return tensors if isinstance(tensors, cls) else cls(tensors)

    @classmethod
    def sent(cls, values: Mapping[str, NDArray], device: torch.device) -> Batch:
        """One of values on the host, for whose copy it does not wait."""
        return cls({name: to_device(value, device) for name, value in values.items()}, values)

    def __or__(self, others: Mapping[str, Tensor]) -> Batch:
        known = {name: value for name, value in self.host.items() if name not in others}
        return Batch({**self, **others}, known)

    @property
    def device(self) -> torch.device:
        """Where its tokens are."""
        return self["input_ids"].device

    def on_host(self, name: str) -> NDArray:
        """The values of a tensor; those that are not known are copied, which the host waits for."""
        if name not in self.host:
            self.host[name] = self[name].detach().cpu().numpy()
        return self.host[name]

    def rows(self, chosen: NDArray | Sequence[int], names: Iterable[str] | None = None) -> Batch:
        """Some rows (numbers or a mask), without the padding that they share."""
        width = 1 + int(self.on_host("attention_mask")[chosen].any(0).nonzero()[0].max())
        values = {name: self.on_host(name)[chosen] for name in names or self}
        return Batch.sent(
            {name: value[:, :width] if value.ndim > 1 else value for name, value in values.items()},
            self.device,
        )


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, for all of which the host waits once a device: each has a stream of its own."""
    devices = dict.fromkeys(one.device for one in tensors if may_be_pinned(one.device))
    copied = [one.to("cpu", non_blocking=one.device in devices) for one in tensors]
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    return copied


def to_device(values: NDArray, device: torch.device) -> Tensor:
    """A copy for which the host does not wait."""
    made = torch.from_numpy(np.asarray(values, order="C"))
    return pinned(made, device).to(device, non_blocking=True)


def indices(mask: NDArray, device: torch.device) -> tuple[Tensor, ...]:
    """Row and time of each position of a mask, on the device."""
    return to_device(np.stack(mask.nonzero()), device).unbind()
