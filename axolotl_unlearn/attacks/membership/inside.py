"""Membership from inside the model: what an attacker sees who has its weights.

A model can say the same of a text as one that never saw it and still carry it: a step against the
text moves it less. G-Drift, arXiv 2604.00419: one step of gradient ascent on the text, whose
changes of logits, hidden states and projections on fixed directions go into a classifier. Its code
is not published: step, directions and summary over tokens are ours. The classifier is the
cross-validated ridge of `metrics.learned`, which has an exact test.

Shape letters: T texts, n tokens, V vocabulary, L layers, D hidden size, K directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from axolotl_unlearn.attacks.registry import Array, Target, attack, by_learning
from axolotl_unlearn.engine.token_scoring import Query
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import input_device

#: Size of the step: small, so that drifts are those of the gradient, far above float32's rounding.
STEP = 1e-3
DIRECTIONS = 8


def _see(model: Any, query: Query) -> tuple[Tensor, list[Tensor], Tensor]:
    """``[n, V]`` logits, L + 1 hidden states ``[n, D]`` and the mean NLL of the scored tokens."""
    device = input_device(model)
    ids, where = torch.tensor([list(query.ids)], device=device), list(query.times)
    seen = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logits = seen.logits[0, where].float()
    labels = torch.tensor(list(query.targets), device=logits.device)
    loss = nn.functional.cross_entropy(logits, labels)
    return logits, [state[0, where].float() for state in seen.hidden_states], loss


@contextmanager
def _learning(model: Any, some: Sequence[nn.Parameter]) -> Iterator[None]:
    """These weights alone have gradients in the block."""
    wanted = {p: p.requires_grad for p in model.parameters()}
    chosen = set(some)
    try:
        for p in wanted:
            p.requires_grad_(p in chosen)
        with torch.enable_grad():
            yield
    finally:
        for p, grad in wanted.items():
            p.requires_grad_(grad)


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
        raise UnlearnError(
            "a step so small vanishes in 16 bits; load with --dtype float32.",
            code="attack.not-float32",
        )
    generator = torch.Generator().manual_seed(target.seed)
    size = model.get_input_embeddings().weight.shape[1]
    directions = torch.randn(DIRECTIONS, size, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    kept = [p.detach().clone() for p in learned]

    def put_back() -> None:
        with torch.no_grad():
            for p, old in zip(learned, kept, strict=True):
                p.copy_(old)

    found = []
    try:
        for query in target.queries(texts):
            with _learning(model, learned):
                before = _see(model, query)
                slopes = torch.autograd.grad(before[2], learned, allow_unused=True)
            with torch.no_grad():
                for p, slope in zip(learned, slopes, strict=True):
                    if slope is not None:
                        p.add_(slope, alpha=STEP)
                after = _see(model, query)
                found.append(drift(before, after, directions.to(before[0].device)))
            put_back()
    finally:
        put_back()
    return np.array(found)
