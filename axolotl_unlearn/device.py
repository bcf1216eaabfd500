"""The accelerator of this machine, of whatever kind. No other module names one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axolotl_unlearn.errors import UnlearnError

if TYPE_CHECKING:
    import torch

#: Devices that take no copy from memory that is pinned for them.
_NEVER_PINNED = ("cpu", "mps", "meta")


def accelerator() -> torch.device | None:
    """CUDA, ROCm, XPU, NPU, HPU or MPS, without an index; None where there is only a CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def device_name(given: str | None = None) -> str:
    """Where a model goes: what was asked for as it stands, else the accelerator, else "cpu".

    Raises:
        UnlearnError: This machine has no such device.
    """
    here = getattr(accelerator(), "type", "cpu")
    if given and given.partition(":")[0] not in (here, "cpu", "meta"):
        raise UnlearnError(
            f"this machine has no device {given!r}; give `--device {here}`, or leave it out.",
            code="device.none",
        )
    return given or here


def emulates_bfloat16() -> bool:
    """Whether bfloat16 is slow here: only a processor, without instructions for it (avx512_bf16,
    amx_bf16, or those of ARM). A product of matrices takes 4 (AVX-512) to 50 times as long as in
    float32."""
    import torch

    if accelerator() is not None:
        return False
    able = getattr(torch.cpu, "get_capabilities", dict)()  # {} of an older torch
    if able.get("architecture") == "x86_64":  # oneDNN takes AVX-512 alone for support
        return not (able.get("avx512_bf16") or able.get("amx_bf16"))
    known = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported
    return not (known and known())


def may_be_pinned(device: torch.device) -> bool:
    """Whether a copy from pinned memory lets the host go on."""
    return device.type not in _NEVER_PINNED


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor where a copy to the device lets the host go on, if there is such a place."""
    return tensor.pin_memory() if may_be_pinned(device) else tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """The widest float that the device computes with."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def hardware() -> str:
    """What the accelerator is called, for a record; "cpu" where there is none."""
    found = accelerator()
    return "cpu" if found is None else str(_ask("get_device_name") or found.type)


def free_and_total() -> tuple[int, int] | None:
    """Bytes of the accelerator's memory; None where that is not known."""
    return _ask("mem_get_info")


def give_memory_back() -> None:
    """What the accelerator keeps of freed tensors."""
    _ask("empty_cache")


def _ask(name: str) -> Any:
    """Asks the accelerator's module (`torch.cuda` is one); None where it has no answer."""
    import torch

    found = accelerator()
    asked = None if found is None else getattr(torch.get_device_module(found), name, None)
    return None if asked is None else asked()
