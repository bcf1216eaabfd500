"""How a step's time and memory grow with tokens, vocabulary, batch and rank.

    python -m research.benchmarks.scaling                 # all of it
    python -m research.benchmarks.scaling --point '{"vocabulary": 150000}'

One point is one process: an OLMo of hidden size 256 and 4 layers, rows of one length, a quarter of
their tokens labelled. For comparison the same with the whole logits, as the model's own loss does.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from research.benchmarks import models, step

BASE = {"tokens": 128, "vocabulary": 50304, "rows": 8, "rank": 32}
SWEEPS = {
    "tokens": [64, 128, 256, 512],
    "vocabulary": [12500, 25000, 50304, 150000],
    "rows": [4, 8, 16, 32],
    "rank": [8, 32, 128],
}


def point(
    *, tokens: int, vocabulary: int, rows: int, rank: int, labelled: float = 0.25, way: str = "ours"
) -> dict[str, float]:
    """Seconds (the second step) and memory above the model's (both steps) in this process."""
    torch.manual_seed(0)
    shape = models.Shape(256, 4, 704, 4, vocabulary)
    model = models.with_lora(models.olmo(shape), rank).train()
    batch = models.random_batch(rows, tokens, max(1, int(tokens * labelled)), vocabulary)
    loss_of = step.VARIANTS[way](model, [])
    before = _resident_mb()
    models.reset_peak()
    for _ in range(2):
        start = time.process_time()
        loss_of(batch).backward()
        seconds = time.process_time() - start
    return {"cpu_seconds": seconds, "added_mb": models.peak_mb() - before}


def _resident_mb() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    except OSError:
        return 0.0


def sweep(say=print) -> dict[str, list[dict]]:
    """All points of `SWEEPS`, ours and plain fine-tuning, one process each."""
    table: dict[str, list[dict]] = {}
    for name, values in SWEEPS.items():
        table[name] = []
        for value in values:
            entry: dict[str, object] = {name: value}
            for way in ("ours", "finetune"):
                chosen = json.dumps({**BASE, name: value, "way": way})
                got = step.run_apart("research.benchmarks.scaling", ["--point", chosen])
                entry[way] = {k: round(v, 3) for k, v in got.items()}
            table[name].append(entry)
            say(f"scaling {name:10} {value:7} {entry['ours']} against {entry['finetune']}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--point", type=json.loads)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.point:
        print(json.dumps(point(**{**BASE, **options.point})))
    else:
        print(json.dumps(sweep(), indent=1))


if __name__ == "__main__":
    main()
