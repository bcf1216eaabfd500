"""Tokenizers made on the spot: one whose ids are known by hand, one trained on real words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EOS, PAD, BOS = 256, 257, 258
#: What Axolotl reads in a config when it loads rows, whose tokenizer is in a `model_folder`.
LOADING = {
    "model_config_type": "llama", "sequence_len": 64, "dataset_num_proc": 0, "val_set_size": 0.0,
    "num_epochs": 1, "micro_batch_size": 2, "batch_size": 2, "gradient_accumulation_steps": 1,
    "world_size": 1, "seed": 42, "shuffle_merged_datasets": True,
}  # fmt: skip
#: The same of a whole config, which it checks; rows keep their order.
WHOLE = {
    "sequence_len": 900, "shuffle_merged_datasets": False, "dataset_num_proc": 0, "num_epochs": 1,
    "micro_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 0.001,
    "optimizer": "adamw_torch", "bf16": False, "fp16": False, "device_map": {"": "cpu"},
    "lora_mlp_kernel": False,
}  # fmt: skip
CHAT = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def _alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def byte_tokenizer(*, bos: bool = False, trailing: bool = False, chat: bool = False, **tokens: Any):
    """Byte-level BPE without merges: the ids of a text are its UTF-8 bytes.

    ``bos``: puts <s> (258) before a text; ``trailing``: also puts </s> (256) after it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {char: byte for byte, char in _alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<pad>", "<s>"])
    if bos or trailing:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if trailing else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    names = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"} | tokens
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if chat:
        fast.chat_template = CHAT
    return fast


def model_folder(folder: Path, tokenizer: Any = None) -> str:
    """A model as far as data ask for it: a tokenizer (of bytes) and a config."""
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    facts = {"model_type": "llama", "vocab_size": 300, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


def word_tokenizer(texts: list[str], size: int = 400):
    """Byte-level BPE trained on ``texts``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def sentencepiece_like(words: list[str], scheme: str):
    """Puts a space before any text; one piece a word.

    ``scheme``: "legacy", as Llama 2's tokenizer (a text that begins with a space gets two), or
    "metaspace", as newer ones (a space is added only if there is none).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", -9.0), ("</s>", -1.0), ("▁", -2.0), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    if scheme == "legacy":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
