"""A pretended accelerator: it computes on the processor and claims to be another device.

    pretend_device.start()                                   # in a process of its own, see `start`
    with pretend_device.away(): ...                          # or that finds a processor alone

`pretend:0` and `pretend:1` (PRETEND_DEVICES=n for n of them) pass every kernel to the processor's
own, so that numbers are the same. They refuse what CUDA refuses: tensors of several devices in one
operation, `.numpy()`, generators of the host. Memory that nobody wrote is NaN. `watch` counts the
kernels and what the host waits for, `torch.pretend.max_memory_allocated` the bytes.

Kernels of a GPU, streams, races, NCCL, Triton and bitsandbytes are not there. Operations that wait
inside one kernel of CUDA are a list (WAIT_FOR_RESULT).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "pretend"
DEVICE = f"{NAME}:0"
_SOURCE = Path(__file__).with_name("pretend_device.cpp")
_COMPILER = os.environ.get("CXX") or "c++"


@dataclass
class Watch:
    """What a block asked of the device.

    Attributes:
        operations: Kernels that were started.
        waits: What the host waited for and "file:line function" of the nearest watched frame, to
            how often.
    """

    within: tuple[str, ...] = ()
    operations: int = 0
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.waits.total()

    def place(self) -> str:
        """The innermost frame whose file name has one of ``within``, else that called torch."""
        frame, nearest = sys._getframe(), ""
        while frame is not None:
            file = frame.f_code.co_filename
            here = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
            if any(part in file for part in self.within):
                return here
            if not nearest and "/torch/" not in file and file != __file__:
                nearest = here
            frame = frame.f_back
        return nearest or "autograd"

    def __str__(self) -> str:
        return "\n".join(f"{n} x {what} at {where}" for (what, where), n in self.waits.items())


_WATCHES: list[Watch] = []


def _waited(what: str) -> None:
    for one in _WATCHES:
        one.waits[what, one.place()] += 1


@contextlib.contextmanager
def watch(*within: str) -> Iterator[Watch]:
    """Count operations and waits of a block.

    Args:
        within: Parts of file names that a wait is put down to.
    """
    made = Watch(within, -torch.ops.pretend.operations())
    _WATCHES.append(made)
    torch.ops.pretend.watch(True)
    try:
        yield made
    finally:
        _WATCHES[:] = [one for one in _WATCHES if one is not made]
        torch.ops.pretend.watch(bool(_WATCHES))
        made.operations += torch.ops.pretend.operations()


@contextlib.contextmanager
def away() -> Iterator[None]:
    """Nothing finds the device, neither here nor in what is started here."""
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", PRETEND_AWAY="1")
    try:
        yield
    finally:
        os.environ.update(ACCELERATE_TORCH_DEVICE=DEVICE)
        del os.environ["PRETEND_AWAY"]


def unavailable() -> str | None:
    """Why it cannot be built here, or None."""
    return None if shutil.which(_COMPILER) else f"there is no C++ compiler ({_COMPILER})"


def _library() -> Path:
    """The extension, built (20 s) once for a source and a version of torch."""
    known = hashlib.blake2b(_SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pretend_device")
    made = folder / f"{known.hexdigest()}.so"
    if made.is_file():
        return made
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = tempfile.mkdtemp(dir=folder)
    except OSError:  # no home of one's own: built for this process alone
        draft = tempfile.mkdtemp()
        made = Path(draft, "kept.so")
    root = Path(torch.__file__).parent
    command = [_COMPILER, "-shared", "-fPIC", "-std=c++20", "-O1", "-w"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    command += [str(_SOURCE), "-o", f"{draft}/new.so", f"-L{root}/lib"]
    subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
    os.replace(f"{draft}/new.so", made)  # another process may have been as quick
    if made.parent != Path(draft):
        os.rmdir(draft)
    return made


def _module() -> ModuleType:
    """`torch.pretend`, as `torch.cuda` is to CUDA."""
    ops = torch.ops.pretend
    module = ModuleType(f"torch.{NAME}")
    seeds = {"seed": 0}

    def manual_seed(seed: int) -> None:
        seeds["seed"] = int(seed)
        ops.seed(int(seed))

    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize()

    def index(device: Any) -> int:
        number = device if isinstance(device, int | None) else torch.device(device).index
        return torch.accelerator.current_device_index() if number is None else number

    nothing = contextlib.nullcontext
    stream = SimpleNamespace(synchronize=synchronize, wait_stream=lambda other: None)
    vars(module).update(
        is_available=lambda: "PRETEND_AWAY" not in os.environ,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: ops.devices(),
        current_device=lambda: torch.accelerator.current_device_index(),
        set_device=lambda device: torch.accelerator.set_device_index(index(device)),
        device=lambda device=None: torch.accelerator.device_index(index(device)),
        synchronize=synchronize,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=lambda stream=None: nothing(),
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        initial_seed=lambda: seeds["seed"],
        get_rng_state=lambda device=None: ops.rng_state(),
        set_rng_state=lambda state, device=None: ops.set_rng_state(state.cpu()),
        get_rng_state_all=lambda: [ops.rng_state()],
        set_rng_state_all=lambda states: ops.set_rng_state(states[0].cpu()),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda *given: True,
        empty_cache=lambda: None,
        get_device_name=lambda device=None: NAME,
        memory_allocated=lambda device=None: ops.allocated(index(device)),
        max_memory_allocated=lambda device=None: ops.peak(index(device)),
        memory_reserved=lambda device=None: ops.allocated(index(device)),
        max_memory_reserved=lambda device=None: ops.peak(index(device)),
        reset_peak_memory_stats=lambda device=None: ops.forget_peak(index(device)),
        mem_get_info=lambda device=None: (1 << 34, 1 << 34),
    )
    return module


def start() -> torch.device:
    """Add the device to this process, where it stays, and `torch.accelerator` names it from then
    on: what does not expect that needs another process. Trainer and Accelerator take it, too."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    if not hasattr(torch, NAME):
        torch.ops.load_library(_library())
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        torch.library.impl("pretend::waited", "CompositeImplicitAutograd")(_waited)
    return torch.device(DEVICE)
