"""How the gradients of forgetting and of retaining meet: PCGrad, GRU, GU.

    unlearn:
      extensions: [{extension: research.methods.surgery:Surgery, method: pcgrad}]

Both come from one forward, are summed over micro-batches and processes, and become one gradient
before clipping and the optimizer. Vectors are lists of tensors, one a trained weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Batch, Extension, Run

Vector = Sequence[Tensor]


def dot(first: Vector, second: Vector) -> Tensor:
    """Inner product over all weights, scalar float64."""
    return sum((a.double() * b.double()).sum() for a, b in zip(first, second, strict=True))


def pcgrad(forget: Vector, retain: Vector) -> list[Tensor]:
    """PCGrad, arXiv 2001.06782 algorithm 1 for two tasks.

    Where ``<f, r> < 0``, each loses its component along the other:
    ``f - <f, r>/<r, r> r + r - <f, r>/<f, f> f``; else ``f + r``.
    """
    product = dot(forget, retain)
    if product >= 0:
        return [f + r for f, r in zip(forget, retain, strict=True)]
    keep_f, keep_r = 1 - product / dot(forget, forget), 1 - product / dot(retain, retain)
    return [
        f * keep_f.to(f.dtype) + r * keep_r.to(r.dtype) for f, r in zip(forget, retain, strict=True)
    ]


def gru(forget: Vector, retain: Vector) -> list[Tensor]:
    """Gradient rectified unlearning, arXiv 2503.09117: where ``<f, r> < 0`` the forget gradient
    loses its part along the retain gradient, ``f - <f, r>/<r, r> r + r``; else ``f + r``.

    The retain gradient is that of the step, not an average over steps as in the released code.
    """
    product = dot(forget, retain)
    share = product / dot(retain, retain) if product < 0 else torch.zeros_like(product)
    return [f + (1 - share).to(f.dtype) * r for f, r in zip(forget, retain, strict=True)]


def gu(forget: Vector, retain: Vector, scales: Sequence[Tensor | None]) -> list[Tensor]:
    """Geometric-disentanglement unlearning, arXiv 2511.17100: the forget gradient without its
    part along the retain gradient, plus the retain gradient.

    Each weight tensor by itself, in the metric of the optimizer: an update moves a weight by
    ``g / h`` (``h``: ``scales``), so ``f' = f - <f, r>_h / <r, r>_h r`` with
    ``<a, b>_h = sum(a b / h)`` makes ``<f'/h, r> = 0``: to first order the forget part of the
    update leaves the retain loss as it is.

    Args:
        scales: h of each weight, like it, or None for 1.
    """
    joined = []
    for f, r, h in zip(forget, retain, scales, strict=True):
        along = r.double() if h is None else r.double() / h.double()
        length = (along * r.double()).sum()
        share = (along * f.double()).sum() / length if length > 0 else length
        joined.append(f + (1 - share).to(f.dtype) * r)
    return joined


def adam_scales(optimizer: Any, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """``sqrt(v / (1 - beta2^t)) + eps`` of each weight as Adam has it before this step; None
    before its first step, and for optimizers without second moments.

    Raises:
        UnlearnError: The optimizer keeps its second moments in 8 bits.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    scales: list[Tensor | None] = []
    for parameter in parameters:
        state, group = optimizer.state.get(parameter, {}), groups.get(parameter, {})
        moments = state.get("exp_avg_sq", state.get("state2"))
        if moments is None:
            scales.append(None)
            continue
        if moments.shape != parameter.shape or not moments.is_floating_point():
            raise UnlearnError(
                "`method: gu` needs the optimizer's second moments in full: use "
                "`optimizer: adamw_torch` or paged_adamw_32bit."
            )
        correction = 1 - group["betas"][1] ** float(state["step"])
        scales.append((moments / correction).sqrt() + group.get("eps", 1e-8))
    return scales


def gradients(loss: Tensor, parameters: Sequence[Tensor], *, keep: bool = False) -> list[Tensor]:
    """Of a loss by each of the weights; ``keep`` the graph for another one."""
    grads = (
        torch.autograd.grad(loss, parameters, retain_graph=keep, allow_unused=True)
        if loss.requires_grad  # a batch may hold no row of any of a side's entries
        else [None] * len(parameters)
    )
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


