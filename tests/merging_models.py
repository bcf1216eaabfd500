"""Tiny real models and adapters for the merging tests (no downloads, about a second)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from data_tokenizers import word_tokenizer


def tiny_tokenizer(folder: Path) -> None:
    """One of 300 entries saved beside the weights."""
    texts = ["a small text about nothing at all", "Where was Ada born? In York."]
    word_tokenizer(texts, 300).save_pretrained(folder)


def tiny_model(folder: Path, *, kind: str = "olmo", seed: int = 0, tied: bool = False, **changes):
    """Save a 2-layer OLMo or Llama (hidden 32, vocabulary 320) with a tokenizer; return it."""
    from transformers import LlamaConfig, LlamaForCausalLM, OlmoConfig, OlmoForCausalLM

    config_class, model_class = {
        "olmo": (OlmoConfig, OlmoForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    sizes = dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **changes})).to(torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return model


def tiny_adapter(
    folder: Path,
    base: Path,
    *,
    init_seed: int = 0,
    train_seed: int = 1,
    rank: int = 4,
    alpha: int | None = None,
    step: float = 0.02,
    targets: tuple[str, ...] = ("q_proj", "v_proj", "up_proj", "down_proj"),
    **lora,
):
    """A LoRA adapter with PEFT's own initialisation, moved by a seeded random "training"."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(init_seed)
    config = LoraConfig(r=rank, lora_alpha=alpha or rank, target_modules=list(targets), **lora)
    model = get_peft_model(model, config)
    torch.manual_seed(train_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(step * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def merged_copy(adapter: Path, base: Path, folder: Path) -> Path:
    """What `axolotl merge-lora` writes: the adapter merged into its base by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint or adapter folder."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def run_mergekit(script: str, *arguments) -> None:
    """`mergekit-yaml` or `mergekit-pytorch` in this process (starting one costs 15 seconds)."""
    import importlib

    module = {"mergekit-yaml": "run_yaml", "mergekit-pytorch": "merge_raw_pytorch"}[script]
    command = importlib.import_module(f"mergekit.scripts.{module}").main
    command.main([str(word) for word in arguments], standalone_mode=False)


def edit_json(path: Path, **changes) -> None:
    """Overwrite keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
