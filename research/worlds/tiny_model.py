"""The tiny OLMo of the demo: a configuration and a tokenizer, no weights.

``reinit_weights: true`` makes the weights at the start of a training run. The committed folder
``examples/tiny-olmo`` is the output of ``python -m research.worlds.tiny_model``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from research.worlds.generate import Sizes, make_corpus

VOCABULARY = 1536
EOS = "<|endoftext|>"
PAD = "<|pad|>"
# The demo's own seeds are small numbers; the tokenizer never sees their documents.
SEEDS = range(9001, 9005)


def _texts() -> Iterator[str]:
    sizes = Sizes(stories=120, pii=80, nonmembers=100, general=110, background=1200)
    for seed in SEEDS:
        corpus = make_corpus(seed, sizes)
        documents = corpus.forget + corpus.retain + corpus.nonmembers + corpus.background
        for document in documents:
            yield document.text
            yield from (f"{question} {answer}" for question, answer in document.questions)
        for item in corpus.general:
            yield item["question"]
            yield from (f" {choice}" for choice in item["choices"])


def make_tokenizer():
    """Train the byte-level BPE of `VOCABULARY` entries on generator output of other seeds.

    Numbers are cut into pairs of digits, so that dates and phone numbers always split alike.

    Returns:
        A `transformers.PreTrainedTokenizerFast` with EOS and pad, and no BOS.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{N}{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(out: Path | str) -> Path:
    """Write configuration, generation configuration and tokenizer of the tiny OLMo to `out`.

    Returns:
        `out`, a folder that `axolotl train` takes as `base_model` with `reinit_weights: true`.
    """
    from transformers import GenerationConfig, OlmoConfig

    out = Path(out)
    tokenizer = make_tokenizer()
    config = OlmoConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["OlmoForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(out)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


if __name__ == "__main__":
    print(make_tiny_model(sys.argv[1] if len(sys.argv) > 1 else "examples/tiny-olmo"))
