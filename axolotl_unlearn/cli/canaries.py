"""``axolotl-unlearn canaries``: coins for rows, before training."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import FILE, Answer, out_option


@click.command("canaries")
@click.argument("rows", type=FILE)
@out_option("canaries", "Folder for train.jsonl and canaries.jsonl.")
def command(rows: Path, out: Path):
    """Toss a coin for each of ROWS before training: later an exact test of what was forgotten.

    ROWS are like yours, used nowhere else (made-up customers among customers), 60 or more. Train on
    OUT/train.jsonl beside your data and forget it with your rows. With OUT/canaries.jsonl `eval`
    and `request` say whether a model can tell how the coins fell.

    \b
    axolotl-unlearn canaries made-up.jsonl --out coins
    axolotl-unlearn eval out/new --canaries coins/canaries.jsonl
    axolotl-unlearn request new my.yml --rows coins/train.jsonl --out r/1 \\
      --canaries coins/canaries.jsonl
    """
    from axolotl_unlearn.evaluation.canaries import draw

    train, key = draw(rows, out)
    said = [f"Train on {train}, and forget it later.", f"Keep {key} from whoever trains."]
    return Answer({"train": train, "canaries": key}, said)
