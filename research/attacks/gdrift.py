"""G-Drift: how far a step against a text moves what the model says and thinks of it.

arXiv 2604.00419: one step of gradient ascent on the text; changes of logits, hidden states and
projections on fixed directions go into a logistic classifier. Members move less. The paper's code
is not published. Step, directions and summary over tokens are ours, and the classifier is the
cross-validated ridge of `metrics.learned`, which has an exact test.

Shape letters: n tokens, V vocabulary, L layers, D hidden size, K directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from axolotl_unlearn.engine.token_scoring import Query
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import input_device
from research.attacks.base import Array, Target, attack, by_learning

#: Size of the step: small, so that drifts are those of the gradient, far above float32's rounding.
STEP = 1e-3
DIRECTIONS = 8


def _see(model: torch.nn.Module, query: Query) -> tuple[Tensor, list[Tensor], Tensor]:
    """``[n, V]`` logits, L + 1 hidden states ``[n, D]`` and the mean NLL of the scored tokens."""
    device = input_device(model)
    ids, where = torch.tensor([list(query.ids)], device=device), list(query.times)
    seen = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logits = seen.logits[0, where].float()
    labels = torch.tensor(list(query.targets), device=logits.device)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return logits, [state[0, where].float() for state in seen.hidden_states], loss


def drift(
    before: tuple[Tensor, Sequence[Tensor], Tensor],
    after: tuple[Tensor, Sequence[Tensor], Tensor],
    directions: Tensor,
) -> list[float]:
    """``[2 + 2 L' + K]`` features of what `_see` saw, L' states.

    Change of the loss; mean over tokens of the norm of the change of the logits; of each state the
    mean norm of its change and the cosine of the mean state before and after, subtracted from 1;
    the mean change of the last state on each direction. Norms and the loss as logarithms.

    Args:
        directions: ``[K, D]``, of length 1.
    """
    log = lambda value: float(value.clamp(min=1e-30).log())  # noqa: E731
    found = [log((after[2] - before[2]).abs()), log((after[0] - before[0]).norm(dim=-1).mean())]
    for old, new in zip(before[1], after[1], strict=True):
        turned = 1 - torch.cosine_similarity(old.mean(0), new.mean(0), dim=0)
        found += [log((new - old).norm(dim=-1).mean()), float(turned)]
    return found + (directions @ (after[1][-1] - before[1][-1]).mean(0)).tolist()


@attack(
    "g_drift",
    "gradients",
    "2 forwards, 1 backward, and a copy of the weights",
    "arXiv 2604.00419; step, directions and summary are ours: its code is not published",
    judge=by_learning,
)
def g_drift(target: Target, texts: Sequence[str]) -> Array:
    """``[T, F]`` features; the weights are afterwards what they were, bit by bit."""
    model = target.model
    learned = [p for p in model.parameters() if p.is_floating_point()]
    if any(p.dtype != torch.float32 for p in learned):
        raise UnlearnError("a step so small vanishes in 16 bits; load with --dtype float32.")
    generator = torch.Generator().manual_seed(target.seed)
    size = model.get_input_embeddings().weight.shape[1]
    directions = torch.randn(DIRECTIONS, size, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    wanted = [p.requires_grad for p in learned]
    kept = [p.detach().clone() for p in learned]
    found = []
    try:
        for p in learned:
            p.requires_grad_(True)
        for query in target.queries(texts):
            with torch.enable_grad():
                before = _see(model, query)
                gradients = torch.autograd.grad(before[2], learned, allow_unused=True)
            with torch.no_grad():
                for p, gradient in zip(learned, gradients, strict=True):
                    if gradient is not None:
                        p.add_(gradient, alpha=STEP)
                after = _see(model, query)
                found.append(drift(before, after, directions.to(before[0].device)))
                for p, old in zip(learned, kept, strict=True):
                    p.copy_(old)
    finally:
        with torch.no_grad():
            for p, old, grad in zip(learned, kept, wanted, strict=True):
                p.copy_(old)
                p.requires_grad_(grad)
    return np.array(found)
