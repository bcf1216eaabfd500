"""MRP: project a few learned directions out of hidden states.

arXiv 2508.15449 and its released code (read whole): for some layers a matrix W ``[k, D]``, Q its
orthonormal basis by QR, ``h <- h - (h Q') Q`` after the layer; W alone is trained on ``-NLL(forget) + 1.2 NLL(retain)``; bases of earlier requests stay in front of W. The
code begins at principal directions of retain states less their projection on *all* forget tokens,
which is zero as soon as there are D tokens. Here W begins where forget states vary most beside
retain states (generalised eigenvectors of the two second moments).

A projection of a whole layer's output cannot be merged, since the residual stream passes by its
weights. ``where="written"`` projects what the layer's two linear outputs write instead (ours): that
is `folder.merge`'s and leaves plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from axolotl_unlearn.attacks.relearn import endless
from axolotl_unlearn.attacks.target import collate
from axolotl_unlearn.engine.layers import decoder_layers
from research.inference.modeling_intervened import intervene

Rows = Sequence[tuple[list[int], list[int]]]


def basis(directions: Tensor, before: Tensor | None = None) -> Tensor:
    """Orthonormal rows of what ``before`` and ``directions`` ``[k, D]`` span together."""
    both = directions if before is None else torch.cat([before.to(directions), directions])
    return torch.linalg.qr(both.mT)[0].mT


def places(
    model: nn.Module, layers: Sequence[int], where: Literal["block", "written"]
) -> list[str]:
    """Names of the modules whose outputs are projected."""
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for number in layers:
        layer = decoder_layers(model)[number]
        if where == "block":
            found.append(names[id(layer)])
            continue
        size = model.get_input_embeddings().weight.shape[1]
        ends = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "out_proj", "fc2", "wo")
        found += [
            names[id(module)]
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
            and module.out_features == size
            and name.rpartition(".")[2] in ends
        ]
    return found


@torch.no_grad()
def moments(model: Any, rows: Rows, paths: Sequence[str]) -> dict[str, Tensor]:
    """``[D, D]`` mean outer product of each module's outputs with themselves."""
    sums: dict[str, Tensor] = {path: torch.zeros(()) for path in paths}
    count = sum(len(ids) for ids, _ in rows)

    def watch(path: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            h = (output[0] if isinstance(output, tuple) else output).float().flatten(0, 1)
            sums[path] = sums[path].to(h) + h.mT @ h / count

        return hook

    handles = [model.get_submodule(path).register_forward_hook(watch(path)) for path in paths]
    try:
        for row in rows:
            model(**collate([row], model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def begun(forget: Tensor, retain: Tensor, k: int) -> Tensor:
    """``[k, D]`` rows of length 1 with the largest ``w forget w' / w retain w'``."""
    from scipy.linalg import eigh

    floor = 1e-3 * float(retain.diagonal().mean()) * torch.eye(len(retain))
    vectors = eigh(forget.cpu().double().numpy(), (retain.cpu() + floor).double().numpy())[1]
    rows = torch.tensor(vectors[:, ::-1][:, :k].T.copy(), dtype=torch.float32)
    return rows / rows.norm(dim=1, keepdim=True)


def mrp(
    model: Any,
    forget: Rows,
    retain: Rows,
    paths: Sequence[str],
    *,
    k: int = 2,
    steps: int = 100,
    rate: float = 1e-2,
    retain_rate: float = 1.2,
    batch: int = 8,
    before: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """``project:PATH`` tensors; the model's own weights do not move.

    Args:
        forget, retain: Token ids and labels of rows.
        paths: Of `places`.
        rate: Of Adam on directions of length 1; the code's plain descent stands still where a text
            is memorized, because the gradient of its NLL vanishes.
        before: Such tensors of earlier requests, which stay.
    """
    kept = {path: (before or {}).get(f"project:{path}") for path in paths}
    model.requires_grad_(False).eval()
    ours, theirs = (moments(model, side, paths) for side in (forget, retain))
    weights = {
        path: begun(ours[path], theirs[path], k).to(model.device).requires_grad_() for path in paths
    }
    optimizer = torch.optim.Adam(weights.values(), lr=rate)
    orders = [endless(len(side), seed) for side in (forget, retain)]
    for _ in range(steps):
        tensors = {f"project:{path}": basis(w, kept[path]) for path, w in weights.items()}
        handles = intervene(model, tensors)
        try:
            losses = [
                model(**collate([side[next(order)] for _ in range(batch)], model.device)).loss
                for side, order in zip((forget, retain), orders, strict=True)
            ]
            (retain_rate * losses[1] - losses[0]).backward()
        finally:
            for handle in handles:
                handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    return {f"project:{path}": basis(w.detach(), kept[path]) for path, w in weights.items()}
