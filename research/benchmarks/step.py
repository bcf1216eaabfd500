"""Seconds and memory of one training step: ours, plain fine-tuning, and two other ways.

    python -m research.benchmarks.step                    # the table
    python -m research.benchmarks.step --variant ours     # one variant, one JSON line

All variants see the same rows with the same LoRA on the same model, each in a process of its own.
The other ways are written anew from their formulas (docs/objectives.md; ZJUKLAB arXiv 2503.21088
and its released code, the framework's TOFU-style trainers), not copied:

- ``zjuklab``: a second full model as reference; rows left-padded to 256; NPO from two mean losses;
  retain rows run twice (once for the loss, once for KL); KL over all positions of all rows.
- ``framework``: a second full model as reference; forget and retain rows run apart, padded to
  the longest; sums of label log-probs and KL from full float32 logits.
- ``finetune``: the model's own loss on the same eight rows.
- ``finetune_packed``: the same with the rows laid end to end, as Axolotl's sample packing would.
- ``trl``: the loss of TRL's SFT trainer, which collates them itself, without padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from research.benchmarks import models

WARM_UP = 2
RECIPE = (
    ("forget", {"objective": "npo", "weight": 0.4, "beta": 0.1}),
    ("retain", {"objective": "nll", "weight": 0.4}),
    ("retain", {"objective": "kl", "weight": 0.2}),
)


def ours(
    model, known: list[dict[str, Tensor]], *, mode: str = "auto", kl: bool = True, first=False
):
    """Our step. ``known`` are batches of an earlier epoch: the reference has seen their rows.

    Args:
        first: the reference forgets them before each step, which is then one of the first epoch.
    """
    from axolotl_unlearn.config import ObjectiveArgs
    from axolotl_unlearn.engine.step import step_loss
    from axolotl_unlearn.engine.views import make_entries
    from axolotl_unlearn.reference.start import make_reference

    recipe = [r for r in RECIPE if kl or r[1]["objective"] != "kl"]
    entries = make_entries([(side, ObjectiveArgs(**config)) for side, config in recipe])
    reference = make_reference(mode, model, starting_adapter=False)
    folder = tempfile.TemporaryDirectory()  # as a run keeps them
    if mode == "auto":
        reference.keep_for_run(Path(folder.name), 4)
    for batch in known:
        with torch.no_grad():
            step_loss(model, batch, entries, reference=reference)

    def loss(batch, folder=folder):
        if first:
            getattr(reference._known, "_where", reference._known).clear()
        return step_loss(model, batch, entries, reference=reference).total

    return loss


def finetune(model, known):
    """Plain LoRA fine-tuning through the model's own loss."""

    def loss(batch):
        keys = ("input_ids", "attention_mask", "labels")
        return model(**{k: batch[k] for k in keys}, use_cache=False).loss

    return loss


def finetune_packed(model, known):
    """Plain LoRA fine-tuning on rows laid end to end."""

    def loss(batch):
        real = batch["attention_mask"].bool()
        positions = real.cumsum(-1) - 1
        labels = batch["labels"].clone()
        labels[:, 0] = -100  # no row predicts the next one's first token
        return model(
            input_ids=batch["input_ids"][real][None],
            position_ids=positions[real][None],
            labels=labels[real][None],
            use_cache=False,
        ).loss

    return loss


