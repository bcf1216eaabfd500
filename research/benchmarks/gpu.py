"""The paper's recipe at full size on one GPU: an OLMo-7B shape with random weights, LUME rows.

    make bench-gpu
    python -m research.benchmarks.gpu --smoke     # the same code on a tiny shape, on the CPU

It needs torch, transformers, peft and pydantic, and bitsandbytes for the 4-bit base; no Axolotl.
Figures come in order of worth, each is written when it is known, a figure that the file has for the
same card and commit is not measured again, and none begins after ``--minutes``: a run that was cut
off goes on.

Nothing is downloaded: time and memory do not depend on the values of the weights. Measured are a
step of ours (NPO + NLL + KL, reference by adapter off; and with a cached reference) and of plain
LoRA fine-tuning on the same rows, in bf16; the time that the whole recipe for model 1 would take
(5 epochs of 1112 pairs, the first epoch with the reference of the forget rows); a 4-bit base
(QLoRA, NF4); and a vocabulary of 150 000. Targets of issue 5: recipe in 10 minutes and 24 GB,
QLoRA in 12 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import nn

from axolotl_unlearn.engine.host import sent_batch
from research.benchmarks import models, step

EPOCHS, PAIRS = 5, 1112
TINY = models.Shape(64, 2, 128, 4, 512)
#: Of the comparison of precisions.
SMALL = models.Shape(256, 4, 512, 4, 512)


def quantise(model: nn.Module) -> nn.Module:
    """Linear layers but the head as bitsandbytes NF4, computing in bf16."""
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or name == "lm_head":
                continue
            made = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            device = child.weight.device
            made.weight = bnb.nn.Params4bit(
                child.weight.data.cpu(), requires_grad=False, quant_type="nf4"
            )
            setattr(parent, name, made.to(device))
    return model


def recipe_batches(count: int, pairs: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """LUME batches with ids folded into the vocabulary."""
    batches = list(models.batches(count, pairs))
    for batch in batches:
        batch["input_ids"] %= vocabulary
        batch["labels"] = torch.where(
            batch["labels"] == -100, batch["labels"], batch["labels"] % vocabulary
        )
    return batches


def measure(
    shape: models.Shape,
    way: str,
    *,
    device: str,
    pairs: int,
    steps: int,
    four_bit: bool = False,
    documents: int = 0,
) -> dict[str, float]:
    """Seconds a step (median), GB at most, tokens a second, minutes of the whole recipe.

    Args:
        documents: in place of LUME's rows, eight of so many tokens with labels throughout.
    """
    torch.manual_seed(0)
    model = models.olmo(shape, torch.bfloat16, device)
    if four_bit:
        model = quantise(model)
    model = models.with_lora(model).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    if documents:
        rows = [models.random_batch(8, documents, documents, shape.vocabulary)] * (steps + 2)
    else:
        rows = recipe_batches(steps + 2, pairs, shape.vocabulary)
    batches = [sent_batch(batch, device) for batch in rows]
    cuda = device.startswith("cuda")
    known = batches if way.startswith("ours") else []
    loss_of = step.VARIANTS[way](model, known)
    first_of = step.VARIANTS["ours_first_epoch"](model, []) if way == "ours" else loss_of
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def run(function) -> list[float]:
        seconds = []
        for batch in batches:
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            function(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds[2:]

    seconds = run(loss_of)
    first = run(first_of) if way == "ours" else seconds
    tokens = [int(batch["attention_mask"].sum()) for batch in batches[2:]]
    per_epoch = PAIRS / pairs
    return {
        "seconds": statistics.median(seconds),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else models.peak_mb() / 1e3,
        "tokens_per_second": sum(tokens) / sum(seconds),
        "recipe_minutes": per_epoch
        * (statistics.mean(first) + (EPOCHS - 1) * statistics.mean(seconds))
        / 60,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shape on the CPU")
    parser.add_argument("--pairs", type=int, default=4, help="forget rows a step (as many retain)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=8, help="begin no figure after these")
    parser.add_argument("--out", type=Path, help="folder of results-gpu.json [beside this file]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        if options.out is None:
            own = models.ROOT / "research" / "benchmarks"
            options.out = Path(passing) if options.smoke else own
        run_plans(options, parser)


def run_plans(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """All figures that are missing, while there is time."""
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; `--smoke` runs the same code on the CPU")
    device = "cpu" if options.smoke else "cuda:0"
    shape = TINY if options.smoke else models.OLMO_7B
    large = models.Shape(*(*_numbers(shape)[:4], 1024 if options.smoke else 150_000))
    steps = 1 if options.smoke else options.steps
    plans = {
        name: partial(measure, size, way, device=device, pairs=options.pairs, steps=steps, **more)
        for name, size, way, more in (
            ("ours", shape, "ours", {}),
            ("finetune_packed", shape, "finetune_packed", {}),
            ("ours_cached", shape, "ours_cached", {}),
            ("ours_qlora", shape, "ours", {"four_bit": True}),
            ("documents_8_x_2048", shape, "ours", {"documents": 8 if options.smoke else 2048}),
            ("ours_vocabulary_150k", large, "ours", {}),
            ("finetune", shape, "finetune", {}),
        )
    }
    plans = {"precision": partial(precision, device)} | plans
    about = {
        "gpu": "none (smoke)" if options.smoke else torch.cuda.get_device_name(0),
        "commit": commit(),
        "pairs": options.pairs,
        "shape": _numbers(shape),
    }
    path = options.out / "results-gpu.json"
    results = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if any(results.get(name) != value for name, value in about.items()):
        results = {"date": date.today().isoformat(), "machine": models.machine(), **about}
    start = time.perf_counter()
    for name, plan in plans.items():
        if "error" in results.get(name, {"error": ""}):
            if time.perf_counter() - start > 60 * options.minutes:
                print(f"{name}: left for the next run", flush=True)
                continue
            try:
                results[name] = plan()
            except (RuntimeError, ImportError, NotImplementedError) as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            if not options.smoke:
                torch.cuda.empty_cache()
            path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        print(name, json.dumps(results[name]), flush=True)


def precision(device: str) -> dict[str, dict[str, float]]:
    """A small model's step in each precision and with each attention, against float32 with eager.

    Returns:
        relative error of the loss and cosine of all gradients, or why there are none.
    """
    found: dict[str, dict[str, float]] = {}
    batch = sent_batch(recipe_batches(1, 4, SMALL.vocabulary)[0], device)
    exact = None
    for name, dtype, attention, four_bit in (
        ("float32", torch.float32, "eager", False),
        ("sdpa", torch.float32, "sdpa", False),
        ("bf16", torch.bfloat16, "sdpa", False),
        ("bf16_flash", torch.bfloat16, "flash_attention_2", False),
        ("qlora", torch.bfloat16, "sdpa", True),
    ):
        try:
            torch.manual_seed(0)
            model = models.olmo(SMALL, torch.float32, device)
            model.set_attn_implementation(attention)
            model = quantise(model) if four_bit else model
            model = models.with_lora(model).train()
            for weight in (p for n, p in model.named_parameters() if "lora_B" in n):
                torch.nn.init.normal_(weight, std=0.02)
            with torch.autocast(device.split(":")[0], dtype, enabled=dtype != torch.float32):
                loss = step.VARIANTS["ours"](model, [])(batch)
            loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            exact = exact or (loss.item(), gradient.float())
            found[name] = {
                "loss_error": abs(loss.item() / exact[0] - 1),
                "gradient_cosine": torch.cosine_similarity(gradient.float(), exact[1], 0).item(),
            }
        except (RuntimeError, ImportError, ValueError, NotImplementedError) as error:
            found[name] = {"not_run": f"{type(error).__name__}: {error}"[:300]}
    return found


def commit() -> str:
    """The commit that is measured; of a copy without git, what the environment says of it."""
    words = ["git", "-C", str(models.ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def _numbers(shape: models.Shape) -> list[int]:
    return [shape.hidden, shape.layers, shape.mlp, shape.heads, shape.vocabulary]


if __name__ == "__main__":
    main()
