"""A teacher: a reference that is not the starting model.

Before training it is asked about all rows, into the store of `axolotl_unlearn.reference`, and
released; of it remain the numbers, and the LM head where distributions are compared. Another
adapter of the same base is switched in on the policy's own weights (no second model in memory);
a model of its own is loaded beside the policy and dropped.

Numbers follow token ids, so both must have one tokenizer.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axolotl_unlearn.engine.head import final_logits, output_head
from axolotl_unlearn.engine.head_losses import DEFAULT_PLAN, ChunkPlan
from axolotl_unlearn.engine.needs import Head
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import check_complete, merge_adapter
from axolotl_unlearn.reference.base import Reference
from axolotl_unlearn.reference.precompute import weights_digest

_ADAPTER = "teacher"
#: Initialisations of LoRA that move a part of the base weights into the adapter.
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Teacher(Reference):
    """Base: can be asked only while `opened`, and knows afterwards what it was asked."""

    def __init__(self, plan: ChunkPlan = DEFAULT_PLAN) -> None:
        super().__init__(plan, remember_hidden=True)
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


class TeacherModel(Teacher):
    """A model of its own, loaded beside the policy while it is asked.

    Args:
        path: folder or hub name; ``adapter``: a LoRA folder to put on it.
        options: keyword arguments of ``from_pretrained``, e.g. ``trust_remote_code``.
    """

    def __init__(
        self, path: str, adapter: str | None = None, plan: ChunkPlan = DEFAULT_PLAN, **options: Any
    ) -> None:
        super().__init__(plan)
        self.path, self.adapter, self.options = path, adapter, options
        self.device: torch.device | None = None  # the policy's

    @contextmanager
    def opened(self, policy: nn.Module) -> Iterator[nn.Module]:
        from transformers import AutoModelForCausalLM

        with _not_sharded():
            model, facts = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=policy.dtype,
                attn_implementation=policy.config._attn_implementation,
                output_loading_info=True,
                **self.options,
            )
        check_complete(self.path, facts)
        if self.adapter:
            model = merge_adapter(model, self.adapter)
        self._open = model.to(self.device or policy.device).requires_grad_(False).eval()
        try:
            yield model
        finally:
            self._open = None

    def release(self, model: nn.Module, keep_head: bool) -> None:
        super().release(model, keep_head)
        if keep_head:
            self._logits = final_logits(output_head(model), model)


@contextmanager
def _not_sharded() -> Iterator[None]:
    """While inside, a model is loaded whole in each process. FSDP has the first one alone read the
    weights, and ZeRO-3 gives each process a part; both go on with what they wrap, and nothing wraps
    a teacher."""
    from transformers.integrations import deepspeed

    zero = deepspeed._hf_deepspeed_config_weak_ref
    fsdp = os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero
        if fsdp is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = fsdp


class TeacherAdapter(Teacher):
    """Another LoRA adapter of the policy's base, switched in while it is asked."""

    def __init__(self, path: str, plan: ChunkPlan = DEFAULT_PLAN) -> None:
        super().__init__(plan)
        self.path = path

    @contextmanager
    def opened(self, policy: nn.Module) -> Iterator[nn.Module]:
        self._require_this_base(policy)
        was_trained = {p: p.requires_grad for p in policy.parameters()}
        was_training = policy.training
        if hasattr(policy, "peft_config"):
            model, before = policy, policy.active_adapter
            model.load_adapter(self.path, _ADAPTER)
            model.set_adapter(_ADAPTER, inference_mode=True)
        else:
            from peft import PeftModel

            model, before = PeftModel.from_pretrained(policy, self.path, _ADAPTER), None
        model.eval()
        self._open = model
        try:
            yield model
        finally:
            self._open = None
            if before is None:
                model.unload()
            else:
                model.set_adapter(before)
                model.delete_adapter(_ADAPTER)
            policy.train(was_training)
            for parameter, trained in was_trained.items():
                parameter.requires_grad_(trained)

    def release(self, model: nn.Module, keep_head: bool) -> None:
        super().release(model, keep_head)
        if not keep_head:
            return
        head = output_head(model)
        config = model.peft_config[_ADAPTER]
        if _ADAPTER in getattr(head, "lora_A", {}) or "lm_head" in (config.modules_to_save or ()):
            raise UnlearnError(
                f"the adapter {self.path} changes the LM head, which a KL objective cannot keep: "
                "merge it into its base and give `reference: {model: ...}`."
            )
        head = getattr(head, "base_layer", getattr(head, "original_module", head))
        own = copy.deepcopy(head).requires_grad_(False)  # the policy's may be trained
        self._logits = final_logits(own, model)

    def digest(self, model: nn.Module, precision: str) -> str:
        adapter = hashlib.blake2b(digest_size=12)
        for file in sorted(Path(self.path).glob("adapter_*")):
            adapter.update(file.read_bytes())
        also = f"{precision}|{adapter.hexdigest()}"
        return weights_digest(model, without_adapter=True, also=also)

    def _require_this_base(self, policy: nn.Module) -> None:
        config = getattr(policy, "peft_config", {}).values()
        moved = [str(c.init_lora_weights) for c in config if hasattr(c, "init_lora_weights")]
        if any(name.lower().startswith(_MOVES_BASE) for name in moved):
            raise UnlearnError(
                f"`peft_init_lora_weights: {moved[0]}` moves a part of the base into the adapter, "
                f"so that {self.path} no longer fits it: give `reference: {{model: BASE, adapter: "
                f"{self.path}}}`."
            )
        file = Path(self.path) / "adapter_config.json"
        if not file.is_file():
            raise UnlearnError(
                f"`reference.adapter: {self.path}` is not the folder of an adapter "
                "(adapter_config.json is missing)."
            )
        named = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
        ours = getattr(policy.config, "_name_or_path", None)
        if named and ours and Path(named).resolve() != Path(ours).resolve():
            raise UnlearnError(
                f"the adapter {self.path} was trained on {named}, not on base_model {ours}: give "
                f"`reference: {{model: {named}, adapter: {self.path}}}`."
            )


def require_same_tokenizer(path: str, tokenizer: Any, **options: Any) -> None:
    """Raise unless the model in ``path`` gives every token the id that ``tokenizer`` gives it.

    A token that only one of them has is let pass if it is that one's padding token.
    """
    from transformers import AutoTokenizer

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
