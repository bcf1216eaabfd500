"""GUARD-IT: steer hidden states of forget prompts away, by rotations behind a gate.

arXiv 2605.12765 and its released code, read: means of activations of forget clusters (k-means),
made orthogonal to the retain mean, of the length ``(rho_f + rho_r) / 2``, rho the mean norm of the
activations; the norm-preserving rotation and the mean over clusters above the threshold are in
`modeling_intervened`. The paper's gate is MiniLM's cosine of texts; this one is the code's other,
the cosine of activations, because it needs no second model. The threshold that parts forget from
retain prompts best is ours (the paper reads it off a plot).

Shape letters: N texts, D hidden size, K clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axolotl_unlearn.engine.layers import decoder_layers
from axolotl_unlearn.models import input_device


@torch.no_grad()
def activations(model: Any, tokenizer: Any, texts: Sequence[str], layer: int) -> Tensor:
    """``[N, D]`` mean over tokens of what a decoder layer gives."""
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]], device=input_device(model))
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        found.append(_after(model, ids, states, layer))
    return torch.stack(found)


def _after(model: Any, ids: Tensor, states: Sequence[Tensor], layer: int) -> Tensor:
    if layer + 1 < len(states) - 1:  # the last of `hidden_states` is normalised
        return states[layer + 1][0].float().mean(0)
    kept: list[Tensor] = []
    module = decoder_layers(model)[layer]
    handle = module.register_forward_hook(
        lambda _module, _inputs, output: kept.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return kept[0][0].float().mean(0)


def steering_vector(forget: Tensor, retain: Tensor) -> Tensor:
    """``[D]`` of activations ``[N, D]``: forget mean, orthogonal to the retain mean, scaled."""
    mean, other = forget.mean(0), retain.mean(0)
    away = mean - (mean @ other) / (other @ other + 1e-8) * other
    length = (forget.norm(dim=1).mean() + retain.norm(dim=1).mean()) / 2
    return away / (away.norm() + 1e-8) * length


def clusters(values: Tensor, most: int = 20, seed: int = 0) -> np.ndarray:
    """``[N]`` labels of the k-means, k of 2 to `most`, with the best silhouette."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    points = values.cpu().numpy()
    tried = [
        KMeans(k, n_init=4, random_state=seed).fit_predict(points)
        for k in range(2, min(most, len(points) - 1) + 1)
    ]
    return max(tried, key=lambda labels: silhouette_score(points, labels))


def threshold(forget: np.ndarray, retain: np.ndarray) -> float:
    """Where the share of forget similarities above less that of retain ones is largest, half-way
    between two, where no rounding decides."""
    seen = np.unique(np.concatenate([forget, retain]))
    cuts = np.concatenate([seen[:1] - 1, (seen[1:] + seen[:-1]) / 2, seen[-1:] + 1])
    gain = [(forget > cut).mean() - (retain > cut).mean() for cut in cuts]
    return float(cuts[int(np.argmax(gain))])


def guard_it(
    model: Any,
    tokenizer: Any,
    forget: Sequence[str],
    retain: Sequence[str],
    *,
    layer: int,
    amount: float = -0.3,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Tensors for `modeling_intervened.intervene`.

    Args:
        forget, retain: Prompts as they will be asked.
        layer: Number of the decoder layer whose output is turned (4 of Llama-3.2-1B in the paper).
        amount: Of the vector that is subtracted; the code's example has -0.3, which adds it.
    """
    layers = decoder_layers(model)
    path = next(name for name, module in model.named_modules() if module is layers[layer])
    ours, theirs = (activations(model, tokenizer, side, layer) for side in (forget, retain))
    labels = clusters(ours, seed=seed)
    groups = [ours[labels == label] for label in sorted(set(labels))]
    centroids = torch.stack([group.mean(0) for group in groups])
    nearest = [
        torch.cosine_similarity(side[:, None], centroids[None], dim=-1).max(1).values.cpu().numpy()
        for side in (ours, theirs)
    ]
    return {
        f"rotate:{path}": torch.stack([steering_vector(group, theirs) for group in groups]),
        f"centroids:{path}": centroids,
        f"gate:{path}": torch.tensor([threshold(*nearest), amount]),
    }
