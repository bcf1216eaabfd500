"""Axolotl's LoRA kernels in a step of ours: those that are no Triton run on a CPU as well."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import CONFIGS, entries_for, random_batch, tiny_llama
from torch.testing import assert_close

from axolotl_unlearn.engine.forward import refuse_packing
from axolotl_unlearn.engine.head_losses import ChunkPlan
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.reference.sources import make_reference


@pytest.fixture
def patched(tmp_path):
    """Axolotl's patch of Llama's attention, taken back; gives the patch of a model."""
    from axolotl.monkeypatch import lora_kernels
    from axolotl.utils.dict import DictDefault
    from transformers.models.llama.modeling_llama import LlamaAttention

    tiny_llama(seed=1).config.save_pretrained(tmp_path)
    cfg = DictDefault(base_model=str(tmp_path), lora_qkv_kernel=True, lora_o_kernel=True)
    plain = LlamaAttention.forward
    lora_kernels.patch_self_attn_lora(cfg)
    try:
        yield lambda model: lora_kernels.apply_lora_kernel_patches(model, cfg)
    finally:
        LlamaAttention.forward = plain
        del LlamaAttention._original_forward


@pytest.mark.parametrize("rows", ["packed", "padded", "checkpointed"])
def test_the_kernels_of_attention_change_no_loss_and_no_gradient(patched, rows):
    """NPO, NLL and KL in float64, policy and reference: with `lora_qkv_kernel` and
    `lora_o_kernel` as without. The reference needs the adapter off in the kernels too."""
    from axolotl.monkeypatch import lora_kernels
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(seed=1), config).double().train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    if rows == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    batch, found = random_batch(seed=3, forget=4, retain=4, time=24), []
    with_kernels = patched(copy.deepcopy(model))
    attention = with_kernels.get_base_model().model.layers[0].self_attn
    assert attention.apply_qkv.__func__.__name__ == "apply_lora_qkv"
    assert attention.apply_o.__func__.__name__ == "apply_lora_o"
    for layer in model.get_base_model().model.layers:  # the class calls these now
        layer.self_attn.apply_qkv = lora_kernels.original_apply_qkv.__get__(layer.self_attn)
        layer.self_attn.apply_o = lora_kernels.original_apply_o.__get__(layer.self_attn)
    for one in (model, with_kernels):
        if rows == "padded":
            refuse_packing(one)
        reference = make_reference("auto", one, starting_adapter=False, plan=ChunkPlan())
        loss = step_loss(one, batch, entries_for(*CONFIGS), reference=reference).total
        loss.backward()
        found.append((loss, [p.grad for p in one.parameters() if p.requires_grad]))
    assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-7)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        assert_close(got, want, rtol=1e-5, atol=1e-7)
