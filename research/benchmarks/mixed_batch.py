"""What a batch of eight people of eight shards costs beside one shard's: time a token through PEFT.

    python -m research.benchmarks.mixed_batch

A random Llama of SmolLM2-135M's widths, 8 adapters of rank 16, 8 prompts of 24 tokens, 24 tokens each:
the base, one adapter for all rows, and one a row (`axolotl_unlearn.shards.model`), in turns, one
thread. Writes ``research/results/routed-serving.json``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from axolotl_unlearn.files import write_json
from axolotl_unlearn.shards.model import route
from axolotl_unlearn.shards.router import Router
from research.analysis.seeds import facts

OUT = Path(__file__).resolve().parents[1] / "results" / "routed-serving.json"
ROWS, PROMPT, TOKENS, TURNS, LAYERS = 8, 24, 24, 5, 8


def model(folder: Path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": LAYERS,
             "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 1536}  # fmt: skip
    base = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    for shard in range(1, ROWS + 1):
        lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        made = get_peft_model(base, lora)
        made.save_pretrained(folder / f"shard-{shard}")
        base = made.unload()
    Router.of((shard, [f"person {shard}"]) for shard in range(1, ROWS + 1)).save(folder)
    tiny = Path(__file__).resolve().parents[2] / "examples" / "tiny-olmo"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return route(base, folder).eval()


@torch.inference_mode()
def seconds(model, shards: list[int]) -> float:
    """Of the processor, a token."""
    led = iter(shards)  # of each row, in place of the router's
    model.routes.router = SimpleNamespace(route=lambda turns: next(led))
    ids = torch.arange(ROWS * PROMPT).reshape(ROWS, PROMPT) + 5
    began = time.process_time()
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS,
                   min_new_tokens=TOKENS, do_sample=False, pad_token_id=1)  # fmt: skip
    return (time.process_time() - began) / (ROWS * TOKENS)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = model(Path(folder))
    ways = {"base": [0] * ROWS, "one adapter": [1] * ROWS, "eight adapters": [*range(1, ROWS + 1)]}
    for led in ways.values():
        seconds(made, led)
    turns = [{way: seconds(made, led) for way, led in ways.items()} for _ in range(TURNS)]
    rows = [[way, f"{1000 * statistics.median(t[way] for t in turns):.2f}",
             f"{statistics.median(t[way] / t['one adapter'] for t in turns):.2f}"] for way in ways]  # fmt: skip
    table = {"columns": ["batch of 8", "ms a token", "of one adapter's"], "rows": rows}
    content = facts("python -m research.benchmarks.mixed_batch") | {"turns": turns}
    write_json(OUT, content | {"tables": {"serving": table}})
    print(rows)


if __name__ == "__main__":
    main()
