"""Model folders with interventions: written, merged into the weights where that is exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from research.inference import modeling_intervened as code


def write(model: Path, tensors: Mapping[str, Tensor], out: Path) -> Path:
    """A copy of the model's folder with the interventions and the code that loads both.

    Its config names no architecture that a server knows: one that leaves the interventions out
    would give the original.
    """
    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file():
            shutil.copy2(path, out / path.name)
    shutil.copy2(code.__file__, out / "modeling_intervened.py")
    save_file(
        {name: value.float().contiguous() for name, value in tensors.items()}, out / code.FILE
    )
    config = json.loads((out / "config.json").read_text("utf-8"))
    own = {
        "architectures": ["IntervenedForCausalLM"],
        "intervened": config["architectures"][0],
        "auto_map": {"AutoModelForCausalLM": "modeling_intervened.IntervenedForCausalLM"},
    }
    write_json(out / "config.json", config | own)
    # Without a cache, as training leaves it, each new token would ask the gate again.
    path = out / "generation_config.json"
    said = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    write_json(path, said | {"use_cache": True})
    return out


@torch.no_grad()
def merge(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Projections of linear modules' outputs into their weights: W becomes W - Q' (Q W).

    Raises:
        UnlearnError: An intervention that is not linear in the weights, as a projection of a whole
            block's output, through which the residual stream passes, or a gated rotation.
    """
    for name, rows in tensors.items():
        kind, _, path = name.partition(":")
        module = model.get_submodule(path)
        if kind != "project" or not isinstance(module, nn.Linear):
            raise UnlearnError(
                f"{name} is no projection of a linear module's output; keep the hook."
            )
        rows = rows.to(module.weight)
        module.weight -= rows.mT @ (rows @ module.weight)
        if module.bias is not None:
            module.bias -= rows.mT @ (rows @ module.bias)
