"""An unlearning update as a thing of its own: packed, and carried over to the next base.

SkillPack of GraftLLM (arXiv 2505.18502): the update of each weight, compressed by what the weight
is: embeddings and head by magnitude (the largest share stays), attention by the first singular
values, MLPs by as few as hold a share of the energy, factors rounded. The paper rounds by GPTQ with
inputs; here to the nearest of torchao's int8 grid. The next base gets the update added (fine-tuning
transfer, arXiv 2503.20110).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from axolotl_unlearn.attacks.quantise import round_to_nearest
from axolotl_unlearn.errors import UnlearnError

Weights = Mapping[str, Tensor]
ATTENTION = ("attn", "attention")


def updates(base: Weights, tuned: Weights) -> dict[str, Tensor]:
    """tuned - base of each weight that moved.

    Raises:
        UnlearnError: The two have different weights.
    """
    if {n: w.shape for n, w in base.items()} != {n: w.shape for n, w in tuned.items()}:
        raise UnlearnError("both models need the same weights: the next base of one architecture.")
    moved = {name: tuned[name].float() - weight.float() for name, weight in base.items()}
    return {name: change for name, change in moved.items() if change.any()}


def carried(base: Weights, changes: Weights, scale: float = 1.0) -> dict[str, Tensor]:
    """The next base with the update."""
    if missing := [n for n, c in changes.items() if n not in base or base[n].shape != c.shape]:
        raise UnlearnError(f"the next base has no weight {missing[0]} of the update's shape.")
    return {
        name: weight + scale * changes[name].to(weight) if name in changes else weight
        for name, weight in base.items()
    }


def pruned(change: Tensor, share: float) -> Tensor:
    """The largest ``share`` of the entries, the others 0."""
    count = max(1, round(share * change.numel()))
    least = change.abs().flatten().kthvalue(change.numel() - count + 1).values
    return torch.where(change.abs() >= least, change, 0)


def low_rank(change: Tensor, rank: int | None = None, energy: float = 1.0, int8: bool = False):
    """(U sqrt S V' of that rank, or the least with that share of the energy, its rank)."""
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    if rank is None:
        held = s.square().cumsum(0) / s.square().sum()
        rank = int((held < energy - 1e-7).sum()) + 1
    left, right = u[:, :rank] * s[:rank].sqrt(), s[:rank].sqrt()[:, None] * v[:rank]
    if int8:
        left, right = (round_to_nearest(one.contiguous(), "int8") for one in (left, right))
    return left @ right, rank


def packed(
    changes: Weights, *, share: float = 0.5, rank: int = 16, energy: float = 0.95
) -> tuple[dict[str, Tensor], float]:
    """The update as its pack gives it back, and the pack's bytes over the update's in float32.

    Counted: 4 bytes an entry and 4 for its place where pruned, 4 an entry of attention's factors, 1
    an entry of an MLP's; vectors whole.
    """
    found, size = {}, 0
    for name, change in changes.items():
        if change.dim() != 2:
            found[name], size = change, size + 4 * change.numel()
        elif "embed" in name or "head" in name:
            found[name] = pruned(change, share)
            size += 8 * int(found[name].count_nonzero())
        elif any(part in name for part in ATTENTION):
            found[name], used = low_rank(change, min(rank, *change.shape))
            size += 4 * used * sum(change.shape)
        else:
            found[name], used = low_rank(change, energy=energy, int8=True)
            size += used * sum(change.shape)
    return found, size / (4 * sum(change.numel() for change in changes.values()))
