"""What a step asks of the host, counted without a GPU: kernels, waits, time of the host.

    make bench-counts
    python -m research.benchmarks.counts --memory

A GPU that waits for its host is as fast as the host starts kernels. How many that are, and how
often the host stops for an answer, does not depend on the device, so it is counted on a pretended
one (tests/pretend_device): 32 layers of a tiny width, NPO + NLL + KL with LoRA r32 and gradient
checkpointing, four pairs of LUME rows a step, bf16 weights. Writes research/results/waits.json. With --memory:
bytes allocated there, beside the estimate (research/results/memory.json).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.objectives import OBJECTIVES
from research.benchmarks import models, step
from research.benchmarks.gpu import recipe_batches, sent_batch

sys.path.append(str(models.ROOT / "tests"))
import offline  # noqa: E402, F401  before Axolotl, which reads it
import pretend_device  # noqa: E402

#: Time and memory are not what is counted; depth is.
SHAPE = models.Shape(64, 32, 128, 4, 512)
#: Way -> what it is in `step.VARIANTS`, and in the table.
WAYS = {
    "ours": ("ours_first_epoch", "ours, first epoch"),
    "later": ("ours", "ours, later epochs"),
    "cached": ("ours_cached", "ours, `reference: cached`"),
    "finetune_packed": ("finetune_packed", "plain fine-tuning, rows packed"),
}
PAIRS = 4


def make_step(way: str, device: str, known: list[Batch], shape: models.Shape):
    """A whole step of a way but for the optimizer: loss and gradients."""
    model = models.with_lora(models.olmo(shape, torch.bfloat16)).to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    loss_of = step.VARIANTS[WAYS[way][0]](model, [] if way == "finetune_packed" else known)

    def run(batch: Batch) -> None:
        loss_of(batch).backward()

    run(known[0])
    return run


def measure(rounds: int = 12, shape: models.Shape = SHAPE) -> dict[str, dict[str, float]]:
    """Counts of each way; and on the processor the least time of ``rounds`` steps, in turn."""
    pretend_device.start()
    rows = recipe_batches(2, PAIRS, shape.vocabulary)

    def made(device: str) -> tuple[dict[str, Callable], Batch]:
        # With what the collator says of them, as the trainer has them.
        known = [sent_batch(batch, device) for batch in rows]
        return {way: make_step(way, device, known, shape) for way in WAYS}, known[1]

    found, (steps, batch) = {}, made(pretend_device.DEVICE)
    for way, run in steps.items():
        with pretend_device.watch() as seen:
            run(batch)
        found[way] = {"operations": seen.operations, "syncs": seen.total}
    if rounds:
        (steps, batch), seconds = made("cpu"), {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, run in steps.items():
                start = time.process_time()
                run(batch)
                seconds[way].append(time.process_time() - start)
        for way, each in seconds.items():
            found[way]["host_ms"] = round(1e3 * min(each), 1)
    return found


def of_methods() -> dict[str, list]:
    """Waits of a step of every objective and preset through Axolotl, as the tests bound them."""
    from test_device_axolotl import METHODS, waits
    from test_every_method import block_to_run, make_stage

    groups = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        stage = make_stage(Path(folder))
        for name in METHODS:
            looks = "level" in block_to_run(name, stage)
            each = [step.total() for step in waits(stage, name)[1]]
            later, look = (each[3::2], each[2::2]) if looks else (each[3:] or each[2:], [])
            found = each[0], each[1], max(later), max(look, default="")
            groups[found].append(f"`{name}`")
    columns = ["objective or preset", "first step", "first epoch", "later", "with a look"]
    rows = [[", ".join(names), *map(str, waits)] for waits, names in groups.items()]
    return {"columns": columns, "rows": rows}


@torch.inference_mode()
def of_generation(shape: models.Shape = SHAPE, tokens: int = 32) -> dict[str, tuple[float, float]]:
    """Kernels and waits a new token, for eight rows of one length that nothing ends."""
    from test_eval_generate import Words
    from transformers import DynamicCache

    device = pretend_device.start()
    model = models.olmo(shape, torch.bfloat16).to(device).eval()
    model.generation_config.eos_token_id = None
    prompts = ["7 " * 12] * 8
    given = torch.tensor([Words()(one)["input_ids"] for one in prompts], device=device)

    def plain() -> list:
        ids, cache, new = given, DynamicCache(config=model.config), []
        for _ in range(tokens):
            ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            new.append(ids)
        return torch.cat(new, 1).tolist()

    ways = {
        "a plain cached forward": plain,
        "`model.generate`": lambda: model.generate(given, max_new_tokens=tokens, do_sample=False),
        "ours": lambda: generate_greedily(model, Words(), prompts, max_new_tokens=tokens),
    }
    found = {}
    for way, run in ways.items():
        with pretend_device.watch() as seen:
            run()
        found[way] = seen.operations / tokens, seen.total / tokens
    return found


def generation_table(found: dict[str, tuple[float, float]]) -> dict[str, list]:
    """`of_generation` as a table, beside a plain cached forward."""
    least = next(iter(found.values()))[0]
    cells = {way: [f"{n:.0f} ({n / least:.2f})", f"{w:.2f}"] for way, (n, w) in found.items()}
    return {
        "columns": ["one token of eight rows (by the first)", "kernels", "waits"],
        "rows": [[way, *own] for way, own in cells.items()],
    }


def of_memory() -> dict[str, list]:
    """What `check --full` says of memory beside the most that was allocated, with a model of 8
    layers of 256 and rows of 518 tokens: of objectives and presets that see the same, the first
    is run; then other trainings."""
    from test_device_axolotl import FULL, METHODS, estimate_and_peak, memory_stage
    from test_every_method import block_to_run

    def block_of(name: str, stage: Path) -> dict:
        """With the objectives of all its phases at once."""
        block = block_to_run(name, stage)
        for phase in block.pop("phases", ()):
            sides = {side: phase[side] for side in ("forget", "retain") if side in phase}
            for side, more in sides.items():
                block[side] = block.get(side, []) + (more if isinstance(more, list) else [more])
        return block

    kinds, rows = defaultdict(list), []
    for name in METHODS:
        args, seen = parse_unlearn(block_of(name, Path("stage"))), set()
        for side, entry in args.entries():
            one = OBJECTIVES[entry.objective]
            alone = one.slope is not None and one.slope(entry.parameters) is not None
            seen.add((one.roles(side), one.sees, alone, one.sees != "labels" and one.reference))
        kinds[frozenset(seen), args.pairing.retain_per_forget * bool(args.retain)].append(name)
    some = [["tofu-npo"], ["tofu-npo-kl"]]
    for more, groups, tokens, changes in (
        ("", kinds.values(), 500, {}),
        (", `gradient_checkpointing: false`", some, 500, {"gradient_checkpointing": False}),
        (", `micro_batch_size: 2`", some, 500, {"micro_batch_size": 2}),
        (", full fine-tuning", some, 500, FULL),
        (", rows of 2 048 tokens", some, 2030, {}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            stage = memory_stage(Path(folder), tokens)
            for names in groups:
                block = block_of(names[0], stage)
                block["data"] = {**(block.get("data") or {}), "max_length": 4096}
                said, peak = estimate_and_peak(stage, block, **changes)
                cells = f"{said / 1e6:.0f}", f"{peak / 1e6:.0f}", f"{said / peak:.2f}"
                rows.append([", ".join(f"`{name}`" for name in names) + more, *cells])
                print("ROW", json.dumps(rows[-1]), flush=True)
    columns = ["objective or preset", "estimate, MB", "peak, MB", "estimate / peak"]
    return {"columns": columns, "rows": rows}


def of_ways(found: dict[str, dict[str, float]]) -> dict[str, list]:
    """`measure` as a table, beside packed fine-tuning."""
    base, rows = found["finetune_packed"], []
    for way, one in found.items():
        cells = [f"{one[x]:.0f} ({one[x] / base[x]:.2f})" for x in ("operations", "host_ms")]
        rows.append([WAYS[way][1], *cells, str(one["syncs"])])
    return {
        "columns": ["one step (by the last)", "kernels", "ms of the host", "waits"],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory", action="store_true", help="write results/memory.json instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    about = {"date": date.today().isoformat(), "command": "make bench-counts"}
    about |= {"machine": models.machine(), "rounds": given.rounds}
    if given.memory:
        pretend_device.start()
        del about["rounds"]
        about["command"] = "python -m research.benchmarks.counts --memory"
        write_result("memory", about | {"tables": {"methods": of_memory()}})
        return
    found = measure(given.rounds)
    tables = {"ways": of_ways(found), "methods": of_methods()}
    tables["generation"] = generation_table(of_generation())
    write_result("waits", about | found | {"tables": tables})


def write_result(name: str, content: dict) -> None:
    """To research/results."""
    path = models.ROOT / "research" / "results" / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