def trl(model, known):
    """Fine-tuning by TRL's trainer, with ``padding_free``."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(kinds.WordLevel({"a": 0}, unk_token="a"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="a")
    config = {"padding_free": True, "max_length": None, "gradient_checkpointing": False}
    config |= {"use_cpu": True, "bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    config, rows = SFTConfig(tempfile.mkdtemp(), **config), Dataset.from_dict({"input_ids": [[0]]})
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=words)

    def loss(batch):
        keys, lengths = ("input_ids", "labels"), batch["attention_mask"].sum(-1).tolist()
        rows = [{k: batch[k][i, :n].tolist() for k in keys} for i, n in enumerate(lengths)]
        return trainer.compute_loss(model, trainer.data_collator(rows))

    return loss


def zjuklab(model, known):
    """.4 NPO (token mean of the batch) + .4 KL(ref || policy), all positions + .2 NLL."""
    reference = _second_model(model)

    def side(batch, role):
        return _left_padded(batch, batch["role"] == role, models.MAX_LENGTH)

    def loss(batch):
        forget, retain = side(batch, 0), side(batch, 1)
        loss_forget = model(**forget, use_cache=False).loss
        with torch.no_grad():
            ref_forget = reference(**forget, use_cache=False).loss
        npo = -F.logsigmoid(0.1 * (loss_forget - ref_forget)) * 2 / 0.1
        nll = model(**retain, use_cache=False).loss
        with torch.no_grad():
            ref_logits = reference(**retain, use_cache=False).logits
        kl = _kl(model(**retain, use_cache=False).logits, ref_logits)
        return 0.4 * npo + 0.4 * kl + 0.2 * nll

    return loss


def framework(model, known):
    """NPO over sequence sums + NLL + KL(ref || policy), each side in a forward of its own."""
    reference = _second_model(model)

    def part(batch, role):
        rows = batch["role"] == role
        length = int(batch["attention_mask"][rows].sum(-1).max())
        keys = ("input_ids", "attention_mask", "labels")
        return {k: batch[k][rows, :length] for k in keys}

    def sequence_nll(which, rows):
        logits = which(**rows, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(
            logits.transpose(1, 2), rows["labels"][:, 1:], ignore_index=-100, reduction="none"
        )
        return losses.sum(-1)

    def loss(batch):
        forget, retain = part(batch, 0), part(batch, 1)
        policy = sequence_nll(model, forget)
        with torch.no_grad():
            ref = sequence_nll(reference, forget)
        npo = (-2 / 0.1 * F.logsigmoid(0.1 * (policy - ref))).mean()
        out = model(**retain, use_cache=False)
        with torch.no_grad():
            ref_logits = reference(**retain, use_cache=False).logits
        return 0.4 * npo + 0.4 * out.loss + 0.2 * _kl(out.logits, ref_logits)

    return loss


def _kl(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(reference || policy) of float32 logits, a mean over positions."""
    p, q = (x.float().log_softmax(-1).flatten(0, 1) for x in (logits, reference))
    return F.kl_div(p, q, reduction="batchmean", log_target=True)


def _second_model(model) -> nn.Module:
    """The reference of the other ways: a whole model of its own."""
    own = model.config
    sizes = own.hidden_size, own.num_hidden_layers, own.intermediate_size, own.num_attention_heads
    shape = models.Shape(*sizes, own.vocab_size)
    base = models.olmo(shape, dtype=next(model.parameters()).dtype)
    return base.eval().requires_grad_(False)


def _left_padded(batch: dict[str, Tensor], rows: Tensor, width: int) -> dict[str, Tensor]:
    out = {}
    for key, fill in (("input_ids", models.PAD), ("attention_mask", 0), ("labels", -100)):
        of_rows = zip(batch[key][rows], batch["attention_mask"][rows].sum(-1).tolist(), strict=True)
        out[key] = torch.stack([F.pad(x[:n], (width - n, 0), value=fill) for x, n in of_rows])
    return out


VARIANTS = {
    "ours": ours,
    "ours_first_epoch": lambda m, known: ours(m, [], first=True),
    "ours_cached": lambda m, known: ours(m, known, mode="cached"),
    "ours_npo_nll": lambda m, known: ours(m, known, kl=False),
    "finetune": finetune,
    "finetune_packed": finetune_packed,
    "trl": trl,
    "framework": framework,
    "zjuklab": zjuklab,
}


