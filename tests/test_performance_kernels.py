"""Kernels of others in a step of ours, as far as a CPU can run them: Axolotl's LoRA kernels of
attention, 4-bit weights, and what transformers does around flash attention."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from conftest import CONFIGS, entries_for, random_batch, tiny_llama, with_lora
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from axolotl_unlearn.engine import packing
from axolotl_unlearn.engine.packing import block_lengths, can_pack
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.start import make_reference


def loss_and_gradients(model, batch):
    """Of the paper's objectives, with a reference that has seen nothing yet."""
    reference = make_reference("auto", model, starting_adapter=False)
    loss = step_loss(model, batch, entries_for(*CONFIGS), reference=reference).total
    return loss, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def test_4_bit_weights_on_a_cpu_pass_the_gradient_on_after_an_evaluation():
    """Against the weights that the 4 bits stand for. In evaluation (the reference, the looks at a
    new model) bitsandbytes would pack them for a kernel without a backward pass, for good."""
    bnb = pytest.importorskip("bitsandbytes")
    config = {"hidden_size": 64, "intermediate_size": 128}
    four_bit, values = (tiny_llama(seed=1, **config) for _ in range(2))
    for name, linear in list(four_bit.model.named_modules()):
        if isinstance(linear, nn.Linear):
            made = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, quant_type="nf4",
                compute_dtype=torch.float32,
            )  # fmt: skip
            made.weight = bnb.nn.Params4bit(linear.weight.data, False, quant_type="nf4")
            four_bit.model.set_submodule(name, made.to("cpu"))
            weight = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
            values.model.get_submodule(name).weight.data.copy_(weight)
    batch = random_batch(seed=3, forget=4, retain=4, time=24)
    found = []
    for model in (four_bit, values):
        torch.manual_seed(0)
        model = with_lora(model).train()
        for _ in range(2):
            loss, gradients = loss_and_gradients(model, batch)
        found.append((loss, torch.cat([g.flatten() for g in gradients])))
    assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)
    assert torch.cosine_similarity(found[0][1], found[1][1], 0) > 0.999
    packed = tiny_llama(seed=1)
    packed.model.layers[0].mlp.up_proj = made
    made.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnlearnError, match="load the model again"):
        loss_and_gradients(with_lora(packed), batch)


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
            packing._PACKING[one] = None
        found.append(loss_and_gradients(one, batch))
    assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-7)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.fixture
def flash(monkeypatch):
    """In place of flash attention, which needs a GPU: the same by torch, over rows whose lengths it
    is given. It refuses a mask, for which transformers would take padding out in every layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def by_torch(module, q, k, v, mask, scaling=None, **given):
        assert mask is None
        ends = given.get("cu_seq_lens_q")
        if ends is None:
            ends = torch.tensor([0, q.shape[2]])
        else:
            assert isinstance(given["max_length_q"], int)  # a tensor would be read in every layer
        parts = [
            F.scaled_dot_product_attention(
                *(x[:, :, start:stop] for x in (q, k, v)),
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
            for start, stop in pairwise(ends.numpy().tolist())
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", by_torch)


@pytest.mark.parametrize("length", [24, 3])
def test_flash_attention_is_told_where_rows_begin_once_a_forward(flash, length):
    """Loss and gradients of sdpa; rows of one length are packed too, and no layer reads anything of
    the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Reads.count += func._schema.name == "aten::_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    found = []
    batch = random_batch(seed=3, forget=4, retain=4, time=24)
    if length == 3:
        batch = {k: v[:, 2:5].clone() if v.dim() == 2 else v for k, v in batch.items()}
        batch["labels"] = batch["input_ids"].clone()
    for attention in ("sdpa", "flash_attention_2"):
        model = with_lora(tiny_llama(seed=1, num_hidden_layers=4)).double().train()
        model.config._attn_implementation_internal = attention
        loss_and_gradients(model, batch)  # what is asked of a model once
        told = can_pack(model, model, batch)
        assert attention == "sdpa" or told is block_lengths
        Reads.count = 0
        with Reads():
            found.append(loss_and_gradients(model, batch))
    assert Reads.count <= 4, "two forwards, whatever the number of layers"
    assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-7)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        assert_close(got, want, rtol=1e-5, atol=1e-7)
