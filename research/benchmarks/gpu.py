"""The paper's recipe at full size on one GPU: an OLMo-7B shape with random weights, LUME rows.

    make bench-gpu
    python -m research.benchmarks.gpu --smoke     # the same code on a tiny shape, on the CPU

It needs torch, transformers, peft and pydantic; no Axolotl.
Figures come in order of worth, each is written when it is known, a figure that the file has for the
same card and commit is not measured again, and none begins after ``--minutes``: a run that was cut
off goes on. Nothing is downloaded: time and memory do not depend on the values of the weights.

Ways that are compared take their steps in turn on one model in one process, since the host of a
rented machine is noisy. Of each way: median seconds of a step, those until the host has started all
of it, those that the GPU computes (torch.profiler), kernels started, waits of the host
(``set_sync_debug_mode``) and GB at most. Ways: packed fine-tuning; a step of ours (NPO + NLL + KL,
adapter off) in the first epoch and in later ones; with a cached reference.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.engine.batch import Batch
from research.benchmarks import models, step

EPOCHS, PAIRS = 5, 1112
TINY = models.Shape(64, 2, 128, 4, 512)
#: The ways by what they are in `step.VARIANTS`, and whether they know the rows from before.
FINETUNE, FIRST, LATER, CACHED = "finetune_packed", "first_epoch", "later_epochs", "cached"
WAYS = {
    FINETUNE: ("finetune_packed", False),
    FIRST: ("ours_first_epoch", False),
    LATER: ("ours", True),
    CACHED: ("ours_cached", True),
}


def sent_batch(batch: dict[str, Tensor], device: torch.device | str) -> Batch:
    """A batch of the collator on a device, and known."""
    return Batch.sent({name: v.numpy() for name, v in batch.items()}, torch.device(device))


def recipe_batches(count: int, pairs: int, vocabulary: int) -> list[dict[str, Tensor]]:
    """LUME batches with ids folded into the vocabulary."""
    batches = list(models.batches(count, pairs))
    for batch in batches:
        batch["input_ids"] %= vocabulary
        batch["labels"] = torch.where(
            batch["labels"] == -100, batch["labels"], batch["labels"] % vocabulary
        )
    return batches


class Bench:
    """What the figures share: the card, the shape, and one large model that is made once."""

    def __init__(self, smoke: bool, pairs: int, steps: int) -> None:
        self.device = "cpu" if smoke else "cuda:0"
        self.cuda, self.pairs, self.steps = not smoke, pairs, steps
        self.shape = TINY if smoke else models.OLMO_7B
        self.long = 16 if smoke else 2048

    @cached_property
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = models.with_lora(models.olmo(self.shape, torch.bfloat16, self.device)).train()
        model.enable_input_require_grads()
        return model

    def forget(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        rows = recipe_batches(count, self.pairs, self.shape.vocabulary)
        return [sent_batch(batch, self.device) for batch in rows]

    def compare(
        self,
        model: nn.Module,
        batches: list[dict[str, Tensor]],
        ways: dict[str, Callable[[dict[str, Tensor]], Tensor]],
        *,
        checkpointing: bool = True,
        profile: bool = True,
    ) -> dict[str, Any]:
        """Steps of all ways in turn: gradient and AdamW; the first two batches warm up."""
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)

        def run(loss_of, batch) -> None:
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        seen: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        found: dict[str, Any] = {way: {"peak_gb": 0.0} for way in ways}
        for batch in batches:
            for way, loss_of in ways.items():
                self.sync()
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                run(loss_of, batch)
                host = time.perf_counter() - start
                self.sync()
                seen[way].append((time.perf_counter() - start, host))
                peak = torch.cuda.max_memory_allocated() if self.cuda else 1e6 * models.peak_mb()
                found[way]["peak_gb"] = max(found[way]["peak_gb"], round(peak / 1e9, 2))
        tokens = [int(batch["attention_mask"].sum()) for batch in batches[2:]]
        for way, loss_of in ways.items():
            wall, host = zip(*seen[way][2:], strict=True)
            found[way] |= {
                "seconds": round(statistics.median(wall), 4),
                "least_seconds": round(min(wall), 4),
                "host_seconds": round(statistics.median(host), 4),
                "tokens_per_second": round(sum(tokens) / sum(wall)),
            }
            if profile:
                found[way] |= self.profiled(partial(run, loss_of, batches[-1]))
        base = found[next(iter(ways))]
        for way in list(ways)[1:]:
            for name in ("seconds", "host_seconds", "gpu_seconds"):
                if base.get(name):
                    found[way][f"{name}_ratio"] = round(found[way][name] / base[name], 3)
        return found

    def profiled(self, run: Callable[[], None]) -> dict[str, float | int | None]:
        """Of one step: seconds of the GPU, kernels and waits; None where there is none."""
        from torch.profiler import ProfilerActivity, profile

        waits = None
        if self.cuda:
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                run()
            torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(one.message) for one in said)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        with profile(activities=kinds) as seen:
            run()
            self.sync()
        events = seen.key_averages()
        busy = sum(getattr(one, "self_device_time_total", 0) for one in events) / 1e6
        kernels = sum(one.count for one in events if "LaunchKernel" in one.key)
        return {
            "gpu_seconds": round(busy, 4) if self.cuda else None,
            "kernels": kernels if self.cuda else None,
            "waits": waits,
        }

    # -- the figures -------------------------------------------------------------------------

    def recipe(self, checkpointing: bool) -> dict[str, Any]:
        """The ways on LUME rows, and the minutes of 5 epochs of 1112 pairs by their medians."""
        batches = self.batches(self.steps + 2)
        ways = {
            way: step.VARIANTS[name](self.model, batches if known else [])
            for way, (name, known) in WAYS.items()
        }
        found = self.compare(self.model, batches, ways, checkpointing=checkpointing)
        per_epoch = PAIRS / self.pairs / 60
        found["recipe_minutes"] = {
            "ours": per_epoch * (found[FIRST]["seconds"] + (EPOCHS - 1) * found[LATER]["seconds"]),
            FINETUNE: per_epoch * EPOCHS * found[FINETUNE]["seconds"],
        }
        return found

    def documents(self) -> dict[str, Any]:
        """Eight rows of 2 048 tokens, labels throughout. They have no padding that packing would
        save, so fine-tuning takes them as they are."""
        rows = models.random_batch(8, self.long, self.long - 1, self.shape.vocabulary)
        batch = sent_batch(rows, self.device)
        ways = {
            "finetune": step.VARIANTS["finetune"](self.model, []),
            FIRST: step.VARIANTS["ours_first_epoch"](self.model, []),
            LATER: step.VARIANTS["ours"](self.model, [batch]),
        }
        return self.compare(self.model, [batch] * (2 + min(3, self.steps)), ways, profile=False)

    def match(self) -> dict[str, Any]:
        """A step of `match` with replay, its teacher's states known, against packed fine-tuning;
        and a look at 100 forget and 100 held-out rows, as `level` takes it."""
        from axolotl_unlearn.config import ObjectiveArgs
        from axolotl_unlearn.engine.step import step_loss
        from axolotl_unlearn.engine.token_scoring import Query, score_queries
        from axolotl_unlearn.engine.views import make_entries
        from axolotl_unlearn.reference.start import make_reference

        batches = self.batches(2 + max(1, self.steps // 2))
        recipe = (
            ("forget", {"objective": "match"}),
            ("retain", {"objective": "nll"}),
            ("retain", {"objective": "kl"}),
        )
        entries = make_entries([(side, ObjectiveArgs(**config)) for side, config in recipe])
        teacher = make_reference("cached", self.model, starting_adapter=False)
        with torch.no_grad():
            for batch in batches:
                step_loss(self.model, batch, entries, reference=teacher)
        ways = {
            FINETUNE: step.VARIANTS["finetune_packed"](self.model, []),
            "match": lambda batch: step_loss(self.model, batch, entries, reference=teacher).total,
        }
        found = self.compare(self.model, batches, ways, profile=False)
        rows = [
            Query.of(ids.tolist()[: int(mask.sum())])
            for batch in self.batches(25)
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        self.sync()
        start = time.perf_counter()
        score_queries(self.model.eval(), rows)
        self.sync()
        found["look_seconds"] = round(time.perf_counter() - start, 3)
        self.model.train()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shape on the CPU")
    parser.add_argument("--pairs", type=int, default=4, help="forget rows a step (as many retain)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=8, help="begin no figure after these")
    parser.add_argument("--only", nargs="+", help="these figures, in their order")
    parser.add_argument("--out", type=Path, help="folder of results-gpu.json [beside this file]")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; `--smoke` runs the same code on the CPU")
    with tempfile.TemporaryDirectory() as passing:
        if options.out is None:
            own = models.ROOT / "research" / "benchmarks"
            options.out = Path(passing) if options.smoke else own
        run_plans(options)


def run_plans(options: argparse.Namespace) -> None:
    """All figures that are missing, while there is time."""
    bench = Bench(options.smoke, options.pairs, 1 if options.smoke else options.steps)
    plans: dict[str, Callable[[], Any]] = {
        "checkpointing": partial(bench.recipe, True),
        "no_checkpointing": partial(bench.recipe, False),
        "match": bench.match,
        "documents_8_x_2048": bench.documents,
    }
    about = {
        "gpu": "none (smoke)" if options.smoke else torch.cuda.get_device_name(0),
        "commit": commit(),
        "pairs": options.pairs,
        "shape": list(vars(bench.shape).values())[:5],
    }
    path = options.out / "results-gpu.json"
    results = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if any(results.get(name) != value for name, value in about.items()):
        results = {"date": date.today().isoformat(), "machine": models.machine(), **about}
    start = time.perf_counter()
    for name, plan in ((name, plans[name]) for name in options.only or plans):
        if "error" in results.get(name, {"error": ""}):
            if time.perf_counter() - start > 60 * options.minutes:
                print(f"{name}: left for the next run", flush=True)
                continue
            begun = time.perf_counter()
            try:
                results[name] = plan()
            except Exception as error:  # the next figure may yet be had
                results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            results[name]["took"] = round(time.perf_counter() - begun, 1)
            bench.forget()
            path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        print(name, json.dumps(results[name]), flush=True)


def commit() -> str:
    """The commit that is measured; of a copy without git, what the environment says of it."""
    words = ["git", "-C", str(models.ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


if __name__ == "__main__":
    main()
