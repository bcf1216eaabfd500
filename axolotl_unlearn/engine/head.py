"""Meeting a model at its LM head: find it, step in, know what happens to its logits afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError


def output_head(model: nn.Module) -> nn.Module:
    """The LM head of a (PEFT-wrapped) causal language model."""
    base = _bare(model)
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


Change = Callable[[Tensor], Tensor]

#: What models do to the logits that their head gives, with a number of their config: capped as
#: Gemma 2 does, multiplied (Cohere, HyperCLOVA X), divided (Granite).
_CHANGES: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda z, value: torch.tanh(z / value) * value,
    lambda z, value: z * value,
    lambda z, value: z / value,
)
_NAMES = ("logit", "lm_head", "softcap")
#: Bare model -> what it does to its logits, found by `learn_after_head`; None: nothing.
_AFTER_HEAD: WeakKeyDictionary[nn.Module, Change | None] = WeakKeyDictionary()


def _bare(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _candidates(model: nn.Module) -> list[Change | None]:
    """One or two changes with numbers that the config keeps under fitting names, then none."""
    config = text_config(model)
    values = [
        value
        for key, value in vars(config).items()
        if any(name in key for name in _NAMES)
        and isinstance(value, (int, float))
        and value not in (0, 1)  # of no effect, and True and False
    ]
    single = [partial(change, value=value) for value in values for change in _CHANGES]
    double: list[Change] = [
        lambda z, first=first, second=second: second(first(z))
        for first, second in permutations(single, 2)
        if first.keywords != second.keywords
    ]
    return [*single, *double, None]


@torch.no_grad()
def learn_after_head(model: nn.Module, unwrapped: nn.Module, device: torch.device | str) -> None:
    """Find out on a few made-up tokens what a model does to its logits after the head.

    One forward, once a model; the same on all processes. Of all that its config allows, what comes
    nearest to the model's own logits.

    Raises:
        UnlearnError: Nothing comes near.
    """
    bare = _bare(unwrapped)
    if bare in _AFTER_HEAD:
        return
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(text_config(unwrapped).vocab_size)
    ids = torch.randint(0, vocabulary, (1, 9), generator=generator).to(device)
    before: list[Tensor] = []

    def keep(states: Tensor, head: Head) -> Tensor:
        before.append(head(states))
        return before[0]

    was_training = unwrapped.training
    unwrapped.eval()
    try:
        with intercept_head(output_head(unwrapped), keep):
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        logits = logits.to(before[0].device)  # the head of a spread model may lie elsewhere
    finally:
        unwrapped.train(was_training)

    def error(change: Change | None) -> float:
        made = before[0] if change is None else change(before[0])
        gap = (made.float() - logits.float()).abs().max().item()
        return gap if math.isfinite(gap) else math.inf

    change = min(_candidates(unwrapped), key=error)
    made = before[0] if change is None else change(before[0])
    if not torch.allclose(made.float(), logits.float(), rtol=2e-2, atol=1e-3):
        raise UnlearnError(
            f"{type(bare).__name__} changes its logits after the LM head in a way that is not "
            "known here; please report the model's name."
        )
    _AFTER_HEAD[bare] = change


def after_head(model: nn.Module) -> Change | None:
    """What the model does to its logits after the head; None where it does nothing.

    Outside a forward it is found out where it is not known (`learn_after_head`).
    """
    if _bare(model) not in _AFTER_HEAD:
        learn_after_head(model, model, next(model.parameters()).device)
    return _AFTER_HEAD[_bare(model)]


def final_logits(head: Head, model: nn.Module) -> Head:
    """``head`` followed by `after_head`: hidden states to the logits that the model would give."""
    change = after_head(model)
    return head if change is None else lambda states: change(head(states))
