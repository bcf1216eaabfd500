"""Where a model keeps the answers to forget rows: causal tracing (arXiv 2202.05262 section 2).

The embeddings of the prompt get noise, and one kind of module (attention or MLP) of a window of
layers gets back its outputs of the clean run at the prompt's positions. What the log-prob of the
answer regains is the indirect effect of that window. SHA256 (2504.12996) trains the range with most
of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from research.probes.depth import Encoded, decoder_layers

#: Kind -> how its module is called in a decoder layer, by the beginning of the name.
KINDS = {"attention": ("self_attn", "attn", "attention"), "mlp": ("mlp", "feed_forward", "ffn")}


@dataclass(frozen=True)
class Range:
    """Layers ``first`` to ``last`` of one kind, and their share of the effect of that kind."""

    first: int
    last: int
    share: float


def module_of(layer: nn.Module, kind: str) -> nn.Module:
    """The attention or the MLP of a decoder layer.

    Raises:
        UnlearnError: It has none of the known names.
    """
    found = [m for name, m in layer.named_children() if name.startswith(KINDS[kind])]
    if not found:
        names = ", ".join(name for name, _ in layer.named_children())
        raise UnlearnError(
            f"the decoder layers of this model have {names}, none of which is known as its {kind}; "
            "choose layers by hand."
        )
    return found[0]


def linear_names(model: nn.Module, kind: str) -> list[str]:
    """Names of the linear modules of a kind, for `lora_target_modules`."""
    module = module_of(decoder_layers(model)[0], kind)
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


@torch.inference_mode()
def indirect_effects(
    model: Any, encoded: Encoded, *, noise: float = 3.0, window: int = 1, seed: int = 0
) -> dict[str, list[float]]:
    """Kind -> effect of each layer, nats of the answer, the mean over rows.

    Args:
        encoded: token ids (prompt, answer) of each row.
        noise: standard deviation in those of the embedding weights.
        window: so many layers, centred, are restored at once.
    """
    layers = decoder_layers(model)
    half = (window - 1) // 2
    windows = [
        range(max(0, i - half), min(len(layers), i - half + window)) for i in range(len(layers))
    ]
    totals = {kind: torch.zeros(len(layers), dtype=torch.float64) for kind in KINDS}
    embedding = model.get_input_embeddings()
    scale = noise * float(embedding.weight.float().std())
    generator = torch.Generator().manual_seed(seed)
    for prompt, answer in encoded:
        ids = torch.tensor([prompt + answer], device=embedding.weight.device)
        shape = (1, len(prompt), embedding.weight.shape[1])
        drawn = (torch.randn(shape, generator=generator) * scale).to(embedding.weight)
        for kind, effects in _row_effects(model, ids, drawn, windows).items():
            totals[kind] += torch.tensor(effects, dtype=torch.float64)
    return {kind: (total / len(encoded)).tolist() for kind, total in totals.items()}


def _row_effects(
    model: Any, ids: Tensor, noise: Tensor, windows: Sequence[range]
) -> dict[str, list[float]]:
    """Of one row ``[1, T]``, whose prompt is as long as the noise ``[1, E, D]``."""
    end, layers = noise.shape[1], decoder_layers(model)
    modules = {kind: [module_of(layer, kind) for layer in layers] for kind in KINDS}
    with ExitStack() as stack:
        kept = {
            kind: [stack.enter_context(_kept(module)) for module in those]
            for kind, those in modules.items()
        }
        _answer_logp(model, ids, end)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with _replaced(model.get_input_embeddings(), lambda out: out[:, :end] + noise, end):
        corrupt = _answer_logp(model, ids, end)
        for kind, those in modules.items():
            for chosen in windows:
                with ExitStack() as stack:
                    for i in chosen:
                        clean = kept[kind][i][0][:, :end]
                        stack.enter_context(_replaced(those[i], lambda _, clean=clean: clean, end))
                    found[kind].append(_answer_logp(model, ids, end) - corrupt)
    return found


def _answer_logp(model: Any, ids: Tensor, end: int) -> float:
    logits = model(input_ids=ids, use_cache=False).logits[0, end - 1 : -1].float()
    return float(logits.log_softmax(-1).gather(-1, ids[0, end:, None]).sum())


@contextmanager
def _kept(module: nn.Module) -> Iterator[list[Tensor]]:
    """What the module gives while inside."""
    found: list[Tensor] = []
    handle = module.register_forward_hook(lambda *a: found.append(_first(a[-1]).clone()))
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _replaced(module: nn.Module, states: Any, end: int) -> Iterator[None]:
    """The module's output at the first ``end`` positions is what ``states`` makes of it."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = _first(output).clone()
        hidden[:, :end] = states(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def proposed(effects: Sequence[float], share: float = 0.5) -> Range | None:
    """The shortest range of layers with this share of all positive effects, of equally short ones
    that with most; None where nothing has one.

    Example: effects (1, 5, 3, 1), half: layer 1 alone.
    """
    gains = [max(0.0, effect) for effect in effects]
    total = sum(gains)
    if total <= 0:
        return None
    best: tuple[int, float, int] | None = None
    for first in range(len(gains)):
        for last in range(first, len(gains)):
            held = sum(gains[first : last + 1]) / total
            if held >= share - 1e-12:
                candidate = (last - first, -held, first)
                best = candidate if best is None else min(best, candidate)
                break
    length, held, first = best
    return Range(first, first + length, -held)
