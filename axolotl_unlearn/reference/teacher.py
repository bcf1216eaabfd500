"""A teacher: a reference that is not the starting model.

Before training it is asked about all rows, into the store of `axolotl_unlearn.reference`, and
released; of it remain the numbers, and the LM head where distributions are compared.

Numbers follow token ids, so both must have one tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.integrations import deepspeed

from axolotl_unlearn.engine.head import final_logits, output_head
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import ModelSpec, load_model
from axolotl_unlearn.reference.base import Reference


class Teacher(Reference):
    """A model of its own, loaded beside the policy while it is asked, and dropped.

    Args:
        path: folder or hub name; ``adapter``: a LoRA folder to put on it.
        device: the policy's, which may still be on none; default: where it is.
        options: keyword arguments of ``from_pretrained``, e.g. ``trust_remote_code``.
    """

    def __init__(
        self,
        path: str,
        adapter: str | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(remember_hidden=True)
        self.path, self.adapter, self.device, self.options = path, adapter, device, options
        self._open: nn.Module | None = None
        self._logits: Head | None = None

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        if model is not self._open:  # else the policy would answer in the teacher's place
            raise UnlearnError(
                "a teacher (`reference: {model: ...}` or `{adapter: ...}`) can be asked before "
                "training only."
            )
        yield

    def logits(self, model: nn.Module) -> Head:
        return self._logits

    @contextmanager
    def opened(self, policy: nn.Module) -> Iterator[nn.Module]:
        spec, device = ModelSpec("teacher", self.path, self.adapter), self.device or policy.device
        attention = {"attn_implementation": policy.config._attn_implementation}
        with _not_sharded():
            model = load_model(spec, dtype=policy.dtype, device=device, **attention, **self.options)
        self._open = model.requires_grad_(False)
        try:
            yield model
        finally:
            self._open = None

    def release(self, model: nn.Module, keep_head: bool) -> None:
        super().release(model, keep_head)
        if keep_head:
            logits, device = final_logits(output_head(model), model), model.device
            self._logits = lambda states: logits(states.to(device))  # a spread policy's lie apart


@contextmanager
def _not_sharded() -> Iterator[None]:
    """While inside, a model is loaded whole in each process. FSDP has the first one alone read the
    weights, and ZeRO-3 gives each process a part; both go on with what they wrap, and nothing wraps
    a teacher."""
    zero = deepspeed._hf_deepspeed_config_weak_ref
    fsdp = os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero
        if fsdp is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = fsdp


def require_same_base(adapter: str, base: str) -> None:
    """Raise unless the adapter in a folder was trained on ``base``.

    Raises:
        UnlearnError: It was not, or there is none.
    """
    file = Path(adapter) / "adapter_config.json"
    if not file.is_file():
        raise UnlearnError(
            f"`reference.adapter: {adapter}` is not the folder of an adapter "
            "(adapter_config.json is missing).",
            code="reference.no-adapter",
        )
    named = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    if named and Path(named).resolve() != Path(base).resolve():
        raise UnlearnError(
            f"the adapter {adapter} was trained on {named}, not on base_model {base}: give "
            f"`reference: {{model: {named}, adapter: {adapter}}}`.",
            code="reference.other-base",
        )


def require_same_tokenizer(path: str, tokenizer: Any, **options: Any) -> None:
    """Raise unless the model in ``path`` gives every token the id that ``tokenizer`` gives it.

    A token that only one of them has is let pass if it is that one's padding token.
    """
    try:
        other = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError):
        raise UnlearnError(
            f"`reference.model: {path}` has no tokenizer, so its token ids cannot be compared with "
            "those of base_model: save the tokenizer it was trained with there."
        ) from None
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    padding = {tokenizer.pad_token, other.pad_token} - (ours.keys() & theirs.keys())
    differ = {token for token, _ in ours.items() ^ theirs.items()} - padding
    if differ:
        raise UnlearnError(
            f"`reference.model: {path}` has another tokenizer than base_model ({len(differ)} "
            f"tokens of {len(ours)} differ): token ids would mean something else to it; use a "
            "teacher of the same tokenizer."
        )
