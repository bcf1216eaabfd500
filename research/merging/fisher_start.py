"""LoKU's start of a LoRA (FILA, arXiv 2408.06621 section 3.3): in the part of the weights that
matters to the forget rows and not to the retain rows.

With the Fisher information F of each weight on either side (mean squared gradient of a row's
loss), ``s_i = sqrt(sum_j F_forget,ij / F_retain,ij)`` for row i of W. The best approximation
``B A`` of rank r in the norm with these row weights is ``diag(1/s) U S V'`` from the singular
values of ``diag(s) W``. The LoRA starts there and the base without it, so that their sum is the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.experimental.augment import records_of

#: Information below this share of a weight's mean counts as this much, so that ratios stay finite.
FLOOR = 1e-3


def row_weights(forget: Tensor, retain: Tensor) -> Tensor:
    """``s``, ``[O]``, from the Fisher information ``[O, I]`` of either side.

    Example: forget ((4, 0), (0, 1)), retain all 1: (2, 1).
    """
    least = FLOOR * retain.mean() + torch.finfo(retain.dtype).tiny
    weights = (forget / retain.clamp(min=least)).sum(1).sqrt()
    return weights.clamp(min=FLOOR * float(weights.mean()) + torch.finfo(weights.dtype).tiny)


def weighted_factors(weight: Tensor, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``A [r, I]`` and ``B [O, r]`` whose product is nearest to ``weight [O, I]`` where each row
    counts ``rows`` squared.

    Example: weight diag(3, 2), row weights (1, 2), rank 1: diag(3, 4) is cut to its larger entry,
    the second, so ``B A = diag(0, 2)``.
    """
    u, s, v = torch.linalg.svd(rows[:, None] * weight, full_matrices=False)
    root = s[:rank].sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root / rows[:, None]


def fisher_information(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    rows: Sequence[tuple[list[int], list[int]]],
    on_row: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Mean over rows (ids, labels) of the squared gradient of the row's mean loss."""
    found = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for ids, labels in rows:
        device = next(iter(weights.values())).device
        ids, labels = (torch.tensor([x], device=device) for x in (ids, labels))
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        grads = torch.autograd.grad(loss, list(weights.values()))
        for total, g in zip(found.values(), grads, strict=True):
            total.addcmul_(g, g, value=1 / len(rows))
        on_row()
    return found


def fisher_start(
    config: Mapping[str, Any],
    out: Path,
    *,
    rows: int = 200,
    on_row: Callable[[], None] = lambda: None,
) -> int:
    """Write ``out/base`` and ``out/adapter`` for a raw config; returns how many weights start so.

    Args:
        config: raw Axolotl config with forget and retain rows, ``base_model`` and a LoRA.
        rows: of each side that are read, evenly from its files.

    Raises:
        UnlearnError: No LoRA, no base model, or a side without records in local files.
    """
    from peft import LoraConfig, get_peft_model

    from axolotl_unlearn.config import DataArgs, unlearn_config
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models

    if config.get("adapter") != "lora" or not config.get("lora_r"):
        raise UnlearnError("the config has no LoRA; set `adapter: lora` and `lora_r`.")
    args = unlearn_config(dict(config))
    data = DataArgs() if args is None else args.data
    (spec,) = parse_models([str(config.get("base_model") or "")])
    tokenizer = load_tokenizer(spec)
    longest = data.max_length or config.get("sequence_len") or 1 << 30
    encoder = Encoder(tokenizer, data, longest, config)
    sides = {side: _rows(config, side, data, encoder, rows) for side in ("forget", "retain")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(spec, dtype=torch.float32, device=device)
    model.requires_grad_(False)
    targets = config.get("lora_target_modules") or []
    lora = LoraConfig(
        r=config["lora_r"],
        lora_alpha=config.get("lora_alpha") or config["lora_r"],
        target_modules="all-linear" if config.get("lora_target_linear") else list(targets),
        layers_to_transform=config.get("peft_layers_to_transform"),
        task_type="CAUSAL_LM",
    )
    whole = get_peft_model(model, lora)
    layers = {n: m for n, m in whole.named_modules() if hasattr(m, "lora_A") and len(m.lora_A)}
    weights = {name: layer.base_layer.weight.requires_grad_(True) for name, layer in layers.items()}
    with whole.disable_adapter():
        information = {
            side: fisher_information(whole, weights, those, on_row) for side, those in sides.items()
        }
    with torch.no_grad():
        for name, layer in layers.items():
            s = row_weights(*(information[side][name] for side in ("forget", "retain")))
            a, b = weighted_factors(weights[name], s, config["lora_r"])
            scale = layer.scaling["default"]
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b / scale)
            weights[name].sub_(b @ a)
    whole.save_pretrained(out / "adapter")
    base = whole.unload()
    base.save_pretrained(out / "base")
    tokenizer.save_pretrained(out / "base")
    return len(layers)


def _rows(
    config: Mapping[str, Any], side: str, data: Any, encoder: Encoder, count: int
) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of some rows of a side."""
    if data.rows:
        raise UnlearnError("`unlearn.data.rows` holds rows of Axolotl's own types, not records.")
    records, _ = records_of(side, config, data)
    if not records:
        raise UnlearnError(
            f"`datasets` has no {side} rows; add an entry with `type: axolotl_unlearn.data.{side}`."
        )
    found = []
    for record in records[:: max(1, len(records) // count)][:count]:
        encoded = encoder.encode(record)
        found.append((encoded.input_ids, encoder.labels(encoded, encoder.labelled(record.kind))))
    return found