class BySide(Extension):
    """Base: the gradients of both sides by themselves, added up at the end of a step.

    Attributes:
        apart: Whether forget objectives need a forward of their own (`forgetting`).
    """

    takes_gradients = True
    apart = False
    method: str | None = None

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        name, again = f"`{cls.__name__}`", cfg.get("gradient_checkpointing_kwargs") or {}
        sharding = any(cfg.get(key) for key in ("fsdp", "fsdp_config", "deepspeed"))
        faults = []
        if not (args.phases or [args])[0].forget:
            faults.append(f"{name} takes the forget gradient: give `forget` (in the first phase).")
        if sharding:
            faults.append(
                f"{name} needs both gradients whole on each process; use DDP instead of FSDP or "
                "DeepSpeed."
            )
        if cfg.get("gradient_checkpointing") and again.get("use_reentrant"):
            faults.append(
                f"{name} takes two gradients from one graph; set "
                "`gradient_checkpointing_kwargs: {use_reentrant: false}`."
            )
        return faults

    def begin(self, run: Run) -> None:
        self.run = run
        self.sides: dict[str, list[Tensor]] = {}
        self.cosine: float | None = None

    def forgetting(self, model: nn.Module) -> AbstractContextManager:
        """Around the forward and backward of the forget objectives."""
        return nullcontext()

    def on_gradients(self, sides: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Of a whole step, over processes, before the sides are joined."""
        return sides

    def on_joined(self, gradient: list[Tensor]) -> list[Tensor]:
        """What becomes ``.grad``."""
        return gradient

    def backward(self, model: nn.Module, batch: Batch, last: bool) -> Tensor:
        if self.apart:
            losses = self.run.losses(model, batch, {"retain"})
            self.add(model, losses)
            with self.forgetting(model):
                forget = self.run.losses(model, batch, {"forget"})
                self.add(model, forget)
            losses = losses | forget
        else:
            losses = self.run.losses(model, batch)
            self.add(model, losses)
        if last:
            self.finish()
        return sum(loss.detach() for loss in losses.values())

    def forget_gradient(self, model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
        """That of the forget objectives over some batches, up to a factor; logs nothing."""
        weights = [p for p in model.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in weights]
        for batch in batches:
            loss = self.run.losses(model, batch, {"forget"}, counted=False)["forget"]
            for sum_, g in zip(total, gradients(loss, weights), strict=True):
                sum_ += g
        return [self.run.reduce(g) for g in total]

    def add(self, model: nn.Module, losses: dict[str, Tensor]) -> None:
        """Gradients of one micro-batch, from one graph."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        remaining = len(losses)
        for side, loss in losses.items():
            remaining -= 1
            grads = gradients(loss, self.parameters, keep=remaining > 0)
            before = self.sides.get(side)
            self.sides[side] = (
                grads if before is None else [a + b for a, b in zip(before, grads, strict=True)]
            )

    def finish(self) -> None:
        """Write the joined gradient."""
        count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        sides = {
            side: [self.run.reduce(g) / count for g in grads] for side, grads in self.sides.items()
        }
        self.sides = {}
        sides = self.on_gradients(sides)
        joined = next(iter(sides.values()))
        if len(sides) > 1:
            forget, retain = sides["forget"], sides["retain"]
            joined = self._joined(forget, retain)
            lengths = (dot(forget, forget) * dot(retain, retain)).sqrt()
            self.cosine = float(dot(forget, retain) / lengths.clamp(min=1e-300))
        for parameter, gradient in zip(self.parameters, self.on_joined(joined), strict=True):
            parameter.grad = gradient

    def _joined(self, forget: Vector, retain: Vector) -> list[Tensor]:
        if self.method == "gu":
            return gu(forget, retain, adam_scales(self.run.optimizer(), self.parameters))
        if self.method is None:
            return [f + r for f, r in zip(forget, retain, strict=True)]
        return {"pcgrad": pcgrad, "gru": gru}[self.method](forget, retain)

    def logged(self) -> dict[str, float]:
        """The cosine of the two gradients of the last step."""
        return {} if self.cosine is None else {"gradient_cosine": round(self.cosine, 6)}


class Surgery(BySide):
    """Joins the two gradients of each step by ``method``."""

    def __init__(self, *, method: Literal["pcgrad", "gu", "gru"] = "pcgrad") -> None:
        self.method = method

    @classmethod
    def faults(cls, cfg: Mapping[str, Any], args: UnlearnArgs) -> list[str]:
        faults, optimizer = super().faults(cfg, args), str(cfg.get("optimizer") or "")
        if not (args.forget and args.retain):
            faults.append("`Surgery` joins two gradients: it needs `forget` and `retain`.")
        methods = [one.parameters.get("method") for one in args.extensions if one.kind is cls]
        if "gu" in methods and re.search("adam.*(8bit|4bit|fp8)", optimizer):
            faults.append(
                "`method: gu` needs the optimizer's second moments in full, which `optimizer: "
                f"{optimizer}` does not keep: use adamw_torch or paged_adamw_32bit."
            )
        return faults
