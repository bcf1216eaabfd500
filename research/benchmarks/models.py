"""What every benchmark shares: the model, the rows, the machine's facts."""

from __future__ import annotations

import json
import os
import platform
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from research.analysis.seeds import facts

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 50304  # OLMo's
MAX_LENGTH = 256
#: Entries of the BPE trained here; with it LUME rows have 77 tokens on average, as with OLMo's.
BPE_ENTRIES = 7000
EOS, PAD = 0, 1

#: Tokens of (prompt, answer) of 64 LUME rows, half of each set, for machines without the data.
STAND_IN = ROOT / "research" / "benchmarks" / "lume_lengths.json"


@dataclass(frozen=True)
class Shape:
    """Size of an OLMo; the default has 77 M parameters."""

    hidden: int = 512
    layers: int = 8
    mlp: int = 1408
    heads: int = 8
    vocabulary: int = VOCABULARY
    positions: int = 4096


#: The 7B of the paper (allenai/OLMo-7B-0724-hf config: 32 layers of 4096, MLP 11008).
OLMO_7B = Shape(4096, 32, 11008, 32)


def olmo(shape: Shape = Shape(), dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """An OLMo with random weights; time and memory do not depend on their values. Or the model in
    the folder ``BENCH_MODEL``."""
    from transformers import AutoModelForCausalLM, OlmoConfig

    if folder := os.environ.get("BENCH_MODEL"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    config = OlmoConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model


def with_lora(model, rank: int = 32):
    """LoRA on every linear layer but the head, as in the paper; no dropout."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def lume_rows() -> tuple[dict[str, list[tuple[list[int], list[int]]]], str]:
    """(prompt ids, answer ids with EOS) of the forget and retain rows, and where they come from.

    From ``LUME_DIR`` (default ``../shared/lume``), tokenised with a byte-level BPE trained on the
    spot; without the data, random ids of the lengths in ``lume_lengths.json``.
    """
    folder = Path(os.environ.get("LUME_DIR") or ROOT.parent / "shared" / "lume") / "train"
    if not (folder / "forget.jsonl").exists():
        return _stand_in(), "random ids with the lengths of LUME rows (LUME_DIR has no data)"
    records = {
        side: [json.loads(line) for line in (folder / f"{side}.jsonl").open(encoding="utf-8")]
        for side in ("forget", "retain")
    }
    if model := os.environ.get("BENCH_MODEL"):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        spread = range(tokenizer.get_vocab_size())
    else:
        tokenizer = train_bpe(r["input"] + " " + r["output"] for rs in records.values() for r in rs)
        spread = random.Random(0).sample(range(2, VOCABULARY), tokenizer.get_vocab_size())
    rows = {}
    for side, items in records.items():
        prompts = tokenizer.encode_batch([r["input"] for r in items])
        answers = tokenizer.encode_batch([" " + r["output"] for r in items])
        rows[side] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            answer_ids = [spread[i] for i in answer.ids][: MAX_LENGTH - 1] + [EOS]
            prompt_ids = [spread[i] for i in prompt.ids]
            rows[side].append((prompt_ids[-(MAX_LENGTH - len(answer_ids)) :], answer_ids))
    return rows, "LUME train rows"


def train_bpe(texts, special: tuple[str, ...] = ()):
    """A byte-level BPE; ``special`` tokens have the first ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _stand_in() -> dict[str, list[tuple[list[int], list[int]]]]:
    generator = random.Random(0)

    def ids(count: int) -> list[int]:
        return [generator.randrange(2, VOCABULARY) for _ in range(count)]

    lengths = json.loads(STAND_IN.read_text("utf-8"))
    return {side: [(ids(p), ids(a - 1) + [EOS]) for p, a in lengths[side]] for side in lengths}


def batches(count: int, pairs: int = 4, labels: str = "answer", seed: int = 0):
    """``count`` batches of ``pairs`` forget and as many retain rows, right-padded to the longest.

    Args:
        labels: "answer" (as ZJUKLAB trains) or "document" (every token).

    Yields:
        The batch as the trainer's collator makes it.
    """
    rows, _ = lume_rows()
    generator = random.Random(seed)
    order = {side: generator.sample(range(len(items)), len(items)) for side, items in rows.items()}
    for number in range(count):
        chosen = []
        for role, side in enumerate(("forget", "retain")):
            for k in range(number * pairs, (number + 1) * pairs):
                chosen.append((role, *rows[side][order[side][k % len(order[side])]]))
        yield collate(chosen, labels)


def collate(rows: list[tuple[int, list[int], list[int]]], labels: str) -> dict[str, Tensor]:
    """(role, prompt, answer) rows to a batch, forget rows first."""
    longest = max(len(p) + len(a) for _, p, a in rows)
    shape = (len(rows), longest)
    batch = {
        "input_ids": torch.full(shape, PAD),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, -100),
        "role": torch.tensor([role for role, _, _ in rows]),
        "kind": torch.ones(len(rows), dtype=torch.long),
        "task": torch.zeros(len(rows), dtype=torch.long),
    }
    for i, (_, prompt, answer) in enumerate(rows):
        ids = torch.tensor(prompt + answer)
        batch["input_ids"][i, : len(ids)] = ids
        batch["attention_mask"][i, : len(ids)] = 1
        start = len(prompt) if labels == "answer" else 0
        batch["labels"][i, start : len(ids)] = ids[start:]
    return batch


def random_batch(rows: int, tokens: int, answer: int, vocabulary: int = VOCABULARY):
    """Rows of one length, half forget, half retain; for scaling."""
    generator = random.Random(0)

    def ids(count: int) -> list[int]:
        return [generator.randrange(2, vocabulary) for _ in range(count)]

    made = [(int(i >= rows // 2), ids(tokens - answer), ids(answer)) for i in range(rows)]
    return collate(made, "answer")


def reset_peak() -> None:
    """Start the process's peak of resident memory anew (Linux; elsewhere it stays a total)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_mb() -> float:
    """Peak resident memory since `reset_peak`, in MB (10^6 bytes)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if platform.system() == "Darwin" else peak * 1024 / 1e6


def machine() -> dict[str, object]:
    """Facts that a number needs to be read: processor, threads, versions, load."""
    found = facts("")
    load = [round(x, 2) for x in os.getloadavg()]
    return (
        found["machine"]
        | {"threads": torch.get_num_threads(), "load_before": load}
        | found["versions"]
    )
