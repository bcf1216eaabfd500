"""``axolotl-unlearn shards``: models of which a deletion request trains one shard again."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import COUNT, FILE, PATH, Answer, few_logs


@click.group()
def command() -> None:
    """Train a model in shards, so that a deletion request is exact and trains one shard again."""


@command.command("train")
@click.argument("config", type=FILE)
@click.option("--by", required=True, help="Field that says whose a row is, as meta.person.")
@click.option("--out", required=True, type=PATH, help="Folder to make; model/ is the result.")
@click.option("--count", default=8, type=COUNT, help="Shards.")
@click.option("--threads", type=COUNT, help="Of a training.  [all cores, or as before]")
def train(config: Path, by: str, out: Path, count: int, threads: int | None):
    """One adapter for each shard of CONFIG's rows, and a router; goes on if stopped.

    CONFIG is one of plain `axolotl train` with `adapter: lora`. Rows that are nobody's (without a
    value of --by) are trained first, and every shard begins there. Call it again when rows were
    added: the shards that have them are trained again. Rows that a request deleted stay out.
    """
    few_logs()
    from axolotl_unlearn.requests.ways.shards import train_shards

    facts = train_shards(config, out, by, count, threads=threads)
    rows, trained = facts["rows"], facts["trained"]
    said = [
        f"Rows of the shards (0 is nobody's): {', '.join(f'{n}: {rows[n]}' for n in rows)}.",
        f"Trained: {len(trained)} of {len(rows)}. Model: {out / 'model'}",
    ]
    return Answer({"model": out / "model", "rows": rows, "trained": trained}, said)
