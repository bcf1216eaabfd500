"""Quantisation attack: small changes of the weights, as unlearning makes them, may be rounded away.

After unlearning with a utility constraint, 21 % of the forgotten knowledge was left at full
precision and 83 % after 4-bit rounding (arXiv 2410.16454). Weights are rounded to the nearest
point of a grid and written back (dequantised), so every evaluation runs as before. Schemes:

    int8  symmetric, one scale an output row       (torchao)
    int4  asymmetric, one scale and zero a group   (torchao)
    nf4       one scale a group                    (bitsandbytes)

A group has 64 weights.

Embeddings, norms, routers and the output head stay as they are, as in both libraries. GPTQ and
AWQ, which need calibration data, are out of scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.attacks.probes import Scores, plain_probes
from axolotl_unlearn.attacks.results import figures_row, result_of, stored
from axolotl_unlearn.attacks.target import AttackTarget
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.store import Store

SCHEMES = ("int8", "int4", "nf4")
GROUP = 64


@torch.no_grad()
def round_to_nearest(weight: Tensor, scheme: str, group: int = GROUP) -> Tensor:
    """The weight ``[out, in]`` after quantising and dequantising, in its own dtype.

    Args:
        group: Weights that share a scale; int8 takes whole rows. A row whose length the group
            does not divide is filled up with copies of its last weight for int4 (which leaves
            each group's range as it is); bitsandbytes groups run on over the end of a row.
    """
    plain = weight.detach().float()
    if scheme == "nf4":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        # As one row: on a CPU it takes a wrong scale where rows are no multiple of a group.
        codes, state = quantize_4bit(plain.flatten(), blocksize=group, quant_type=scheme)
        return dequantize_4bit(codes, state).view_as(plain).to(weight.dtype)
    if scheme == "int8":
        return _torchao(plain, plain.shape[1], 8, symmetric=True).to(weight.dtype)
    columns = plain.shape[1]
    filled = torch.cat([plain, plain[:, -1:].expand(-1, -columns % group)], 1)
    return _torchao(filled, group, 4, symmetric=False)[:, :columns].to(weight.dtype)


def _torchao(weight: Tensor, group: int, bits: int, symmetric: bool) -> Tensor:
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    if group == 1:
        return weight  # exact, each with a scale of its own; torchao has no such block
    mapping = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    block, low, high = (1, group), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    grid = (torch.int8, low, high)
    scale, zero = choose_qparams_affine(weight, mapping, block, *grid)
    rounded = quantize_affine(weight, block, scale, zero, *grid)
    return dequantize_affine(rounded, block, scale, zero, *grid, output_dtype=torch.float32)


@torch.no_grad()
def quantise_model(model: Any, scheme: str, group: int = GROUP) -> None:
    """Round the weights of all linear layers and experts in place, the output head excepted.

    Raises:
        UnlearnError: if most of the model's weights are in no linear layer.
    """
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    # Conv1D (GPT-2) keeps its weight as [in, out].
    weights = [m.weight.t() if isinstance(m, Conv1D) else m.weight for m in layers]
    for module in model.modules():
        # Experts lie in one tensor, [expert, out, in]; gpt-oss and Llama 4 have [expert, in, out].
        turned = getattr(module, "is_transposed", isinstance(module, Llama4TextExperts))
        for stack in module.parameters(recurse=False):
            if stack.dim() > 2 and not isinstance(module, nn.modules.conv._ConvNd):
                weights += (stack.mT if turned else stack).detach().flatten(0, -3)
    kept = {m.weight for m in model.modules() if m is head or isinstance(m, nn.Embedding)}
    every = sum(p.numel() for p in model.parameters() if p not in kept)
    if not weights or 2 * sum(weight.numel() for weight in weights) < every:  # as of DBRX
        raise UnlearnError(
            "most of the model's weights are in no linear layer, so they cannot be quantised: "
            "leave out this attack.",
            code="attack.nothing-to-quantise",
        )
    for weight in weights:
        weight.copy_(round_to_nearest(weight, scheme, group))


def quantise_attack(
    subject: AttackTarget,
    store: Store,
    *,
    schemes: Sequence[str] = SCHEMES,
    control: AttackTarget | None = None,
) -> dict[str, Any]:
    """Recall of the forget rows at full precision and after each scheme."""
    if unknown := [scheme for scheme in schemes if scheme not in SCHEMES]:
        raise UnlearnError(
            f"there is no scheme {unknown[0]!r}; choose among {', '.join(SCHEMES)}.",
            code="attack.no-scheme",
        )
    probes = plain_probes(subject.records, join=subject.join)

    def scores(of: AttackTarget, scheme: str | None) -> Scores:
        how = ("quantise", scheme, GROUP) if scheme else "plain"

        def make() -> Scores:
            model, tokenizer = of.load()
            if scheme is not None:
                quantise_model(model, scheme)
            return of.ask(model, tokenizer, probes, scheme or "as it is")

        return stored(store, of, subject.records, how, make)

    before, rows = scores(subject, None), []
    for scheme in (None, *schemes):
        name = f"{scheme}, groups of {GROUP}" if scheme else "not quantised"
        name = "int8" if scheme == "int8" else name
        theirs = scores(control, scheme) if control else None
        rows.append(figures_row(name, scores(subject, scheme), before, theirs))
    return result_of("quantise", "Quantisation", subject, control, rows, group=GROUP)
