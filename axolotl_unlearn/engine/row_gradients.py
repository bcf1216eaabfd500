"""How strongly each row by itself pulls at each weight matrix, with gradient.

For a linear layer ``y = W x`` the gradient of a row's loss is ``sum_t g_t x_t'`` with ``g_t`` that
by the output at time t, so the square of its norm is ``sum_tu (g_t . g_u) (x_t . x_u)``: all rows
take one forward and one backward, and no matrix of the size of W is formed (arXiv 1510.01799). The
backward keeps its own graph, so that the norms can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.pytorch_utils import Conv1D

from axolotl_unlearn.engine.head import learn_after_head, run_to_head
from axolotl_unlearn.engine.layers import decoder_layers
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError

#: Squared norms below this count as this: the logarithm of 0 has no gradient.
LEAST = 1e-24


def matrices(model: nn.Module) -> list[nn.Module]:
    """The linear layers of the decoder, without those of a LoRA: what they add is part of the
    output of the layer that they stand beside."""
    return [
        module
        for place, module in decoder_layers(model).named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and "lora_" not in place
    ]


@contextmanager
def _watched(modules: list[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While inside, a forward leaves input and output of each module in the yielded list."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # of frozen weights, and nothing is trained before them
            output.requires_grad_()
        seen.append((given[0], output))

    hooks = [module.register_forward_hook(see) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def norms_of_rows(model: nn.Module, batch: dict[str, Tensor], where: Tensor) -> Tensor:
    """Logarithms of the norm of each row's gradient, matrix by matrix, by a padded forward.

    Args:
        model: bare or PEFT model.
        batch: input_ids, attention_mask, labels ``[R, T]``.
        where: ``[R, T]`` bool, positions whose next token counts; a row's loss is its mean NLL.

    Returns:
        ``[R, W]`` float32, natural logarithms; 0 for a row without positions.
    """
    learn_after_head(model, model, batch["input_ids"].device)
    graded = torch.is_grad_enabled()
    rows = where.any(-1).nonzero()[:, 0]
    modules = matrices(model)
    log_norms = torch.zeros(len(where), len(modules), device=where.device)
    if len(rows) == 0:
        return log_norms
    ids, where = batch["input_ids"][rows], where[rows]
    # Kernels of attention have a first derivative only.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), _watched(modules) as seen:
        row, time = where.nonzero(as_tuple=True)

        def losses_at_head(states: Tensor, head: Head) -> list[Tensor]:
            logp = head(states[row, time]).float().log_softmax(-1)
            return [-logp.gather(-1, ids[row, time + 1, None])[:, 0] / where.sum(-1)[row]]

        given = {"input_ids": ids, "attention_mask": batch["attention_mask"][rows]}
        (losses,) = run_to_head(model, given, losses_at_head, model)
        inputs, outputs = zip(*seen, strict=True)
        pulls = torch.autograd.grad(losses.sum(), outputs, create_graph=graded)
        size = (len(rows), ids.shape[1])
        squares = [_squared(x, g, size) for x, g in zip(inputs, pulls, strict=True)]
        norms = torch.stack(squares, -1)
    log_norms = log_norms.index_put((rows,), norms.clamp(min=LEAST).log() / 2)
    return log_norms if graded else log_norms.detach()


def _squared(given: Tensor, pull: Tensor, size: tuple[int, int]) -> Tensor:
    """Squared norms of ``sum_t g_t x_t'``, ``[r, t, in]`` and ``[r, t, out]`` to ``[r]``; some
    experts get rows and times laid end to end."""
    if given.dim() == 2 and len(given) == math.prod(size):
        given, pull = given.unflatten(0, size), pull.unflatten(0, size)
    if given.shape[:2] != size:
        raise UnlearnError(
            f"a linear layer of the decoder gets {list(given.shape)} where {list(size)} tokens "
            "were expected; gradients of rows are not known for models that route single tokens "
            "to linear layers."
        )
    with torch.autocast(given.device.type, enabled=False):
        given, pull = given.float(), pull.float()
        return ((given @ given.mT) * (pull @ pull.mT)).sum((-1, -2))


def refuse_without_second_derivative(model: nn.Module) -> None:
    """Whether the norms can be trained is tried on a made-up row, before the run and not in it.

    Raises:
        UnlearnError: A part of the model has no second derivative.
    """
    ids = torch.arange(4, device=next(model.parameters()).device)[None] + 3
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    where = torch.tensor([[True, True, True, False]], device=ids.device)
    try:
        # `autograd.grad` would pass by what raises only when it is reached.
        norms_of_rows(model, batch, where).sum().backward()
    except RuntimeError as error:
        raise UnlearnError(
            f"`gradient_norm_matching` needs second derivatives, and a part of this model has none "
            f"({error}): use `attn_implementation: sdpa` or `eager`, and no fused kernels."
        ) from error
    finally:
        model.zero_grad()
