"""From full-weight changes back to a LoRA adapter of chosen rank, by SVD."""

from __future__ import annotations

import torch
from torch import Tensor


def to_factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best rank-``rank`` factors of ``change`` [out, in] (Eckart-Young).

    Returns A [rank, in], B [out, rank] with B A ~ change (each carries the root of the singular
    values), and the share of the squared Frobenius norm they keep. A rank above min(out, in)
    is padded with zeros, because an adapter has one rank for all modules.
    """
    u, s, v = torch.linalg.svd(change.float(), full_matrices=False)
    total = float(s.square().sum())
    kept = min(rank, len(s))
    root = s[:kept].sqrt()
    a = torch.zeros(rank, change.shape[1])
    b = torch.zeros(change.shape[0], rank)
    a[:kept] = root[:, None] * v[:kept]
    b[:, :kept] = u[:, :kept] * root
    energy = float(s[:kept].square().sum()) / total if total > 0 else 1.0
    return a, b, energy
