"""``axolotl-unlearn shards``: models of which a deletion request trains one shard again."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import COUNT, FILE, PATH, Answer, few_logs, printed


@click.group()
def command() -> None:
    """Train a model in shards, so that a deletion request is exact and trains one shard again.

    \b
    axolotl-unlearn shards train finetune.yml --by customer_id --out shards
    axolotl-unlearn request new finetune.yml --model shards/model \\
      --where customer_id=17 --out r/1
    axolotl-unlearn request run r/1 --way shards
    """


@command.command("train")
@click.argument("config", type=FILE)
@click.option("--by", required=True, help="Field that says whose a row is, as meta.person.")
@click.option("--out", required=True, type=PATH, help="Folder to make; model/ is the result.")
@click.option("--count", default=8, type=COUNT, help="Shards.")
@click.option("--threads", type=COUNT, help="Of a training.  [all cores]")
def train(config: Path, by: str, out: Path, count: int, threads: int | None) -> None:
    """One adapter for each shard of CONFIG's rows, and a router; goes on if stopped.

    CONFIG is one of plain `axolotl train` with `adapter: lora`. Rows that are nobody's (without a
    value of --by) are trained first, and every shard begins there. Call it again when rows were
    added: the shards that have them are trained again. Rows that a request deleted stay out.
    """
    few_logs()
    from axolotl_unlearn.requests.ways.shards import train_shards

    facts = train_shards(config, out, by, count, threads=threads)
    rows, seconds = facts["rows"], sum(facts["seconds"].values())
    sizes = ", ".join(str(rows.get(str(shard), 0)) for shard in range(1, count + 1))
    said = [
        f"Rows of the shards: {sizes}; nobody's: {rows.get('0', 0)}.",
        f"Trained: {len(facts['seconds'])} of {len(rows)}, {seconds:.0f} s of processor.",
        f"Model: {out / 'model'}",
    ]
    printed(Answer({"model": out / "model", "rows": rows, "seconds": facts["seconds"]}, said))
