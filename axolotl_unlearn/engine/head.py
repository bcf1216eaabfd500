"""Meeting a model at its LM head: find it, step in, know what happens to its logits afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError


def output_head(model: nn.Module) -> nn.Module:
    """The LM head of a (PEFT-wrapped) causal language model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    if head is None:
        raise UnlearnError(
            f"{type(base).__name__} has no output embeddings; unlearning needs a causal language "
            "model with an LM head."
        )
    return head


def output_vocabulary(model: nn.Module) -> int:
    """V of the LM head."""
    head = output_head(model)
    weight = getattr(head, "weight", None)
    if weight is None:
        weight = head.base_layer.weight
    out = getattr(head, "out_features", None)
    return int(out if out else weight.shape[0])


def head_is_frozen(model: nn.Module) -> bool:
    """Whether nothing in the LM head is trained (LoRA on it would count as trained)."""
    return not any(parameter.requires_grad for parameter in output_head(model).parameters())


@contextmanager
def intercept_head(head: nn.Module, program: Callable[[Tensor, Head], Tensor]) -> Iterator[None]:
    """While inside, calling ``head(hidden)`` runs ``program(hidden, original_forward)``."""
    had_own = "forward" in vars(head)
    original = head.forward
    # Not traced by torch.compile: a program is another closure at every step.
    head.forward = torch.compiler.disable(lambda hidden, *_, **__: program(hidden, original))
    try:
        yield
    finally:
        if had_own:
            head.forward = original
        else:
            del head.forward


def text_config(model: nn.Module) -> Any:
    """The config of the language model, also of one with several modalities."""
    config = getattr(model, "config", None)
    get_text = getattr(config, "gettext_config", None)
    return get_text() if callable(get_text) else config


#: What models do to the logits that their head gives, by the key of their config.
_AFTER_HEAD: dict[str, Callable[[Tensor, float], Tensor]] = {
    "final_logit_softcapping": lambda z, cap: torch.tanh(z / cap) * cap,  # Gemma 2
    "logit_scale": lambda z, scale: z * scale,  # Cohere
    "logits_scaling": lambda z, scale: z / scale,  # Granite
    "lm_head_multiplier": lambda z, scale: z * scale,  # Falcon H1
}


def after_head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What the model does to its logits after the head; None where it does nothing.

    `axolotl_unlearn.engine.packing.probe` compares the outcome with the model's own logits.
    """
    config = text_config(model)
    steps = []
    for key, function in _AFTER_HEAD.items():
        value = getattr(config, key, None)
        if value not in (None, 0, 1, 1.0):
            steps.append((function, value))
    if not steps:
        return None

    def apply(logits: Tensor) -> Tensor:
        for function, value in steps:
            logits = function(logits, value)
        return logits

    return apply


def final_logits(head: Head, model: nn.Module) -> Head:
    """``head`` followed by `after_head`: hidden states to the logits that the model would give."""
    rest = after_head(model)
    return head if rest is None else lambda hidden: rest(head(hidden))
