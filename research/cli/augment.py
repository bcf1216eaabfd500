"""``python -m research augment self my.yml``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command("augment")
@click.argument("kind", type=click.Choice(["self", "inverted"]))
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="[out/augment/KIND.jsonl]")
@click.option("--model", help="Writes inverted answers; default: base_model of CONFIG.")
@click.option("--number", type=click.IntRange(1), default=1, show_default=True, help="A row.")
@click.option("--seed", type=int, default=42, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=1.0)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--memo", type=click.IntRange(1), help="Keep so many that the model knows least.")
def command(kind: str, config: Path, out: Path | None, **options: Any) -> None:
    """Write what the model itself says of the forget rows (BS-S), or the opposite of them (MEOW)."""
    from axolotl_unlearn.config.reading import read_config
    from research.methods.augment import augment

    out = out or Path("out/augment") / f"{kind}.jsonl"
    rows, forget = augment(kind, read_config(config), out, **options)
    role = "forget" if kind == "self" else "alternative"
    click.echo(f"{out}: {rows} rows for {forget} forget rows.")
    click.echo(f"In `datasets:`: {{path: {out}, ds_type: json, type: axolotl_unlearn.data.{role}}}")
