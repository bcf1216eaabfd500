"""The LM head: found, met inside its own forward, followed by what the model does to its logits.

Because the engine steps in inside the head's ``forward``, wrappers that gather or hook parameters
there (DDP, FSDP2, ZeRO-3, PEFT) keep working. What a model does to its logits after the head is
tried once on a few made-up tokens, not assumed.

Shape letters: N tokens, D hidden, V vocabulary.
"""

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


def bare_model(model: nn.Module) -> nn.Module:
    """The language model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: nn.Module) -> nn.Module:
    """The LM head of a (PEFT-wrapped) causal language model."""
    base = bare_model(model)
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


def head_device(model: nn.Module, default: torch.device) -> torch.device:
    """Where the LM head computes; ``default`` unless accelerate has spread the model (`device_map`)
    and brings its inputs there."""
    hooks = (getattr(module, "_hf_hook", None) for module in output_head(model).modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(place) for place in places if place is not None), default)


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


def run_to_head(
    model: nn.Module,
    inputs: dict[str, Tensor],
    program: Callable[[Tensor, Head], list[Tensor]],
    unwrapped: nn.Module,
) -> list[Tensor]:
    """One forward of ``model`` whose head runs ``program``.

    Args:
        program: gets the hidden states that go into the head, on its device, and the way from such
            states to the logits that the model would give.

    Returns:
        What the program returned, on the device of the inputs.
    """
    pieces: list[Tensor] = []
    with_gradient = torch.is_grad_enabled()
    device = inputs["input_ids"].device
    place = head_device(unwrapped, device)

    def at_head(head_inputs: Tensor, head: Head) -> Tensor:
        head_inputs = head_inputs.to(place)
        pieces.extend(program(head_inputs, final_logits(head, unwrapped)))
        if not with_gradient:
            return head_inputs.new_zeros(1, 1, 1)
        return torch.cat([piece.flatten() for piece in pieces])[None, :, None]

    with intercept_head(output_head(unwrapped), at_head):
        output = model(**inputs, use_cache=False, return_dict=True).logits
    # Wrappers act on the output (FSDP2 hooks its gradient), so the numbers are taken from there;
    # models that treat logits after the head would treat ours too.
    if not with_gradient or after_head(unwrapped):
        return [piece.to(device) for piece in pieces]
    flat = output.flatten().split([piece.numel() for piece in pieces])
    return [
        part.view_as(piece).to(device, piece.dtype)
        for part, piece in zip(flat, pieces, strict=True)
    ]


Change = Callable[[Tensor], Tensor]

#: What models do to the logits that their head gives, with a number of their config: capped as
#: Gemma 2 does, multiplied (Cohere, HyperCLOVA X), divided (Granite).
_CHANGES: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda z, value: torch.tanh(z / value) * value,
    lambda z, value: z * value,
    lambda z, value: z / value,
)

_NAMES = ("logit", "lm_head", "softcap")

#: Bare model -> what it does to its logits after the head, learnt once; None: nothing.
_AFTER_HEAD: WeakKeyDictionary[nn.Module, Change | None] = WeakKeyDictionary()


def learn_after_head(model: nn.Module, unwrapped: nn.Module, device: torch.device | str) -> None:
    """Find out what a model does to its logits after the head, unless it is known.

    Raises:
        UnlearnError: It is nothing that is known here.
    """
    bare = bare_model(unwrapped)
    if bare not in _AFTER_HEAD:
        keep_packing_of_weights(bare)
        _AFTER_HEAD[bare] = _change_after_head(model, unwrapped, device)


def _change_after_head(
    model: nn.Module, unwrapped: nn.Module, device: torch.device | str
) -> Change | None:
    """Of all that the model's config allows, what comes nearest to its own logits. One forward.

    Raises:
        UnlearnError: Nothing comes near, or the model gives NaN.
    """
    name = type(bare_model(unwrapped)).__name__
    (ids,) = made_up_rows(unwrapped, 9)
    _, made, logits = run_made_up(model, unwrapped, {"input_ids": ids.to(device)})
    if made.isnan().any():
        raise UnlearnError(
            f"{name} gives NaN at made-up tokens: its numbers overflow. Load it in float32 or "
            "bfloat16; if that does not help, the run that made it failed."
        )
    logits = logits.to(made.device).float()  # the head of a spread model may lie elsewhere

    def changed(change: Change | None) -> Tensor:
        return (made if change is None else change(made)).float()

    def error(change: Change | None) -> float:
        gap = (changed(change) - logits).abs().max().item()
        return gap if math.isfinite(gap) else math.inf

    best = min(_candidates(unwrapped.config.get_text_config()), key=error)
    if not torch.allclose(changed(best), logits, rtol=2e-2, atol=1e-3):
        raise UnlearnError(
            f"{name} changes its logits after the LM head in a way that is not known here; please "
            "report the model's name."
        )
    return best


def _candidates(config: Any) -> list[Change | None]:
    """One or two changes with numbers that the config keeps under fitting names, then none."""
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


def keep_packing_of_weights(model: nn.Module) -> None:
    """Of a 4-bit model that is trained on a CPU. In evaluation bitsandbytes packs its weights anew
    there, for good, for a kernel that passes no gradient on.

    Raises:
        UnlearnError: It has done so.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise UnlearnError(
                    "the model's 4-bit weights were packed for inference on a CPU, which passes no "
                    "gradient on: load the model again and train it before it is evaluated."
                )


def after_head(model: nn.Module) -> Change | None:
    """What the model does to its logits after the head; None where it does nothing.

    Outside a forward it is found out where it is not known (`learn_after_head`).
    """
    if bare_model(model) not in _AFTER_HEAD:
        learn_after_head(model, model, next(model.parameters()).device)
    return _AFTER_HEAD[bare_model(model)]


def final_logits(head: Head, model: nn.Module) -> Head:
    """``head`` followed by `after_head`: hidden states to the logits that the model would give."""
    change = after_head(model)
    return head if change is None else lambda states: change(head(states))


def made_up_rows(model: nn.Module, *lengths: int) -> list[Tensor]:
    """Rows ``[1, n]`` of random tokens, the same on all processes.

    Pad and special tokens could be treated apart; they are unlikely, not excluded.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return [torch.randint(0, vocabulary, (1, n), generator=generator) for n in lengths]


@torch.no_grad()
def run_made_up(
    model: nn.Module, unwrapped: nn.Module, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """A forward of made-up tokens in one row: hidden states before the head, ``[N, D]``, what the
    head makes of them, and the model's logits, ``[N, V]``."""
    kept: list[Tensor] = []

    def keep(states: Tensor, head: Head) -> Tensor:
        kept.extend((states[0], head(states)))
        return kept[1]

    was_training = unwrapped.training
    unwrapped.eval()
    try:
        with intercept_head(output_head(unwrapped), keep):
            logits = model(**inputs, use_cache=False, return_dict=True).logits
    finally:
        unwrapped.train(was_training)
    return kept[0], kept[1][0], logits[0]
