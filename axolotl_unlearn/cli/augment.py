"""``axolotl-unlearn augment idk my.yml``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import ABOVE_ZERO, COUNT, FILE, PATH, Answer


@click.command("augment")
@click.argument("kind", type=click.Choice(["idk", "alternatives"]))
@click.argument("config", type=FILE)
@click.option("--out", type=PATH, help="[out/augment/KIND.jsonl]")
@click.option("--model", help="Writes alternatives; default: base_model of CONFIG.")
@click.option("--number", type=COUNT, default=1, show_default=True, help="A row.")
@click.option("--seed", type=int, default=42, show_default=True)
@click.option("--temperature", type=ABOVE_ZERO, default=1.0)
@click.option("--max-new-tokens", type=COUNT, default=128, show_default=True)
def command(kind: str, config: Path, out: Path | None, **options: Any):
    """Write other answers to the forget rows of CONFIG.

    \b
    idk           sentences that decline                (PO, IdkDPO, FLAT)
    alternatives  plausible answers with other facts    (AltPO), by a model

    The file holds prompts of the forget rows: it is as private as these.

    \b
    axolotl-unlearn augment alternatives my.yml --model an/instruct-model
    """
    from rich.progress import track

    from axolotl_unlearn.config.reading import read_config
    from axolotl_unlearn.data.augment import augment

    out = out or Path("out/augment") / f"{kind}.jsonl"
    shown = lambda rows: track(rows, description=kind, transient=True)  # noqa: E731
    rows, forget = augment(kind, read_config(config), out, progress=shown, **options)
    entry = f"{{path: {out}, ds_type: json, type: axolotl_unlearn.data.alternative}}"
    said = [
        f"{out}: {rows} rows for {forget} forget rows.",
        f"In `datasets:` of the config: {entry}",
    ]
    return Answer({"file": out, "rows": rows, "forget": forget}, said)
