"""The head alone: NLL and KL of the same positions through torch, Liger and our own way.

    python -m research.benchmarks.head

512 positions of hidden size 512, vocabulary 50304, frozen head, float32, NLL and KL(policy ||
reference) at every position, forward and backward. Only the ways that give one value a position
can serve NPO, whose gradient weighs whole sequences; a fixed mean cannot, and is timed for
comparison.
"""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F

from axolotl_unlearn.engine.head_losses import ChunkPlan, Group, head_statistics
from axolotl_unlearn.engine.needs import HEAD, ForwardResult, HeadLoss, States
from axolotl_unlearn.objectives import OBJECTIVES
from research.benchmarks.memory import Alive, main

P, D, V = 512, 512, 50304


def ways(plan: ChunkPlan) -> dict:
    """name -> function of (hidden, weight, reference hidden, reference weight, target) to loss."""

    nll = HeadLoss("nll", "retain", OBJECTIVES["nll"], {}, torch.ones(1, P), slope=-1.0)

    def statistics(h, w, target, valuations, frozen):
        row, time = torch.zeros_like(target), torch.arange(len(target))
        group = Group(row, time, target, False, valuations=valuations)
        (found,) = head_statistics(
            lambda row, time: h[time], [group], lambda x: F.linear(x, w),
            plan=plan, vocabulary=len(w), frozen_head=frozen,
        )  # fmt: skip
        return group.factor * found.graded[:, -1].mean()

    def ours(frozen):
        def loss(h, w, ref_h, ref_w, target):
            everywhere = torch.ones(1, len(target), dtype=torch.bool)
            reference = ForwardResult(
                target, {HEAD: States(ref_h, everywhere)}, logits=lambda x: F.linear(x, ref_w)
            )
            kl = HeadLoss("kl", "retain", OBJECTIVES["kl"], {}, everywhere, 1.0, reference)
            return statistics(h, w, target, (nll, kl), frozen)

        return loss

    def whole(h, w, ref_h, ref_w, target):
        logp = F.linear(h, w).log_softmax(-1)
        with torch.no_grad():
            ref_logp = F.linear(ref_h, ref_w).log_softmax(-1)
        nll = F.nll_loss(logp, target)
        return nll + F.kl_div(ref_logp, logp, reduction="batchmean", log_target=True)

    def nll_only(h, w, ref_h, ref_w, target):
        return statistics(h, w, target, (nll,), True)

    def torch_nll_only(h, w, ref_h, ref_w, target):
        return F.linear_cross_entropy(h, w, target, reduction="none").mean()

    found = {
        "whole logits, autograd": whole,
        "chunks, recomputed": ours(False),
        "chunks, linearised (ours)": ours(True),
        "NLL only: linearised (ours)": nll_only,
        "NLL only: torch linear_cross_entropy": torch_nll_only,
    }
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return found

    def liger(h, w, ref_h, ref_w, target):
        # beta 1 is KL(student || teacher); weights of 1 each would need a sum, halves a mean.
        loss = LigerFusedLinearJSDLoss(beta=1.0, compiled=False, chunk_size=plan.size(V))
        return 2 * loss(h, w, ref_h, ref_w, target)

    return {**found, "Liger chunked JSD, beta 1": liger}


def measure(repeats: int = 3) -> dict[str, dict[str, float]]:
    """Processor seconds (least of ``repeats``), MB alive, loss and norm of its gradient."""
    torch.manual_seed(0)
    weight, ref_weight = (0.05 * torch.randn(V, D) for _ in range(2))
    hidden, ref_hidden = torch.randn(P, D), torch.randn(P, D)
    target = torch.randint(0, V, (P,))
    results = {}
    for name, function in ways(ChunkPlan()).items():
        seconds = []
        for _ in range(repeats):
            leaf = hidden.clone().requires_grad_()
            start = time.process_time()
            loss = function(leaf, weight, ref_hidden, ref_weight, target)
            loss.backward()
            seconds.append(time.process_time() - start)
        leaf = hidden.clone().requires_grad_()
        count = Alive()
        for tensor in (weight, ref_weight, hidden, ref_hidden, target, leaf):
            count.known.add(tensor.untyped_storage().data_ptr())
        with count:
            function(leaf, weight, ref_hidden, ref_weight, target).backward()
        results[name] = {
            "cpu_seconds": round(min(seconds), 3),
            "peak_mb": round(count.peak / 1e6, 1),
            "loss": round(float(loss.detach()), 4),
            "gradient_norm": round(float(leaf.grad.norm()), 6),
        }
    return results


if __name__ == "__main__":
    main(measure, __doc__)
