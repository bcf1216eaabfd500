"""Where the memory of a step goes, and a vocabulary of 150 000 at 2048 tokens.

    python -m research.benchmarks.memory

The peak is that of tensors alive at once (counted on every operation), not of the process: it does
not depend on the allocator and shows what grows with what.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from research.benchmarks import models, step


class Alive(TorchDispatchMode):
    """Counts bytes of storages made while inside: alive now, at most, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.known: set[int] = set()  # addresses of storages that are counted, or not ours

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, pointer = storage.nbytes(), storage.data_ptr()
        if not size or pointer in self.known:
            return
        self.known.add(pointer)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._free, size, pointer)

    def _free(self, size: int, pointer: int) -> None:
        self.now -= size
        self.known.discard(pointer)


def watch(model, loss_of, batch) -> dict[str, float]:
    """Peak of tensors alive in forward and backward, and the largest one, in MB."""
    for parameter in model.parameters():
        parameter.grad = None
    count = Alive()
    for tensor in [*model.parameters(), *model.buffers(), *batch.values()]:
        count.known.add(tensor.untyped_storage().data_ptr())  # there before the step
    with count:
        loss_of(batch).backward()
    return {"peak_mb": count.peak / 1e6, "largest_mb": count.largest / 1e6}


def parts() -> dict[str, dict[str, float]]:
    """The 77 M model on a batch of LUME rows: each way's tensors."""
    batch = next(models.batches(1))
    found = {}
    for way in ("ours", "ours_npo_nll", "finetune", "finetune_packed", "framework", "zjuklab"):
        model = models.with_lora(models.olmo()).train()
        found[way] = watch(model, step.VARIANTS[way](model, [batch]), batch)
    return found


def large_vocabulary(tokens: int = 2048, vocabulary: int = 150_000) -> dict[str, float]:
    """All of 2048 tokens labelled, KL on half of them; whole float32 logits would be 1229 MB each,
    and at least four of them are alive at once in the plain way."""
    model = models.with_lora(models.olmo(models.Shape(256, 2, 704, 4, vocabulary))).train()
    batch = models.random_batch(8, tokens // 8, tokens // 8, vocabulary)
    got = watch(model, step.VARIANTS["ours"](model, []), batch)
    return {**got, "whole_logits_mb": tokens * vocabulary * 4 / 1e6}


def measure() -> dict[str, dict]:
    """Everything, rounded."""
    found = {"parts": parts(), "vocabulary_150k_tokens_2048": large_vocabulary()}
    return json.loads(json.dumps(found), parse_float=lambda x: round(float(x), 1))


def main(measure: Callable[[], dict] = measure, about: str = __doc__) -> None:
    """Print what a benchmark of tensors measures."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
