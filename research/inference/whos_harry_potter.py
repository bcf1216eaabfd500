"""``hf-whp``: unlearning while decoding, as an lm-eval model of two checkpoints.

Who's Harry Potter (arXiv 2310.02238, section 2.2): the logits of the model to unlearn, less what
more training on the forget rows adds to them,

    v = v_b - alpha relu(v_r - v_b),

v_b of the baseline, v_r of the reinforced model. Nothing is trained towards forgetting and no
weights hold the result, so it is an lm-eval model here and not a merge.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from axolotl_unlearn.errors import UnlearnError

NAME = "hf-whp"


def generic_logits(baseline: Tensor, reinforced: Tensor, alpha: float) -> Tensor:
    """v_b - alpha relu(v_r - v_b) for logits ``[..., vocabulary]``."""
    return baseline - alpha * torch.relu(reinforced.to(baseline.dtype) - baseline)


class _LessReinforced(LogitsProcessor):
    """One generation's subtraction; the reinforced model keeps its own cache of keys and values."""

    def __init__(self, model: nn.Module, mask: Tensor, alpha: float) -> None:
        self.model, self.mask, self.alpha = model, mask, alpha
        self.cache: Any = None
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids.shape[1] - self.mask.shape[1]
        mask = nn.functional.pad(self.mask, (0, written), value=1)
        new = input_ids if self.cache is None else input_ids[:, -1:]
        given: dict[str, Tensor] = {}
        if self.takes_positions:  # prompts are padded on the left
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        out = self.model(
            input_ids=new, attention_mask=mask, past_key_values=self.cache, use_cache=True, **given
        )
        self.cache = out.past_key_values
        return generic_logits(scores, out.logits[:, -1], self.alpha)


@register_model(NAME)
class WhpLM(HFLM):
    """HFLM of ``pretrained`` with what ``reinforced`` adds taken off its logits ``alpha`` times.

    Args:
        reinforced: the same model after more training on the forget rows; same tokenizer.
        alpha: how far to go; the paper has 5, and 0 is the baseline.

    Raises:
        UnlearnError: The two do not share a vocabulary, or generation asks for beams.
    """

    def __init__(self, pretrained: Any, reinforced: str, alpha: float = 5.0, **options: Any):
        super().__init__(pretrained, **options)
        from transformers import AutoModelForCausalLM

        self.alpha = float(alpha)
        loaded = AutoModelForCausalLM.from_pretrained(reinforced, dtype=self.model.dtype)
        self.reinforced = loaded.to(self.device).eval()
        sizes = [m.get_output_embeddings().weight.shape[0] for m in (self.model, self.reinforced)]
        if sizes[0] != sizes[1]:
            raise UnlearnError(
                f"{pretrained} has {sizes[0]} logits and {reinforced} {sizes[1]}: train the "
                "reinforced model from the other one."
            )

    def _model_call(self, inps: Tensor, *args: Any, **options: Any) -> Tensor:
        baseline = super()._model_call(inps, *args, **options)
        with torch.no_grad():
            return generic_logits(baseline, self.reinforced(inps).logits, self.alpha)

    def _model_generate(self, context: Tensor, *args: Any, **options: Any) -> Tensor:
        if options.get("num_beams", 1) != 1:
            raise UnlearnError(f"{NAME} generates without beams: leave num_beams out.")
        mask = options.get("attention_mask", torch.ones_like(context))
        less = _LessReinforced(self.reinforced, mask, self.alpha)
        return super()._model_generate(
            context, *args, logits_processor=LogitsProcessorList([less]), **options
        )
