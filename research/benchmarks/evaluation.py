"""Evaluation against a plain sequential loop of the official kind, side by side in one run.

    python -m research.benchmarks.evaluation [--rows 96] [--model FOLDER] [--out research/benchmarks/evaluation.json]

Without ``--model`` a tiny OLMo of the demo's shape is trained for a moment, so that it stops by
itself; the model that never stops is the same with its end-of-sequence token out of reach. Times
are CPU seconds of one thread, which other work on the machine hardly changes, and wall seconds.
Every generation of both ways is compared. Three claims are checked:

    generation   never stopping >= 8x, stopping >= 2.5x, identical texts
    scoring      all likelihood metrics <= 1.15x of the loss alone
    bootstrap    intervals of 12 cells < 5 s
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from axolotl_unlearn.engine.token_scoring import score_texts
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.evaluation.sets import load_sets
from axolotl_unlearn.metrics.memorisation import loss
from eval_tasks.unlearn_likelihood.utils import all_likelihood_metrics
from research.benchmarks.models import ROOT

TOKENIZER = ROOT / "examples" / "tiny-olmo"


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, CPU seconds, wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.process_time() - cpu, time.perf_counter() - wall


@torch.no_grad()
def sequential(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> list[str]:
    """The official way: one prompt after the other through ``model.generate``."""
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=limit,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
        new = output[0][inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def train_briefly(rows: list[Any], tokenizer: Any, steps: int) -> Any:
    """A tiny OLMo that has learnt to end its answers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TOKENIZER))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.6e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(rows), (16,), generator=generator).tolist()
        texts = [
            torch.tensor(
                tokenizer(f"{rows[i].input} {rows[i].output}")["input_ids"]
                + [tokenizer.eos_token_id]
            )
            for i in chosen
        ]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], True)
        loss_ = model(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss
        loss_.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def never_stopping(model: Any) -> Any:
    """The same model whose end-of-sequence logit is the negative of its largest logit."""
    endless = copy.deepcopy(model)
    eos = endless.generation_config.eos_token_id
    eos = torch.tensor([eos] if isinstance(eos, int) else eos)

    def push_down(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., eos] = -1e4
        return logits

    endless.get_output_embeddings().register_forward_hook(push_down)
    return endless


def generation(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> dict[str, Any]:
    generate_greedily(model, tokenizer, prompts[:2], max_new_tokens=4)  # warm up
    sequential(model, tokenizer, prompts[:2], 4)
    slow, slow_cpu, slow_wall = timed(lambda: sequential(model, tokenizer, prompts, limit))
    fast, fast_cpu, fast_wall = timed(
        lambda: generate_greedily(model, tokenizer, prompts, max_new_tokens=limit, batch_size=64)
    )
    return {
        "rows": len(prompts),
        "new_tokens": sum(one.tokens for one in fast),
        "stopped": sum(one.stopped for one in fast) / len(fast),
        "identical": sum(one.text == text for one, text in zip(fast, slow, strict=True)),
        "sequential": {"cpu_s": slow_cpu, "wall_s": slow_wall},
        "ours": {"cpu_s": fast_cpu, "wall_s": fast_wall},
        "speedup_cpu": slow_cpu / fast_cpu,
        "speedup_wall": slow_wall / fast_wall,
    }


def scoring(model: Any, tokenizer: Any, texts: list[str], repeats: int) -> dict[str, Any]:
    """All metrics against the loss alone, alternating; the best of each."""

    def loss_alone() -> list[float]:
        return [loss(f) for f in score_texts(model, tokenizer, texts, loss_only=True)]

    def everything() -> list[dict[str, float]]:
        facts = score_texts(model, tokenizer, texts)
        return [all_likelihood_metrics(f, t) for f, t in zip(facts, texts, strict=True)]

    loss_alone(), everything()  # warm up
    best = {"loss_alone": float("inf"), "everything": float("inf")}
    for _ in range(repeats):
        for name, work in (("loss_alone", loss_alone), ("everything", everything)):
            best[name] = min(best[name], timed(work)[1])
    ratio = best["everything"] / best["loss_alone"]
    return {"texts": len(texts), "cpu_s": best, "ratio": ratio, "repeats": repeats}


def bootstrap(sets: Any) -> dict[str, Any]:
    """Intervals of 12 cells, task aggregate, AUC, MIA score and aggregate."""
    from axolotl_unlearn.evaluation.measurement import Measured
    from axolotl_unlearn.evaluation.summary import scores_of

    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[float]:
        return torch.rand(n, generator=generator).tolist()

    found = Measured(
        values=dict(zip([row.key for row in sets.rows], draw(len(sets.rows)), strict=True)),
        member_loss=draw(len(sets.member)),
        nonmember_loss=draw(len(sets.nonmember)),
        options=[1] * len(sets.utility),
    )
    scores = scores_of(found, sets)
    _, cpu, wall = timed(scores.intervals)
    return {"cells": len(scores.cells), "cpu_s": cpu, "wall_s": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--limit", type=int, default=256, help="new tokens a row")
    parser.add_argument("--model", type=Path, help="a model that stops by itself")
    parser.add_argument("--data", type=Path, help="data folder [out/demo/data]")
    parser.add_argument("--steps", type=int, default=150, help="training steps without --model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    sets = load_sets(arguments.data)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model or TOKENIZER)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    else:
        model = train_briefly([row.record for row in sets.rows], tokenizer, arguments.steps)
    prompts = [row.record.input for row in sets.rows[: arguments.rows]]
    documents = [text for _, _, text in sets.documents]
    texts = (documents + [f"{r.record.input} {r.record.output}" for r in sets.rows])[:300]
    report = {
        "stopping": generation(model, tokenizer, prompts, arguments.limit),
        "never_stopping": generation(never_stopping(model), tokenizer, prompts, arguments.limit),
        "scoring": scoring(model, tokenizer, texts, arguments.repeats),
        "bootstrap": bootstrap(sets),
        "torch": torch.__version__,
        "threads": 1,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