def measure(variant: str, *, steps: int, labels: str, precision: str, pairs: int = 4) -> dict:
    """Run one variant in this process.

    Returns:
        ``seconds`` and ``cpu_seconds`` of each step (forward, backward, AdamW), ``peak_mb`` of
        the process over all steps, ``base_mb`` before the first, ``tokens`` of each batch.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = models.with_lora(models.olmo(dtype=dtype)).train()
    rows = list(models.batches(WARM_UP + steps, pairs, labels))
    known = [] if variant == "ours_first_epoch" else rows
    loss_of = VARIANTS[variant](model, known if variant.startswith("ours") else [])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    seconds, cpu = [], []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
    gc.collect()
    for number, batch in enumerate(rows):
        if number == WARM_UP - 1:
            models.reset_peak()
        start, start_cpu = time.perf_counter(), time.process_time()
        with autocast:
            loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        del loss
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    return {
        "variant": variant,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mb": models.peak_mb(),
        "loss": value,
        "tokens": [int(b["attention_mask"].sum()) for b in rows[WARM_UP:]],
        "padded": [b["input_ids"].numel() for b in rows[WARM_UP:]],
    }


def run_apart(module: str, arguments: list[str]) -> dict:
    """Run a module with ``arguments`` in a process of its own; its last line is the result."""
    words, beside = [sys.executable, "-m", module, *arguments], {"PYTHONPATH": str(models.ROOT)}
    how = {"capture_output": True, "text": True, "cwd": models.ROOT, "env": os.environ | beside}
    done = subprocess.run(words, **how)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(
    variants: list[str],
    *,
    steps: int = 5,
    rounds: int = 1,
    labels: str = "answer",
    precision: str = "float32",
    threads: int = 2,
    say=print,
) -> dict:
    """Each variant in its own process, ``rounds`` times in turn.

    Returns:
        variant -> ``seconds`` (median), ``cpu_seconds``, ``peak_mb``; under ``ratios`` the median
        over paired steps of ours / other.
    """
    results: dict[str, dict] = {}
    for _ in range(rounds):
        for variant in variants:
            words = ["--variant", variant, "--steps", str(steps), "--labels", labels]
            words += ["--precision", precision, "--threads", str(threads)]
            got = run_apart("research.benchmarks.step", words)
            kept = results.setdefault(variant, {"all": [], "cpu": [], "peak_mb": 0.0})
            kept["all"] += got["seconds"]
            kept["cpu"] += got["cpu_seconds"]
            kept["tokens"], kept["padded"] = got["tokens"], got["padded"]
            kept["peak_mb"] = max(kept["peak_mb"], got["peak_mb"])
            say(
                f"{labels:9} {precision:9} {variant:18} "
                f"{statistics.median(got['seconds']):7.2f} s  {got['peak_mb']:7.0f} MB"
            )
    table: dict[str, dict] = {}
    for variant, kept in results.items():
        table[variant] = {
            "seconds": round(statistics.median(kept["all"]), 3),
            "cpu_seconds": round(statistics.median(kept["cpu"]), 3),
            "peak_mb": round(kept["peak_mb"]),
            "steps": [round(x, 3) for x in kept["all"]],
            "cpu_steps": [round(x, 3) for x in kept["cpu"]],
        }
    first = next(iter(results.values()))
    table["rows"] = {"tokens": first["tokens"], "padded": first["padded"]}
    table["ratios"] = ratios(table)
    return table


def ratios(table: dict) -> dict[str, dict[str, float]]:
    """Medians of paired ratios, ours against the others."""
    found: dict[str, dict[str, float]] = {}

    def add(name: str, over: str, under: str) -> None:
        if over in table and under in table:
            a, b = table[over], table[under]
            found[name] = {
                key: round(statistics.median(x / y for x, y in zip(a[s], b[s], strict=True)), 3)
                for key, s in (("time", "steps"), ("cpu_time", "cpu_steps"))
            }
            found[name]["memory"] = round(a["peak_mb"] / b["peak_mb"], 3)

    for mine in ("ours", "ours_first_epoch", "ours_cached", "ours_npo_nll"):
        for other in ("finetune", "finetune_packed", "trl", "framework", "zjuklab"):
            add(f"{mine} / {other}", mine, other)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", choices=[*VARIANTS, "all"], default="all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--labels", choices=["answer", "document"], default="answer")
    parser.add_argument("--precision", choices=["float32", "autocast", "bf16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    common = {"steps": options.steps, "labels": options.labels, "precision": options.precision}
    if options.variant != "all":
        print(json.dumps(measure(options.variant, **common)))
        return
    table = compare(list(VARIANTS), rounds=options.rounds, threads=options.threads, **common)
    print(json.dumps(table["ratios"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
