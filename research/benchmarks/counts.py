"""What a step asks of the host, counted on a CPU: operations, host time, waits for the device.

    make bench-counts

A GPU that waits for its host is as fast as the host starts kernels. How many that are, and how
often the host stops for an answer, does not depend on the device, so it is counted here: 32 layers
of a tiny width, NPO + NLL + KL with LoRA r32 and gradient checkpointing, four pairs of LUME rows a
step, bf16 weights, the head in one block as on a GPU. Writes counts.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from research.benchmarks import models, step
from research.benchmarks.gpu import recipe_batches, sent_batch

#: Time and memory are not what is counted; depth is.
SHAPE = models.Shape(64, 32, 128, 4, 512)
WAYS = ("ours", "later", "cached", "finetune_packed")
PAIRS = 4
#: Operations that allocate, name or alias, and start nothing on a device.
STARTS_NOTHING = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")
    + ("_unsafe_view", "lift_fresh", "_local_scalar_dense", "set_", "resize_", "is_same_size")
    + ("_reshape_alias", "record_stream", "split_with_sizes")
)
#: Operations whose result the host must know before it can go on.
WAITS = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
    + ("unique_consecutive", "repeat_interleave", "is_nonzero", "bincount")
)
INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))


class Counted(TorchDispatchMode):
    """Counts what would be kernels (``operations``) and waits (``syncs``, by name) on a GPU.

    Reading a tensor on a CPU is no operation, so `Asked` listens to Python for those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.syncs: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        name = func._schema.name.partition("::")[2]
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = bool(aliases) and all(one is not None and not one.is_write for one in aliases)
        self.operations += name not in STARTS_NOTHING and not is_view
        by_mask = name in INDEXING and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name in WAITS or by_mask:
            self.syncs[name] += 1
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """Copies to the host, and from it out of memory that is not pinned."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        made = name in ("tensor", "as_tensor") and kwargs.get("device") is not None
        if name in ("cpu", "tolist") or (made and not isinstance(args[0], Tensor)):
            self.counted.syncs[name] += 1
        return func(*args, **kwargs)


def counted(run: Callable[[], Any]) -> Counted:
    """What a call starts and waits for."""
    counter = Counted()
    with counter, Asked(counter):
        run()
    return counter


def make_step(way: str, batches: list[dict[str, Tensor]], shape: models.Shape = SHAPE):
    """A whole step of a way but for the optimizer: loss, gradients, and one look at the loss."""
    torch.manual_seed(0)
    model = models.with_lora(models.olmo(shape, torch.bfloat16)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    name = {"ours": "ours_first_epoch", "later": "ours", "cached": "ours_cached"}.get(way, way)
    loss_of = step.VARIANTS[name](model, [] if way == "finetune_packed" else batches)

    def run(batch: dict[str, Tensor]) -> float:
        loss = loss_of(batch)
        loss.backward()
        return float(loss.detach())

    for batch in batches[:2]:
        run(batch)
    return run


def measure(rounds: int = 12, shape: models.Shape = SHAPE) -> dict[str, dict[str, float]]:
    """Counts of each way, and the least processor time of ``rounds`` steps, all ways in turn."""
    from axolotl_unlearn.engine import head_losses

    # On a CPU the softmax is taken in blocks that stay in its cache; a GPU takes it at once.
    blocks, head_losses._blocks = head_losses._blocks, lambda logits: [slice(0, len(logits))]
    try:
        # With what the collator says of them, as the trainer has them.
        batches = [sent_batch(b, "cpu") for b in recipe_batches(4, PAIRS, shape.vocabulary)]
        steps = {way: make_step(way, batches, shape) for way in WAYS}
        counts = {way: counted(lambda run=run: run(batches[2])) for way, run in steps.items()}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, run in steps.items():
                start = time.process_time()
                run(batches[3])
                seconds[way].append(time.process_time() - start)
    finally:
        head_losses._blocks = blocks
    return {
        way: {
            "operations": counts[way].operations,
            "host_ms": round(1e3 * min(seconds[way]), 1) if rounds else None,
            "syncs": counts[way].syncs.total(),
        }
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=models.ROOT / "research" / "benchmarks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.rounds)
    about = {"date": date.today().isoformat(), "machine": models.machine(), "rounds": given.rounds}
    (given.out / "counts.json").write_text(json.dumps(about | found, indent=1) + "\n", "utf-8")
    for way, numbers in found.items():
        base = found["finetune_packed"]
        print(
            f"{way:16} {numbers['operations']:6} operations ({numbers['operations'] / base['operations']:.3f})"
            f"  {numbers['host_ms']:6} ms of the host ({numbers['host_ms'] / base['host_ms']:.3f})"
            f"  {numbers['syncs']:2} waits"
        )


if __name__ == "__main__":
    main()
