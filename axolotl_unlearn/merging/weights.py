"""Where tensors come from: checkpoints and adapters read one tensor at a time.

Nothing here keeps a file open between tensors: an open safetensors map counts its pages as ours,
and reading a 7B model would look like 28 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json

#: Which base a run started from, by content.
RECORD = "unlearn_base.json"
HEAD = "lm_head.weight"


def read_json(path: Path) -> dict:
    """A JSON file, or one sentence that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        wrong = getattr(error, "strerror", None) or "not valid JSON"
        raise UnlearnError(f"{path} cannot be read ({wrong}): write it again.") from error


class Tensors(dict[str, Path]):
    """The tensors of one or more safetensors files by name, opened anew for each read."""

    @classmethod
    def of_file(cls, path: Path) -> Tensors:
        return cls(dict.fromkeys(sorted(_names(path)), path))

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Tensors:
        """Of the files that its index names, where it has one."""
        index, files = folder / "model.safetensors.index.json", ["model.safetensors"]
        if index.exists():
            files = sorted({*read_json(index)["weight_map"].values()})
        for file in files:
            if not (folder / file).exists():
                raise UnlearnError(f"{folder} lacks {file}: copy it.", code="merging.no-weights")
        return cls({name: folder / file for file in files for name in _names(folder / file)})

    def read(self, name: str) -> Tensor:
        with safe_open(self[name], framework="pt") as handle:
            return handle.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header alone."""
        with safe_open(self[name], framework="pt") as handle:
            return tuple(handle.get_slice(name).get_shape())

    @cached_property
    def scan(self) -> tuple[str, str | None]:
        """SHA-256 over names, shapes, types and bytes (the same however the files are cut), and
        the first tensor that holds NaN or infinity: one reading for both."""
        digest, broken = hashlib.sha256(), None
        for name in sorted(self):
            with safe_open(self[name], framework="pt") as handle:
                dtype, tensor = handle.get_slice(name).get_dtype(), handle.get_tensor(name)
            digest.update(f"{name}|{tuple(tensor.shape)}|{dtype}|".encode())
            flat = tensor.contiguous().flatten()
            if flat.numel():
                digest.update(memoryview(flat.view(torch.uint8).numpy()))
            wide = flat.float() if flat.element_size() < 4 else flat
            if broken is None and flat.is_floating_point() and not wide.isfinite().all():
                broken = name
        return digest.hexdigest(), broken


def _names(path: Path) -> set[str]:
    """Of the tensors of a safetensors file, or one sentence that names it."""
    try:
        with safe_open(path, framework="pt") as handle:
            return {*handle.keys()}
    except SafetensorError as error:
        raise UnlearnError(
            f"{path} is cut off or no safetensors file: copy it again.", code="merging.cut"
        ) from error


@dataclass
class Model:
    """A full model folder: config.json, safetensors, tokenizer."""

    path: Path

    @cached_property
    def config(self) -> dict:
        return read_json(self.path / "config.json")

    @cached_property
    def tensors(self) -> Tensors:
        """All weights; a head that is tied to the embeddings is one weight, stored or not."""
        tensors = Tensors.of_checkpoint(self.path)
        if HEAD in tensors and self._tied:
            del tensors[HEAD]
        return tensors

    @property
    def _tied(self) -> bool:
        """Whether the head is the embedding matrix; some families leave it out of config.json."""
        from transformers import AutoConfig

        try:
            known: Any = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except (ValueError, KeyError, OSError):  # an architecture of its own code
            return bool(self.config.get("tie_word_embeddings"))
        return bool(getattr(known, "tie_word_embeddings", False))


def record_base(folder: str | Path, base: str | Path, adapter: str | Path | None = None) -> Path:
    """Write which base an adapter or model was trained from, by content, into its folder; of a
    model with a merged adapter also that. The check of a recipe compares it strictly."""
    content = {"base": str(base), "sha256": Model(Path(base)).tensors.scan[0]}
    if adapter is not None:
        known = Tensors.of_file(Path(adapter) / "adapter_model.safetensors").scan[0]
        content |= {"adapter": str(adapter), "adapter_sha256": known}
    return write_json(Path(folder) / RECORD, content, indent=None)
