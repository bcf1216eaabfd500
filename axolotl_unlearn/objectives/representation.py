"""Objectives that see the hidden states of one decoder layer: RMU and what holds its retain rows.

Each is called with the states of all its positions and returns one value a position: the mean over
the hidden size of a squared distance, as the released codes have it (the papers write the sum).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from annotated_types import Ge, Gt

from axolotl_unlearn.objectives.base import Tensor, objective, torch

Layer = Annotated[int, Ge(0)]


@lru_cache(maxsize=8)
def control_direction(size: int, seed: int) -> Tensor:
    """A unit vector ``[size]``, float64: uniform draws from [0, 1), normalised.

    So it lies in the positive orthant, as in all released codes (``torch.rand``); the paper speaks
    of a random unit vector.
    """
    draw = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw / draw.norm()


@lru_cache(maxsize=8)
def _direction_on(device: torch.device, dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """`control_direction` where it is computed with, copied once."""
    return control_direction(size, seed).to(device, dtype)


@objective("rmu", sees="hidden", unit="token", source="arXiv 2403.03218 (RMU, forget loss)")
def rmu(
    states: Tensor,
    ref_states: Tensor | None,
    *,
    layer: Layer = 7,
    coefficient: Annotated[float, Gt(0)] = 6.5,
    seed: int = 0,
) -> Tensor:
    """RMU: pull a layer's hidden states of forget rows to one random direction.

    ``mean_d (h - c u)^2`` with a unit vector u that depends on ``seed`` alone and ``c`` =
    ``coefficient``. Published: layer 7 of zephyr-7b, c 6.5, retain weight 1200 on ``hidden_mse``,
    only the MLPs of layers 5 to 7 trained.

    Args:
        states: ``[position, hidden]`` output of decoder layer ``layer``, counted from 0.
        ref_states: unused.
    """
    direction = _direction_on(states.device, states.dtype, states.shape[-1], seed)
    return (states - coefficient * direction).square().mean(-1)


@objective(
    "adaptive_rmu",
    sees="hidden",
    reference=True,
    unit="token",
    source="arXiv 2408.06223 (adaptive RMU, forget loss)",
)
def adaptive_rmu(
    states: Tensor,
    ref_states: Tensor,
    *,
    layer: Layer = 7,
    scale: Annotated[float, Gt(0)] = 5.0,
    seed: int = 0,
) -> Tensor:
    """Adaptive RMU: the length of the control vector follows the reference's own states.

    ``mean_d (h - s ||h_ref|| u)^2`` with ``s`` = ``scale``, each position with its own norm, so
    that deep layers, whose states are long, need no coefficient of their own.

    Args:
        states, ref_states: ``[position, hidden]`` of policy and reference after layer ``layer``.
    """
    length = scale * ref_states.norm(dim=-1, keepdim=True)
    direction = _direction_on(states.device, states.dtype, states.shape[-1], seed)
    return (states - length * direction).square().mean(-1)


@objective(
    "hidden_mse",
    sees="hidden",
    reference=True,
    unit="token",
    side="both",
    source="arXiv 2403.03218 (RMU, retain loss)",
)
def hidden_mse(states: Tensor, ref_states: Tensor, *, layer: Layer = 7) -> Tensor:
    """Hold a layer's hidden states to the reference's: ``mean_d (h - h_ref)^2``.

    Args:
        states, ref_states: ``[position, hidden]`` of policy and reference after layer ``layer``.
    """
    return (states - ref_states).square().mean(-1)
