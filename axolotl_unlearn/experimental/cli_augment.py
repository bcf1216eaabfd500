"""``axolotl-unlearn augment idk my.yml``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("augment")
@click.argument(
    "kind", type=click.Choice(["idk", "alternatives", "inverted", "self", "distil", "twins"])
)
@click.argument("config", type=_FILE)
@click.option("--out", type=click.Path(path_type=Path), help="[out/augment/KIND.jsonl]")
@click.option("--model", help="Writes alternatives, inverted [CONFIG's base_model] and distil.")
@click.option("--number", type=click.IntRange(1), default=1, show_default=True, help="A row.")
@click.option("--seed", type=int, default=42, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=1.0)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--memo", type=click.IntRange(1), help="Keep so many that the model knows least.")
@click.option("--store", type=click.Path(path_type=Path), help="What models wrote [beside --out].")
def command(kind: str, config: Path, out: Path | None, **options: Any) -> None:
    """Write other answers to the forget rows of CONFIG, or what the model itself says of them.

    \b
    idk           sentences that decline                (PO, IdkDPO, FLAT)
    alternatives  plausible answers with other facts    (AltPO), by a model
    inverted      answers that say the opposite         (MEOW), by a model
    self          what the model says after the prompt  (BS-S): more rows to forget
    distil        what a teacher (--model) says there   (for `po` beside `match`)
    twins         the row with other names and numbers  (`reference: {twins: FILE}`)

    With --memo (MEOW) the model of CONFIG goes on from every fifth character of each answer that
    was written, and those answers are kept whose rest it says least.

    The file holds prompts of the forget rows, and `self` may repeat their answers:
    `axolotl-unlearn clean` removes it.

    \b
    Example:
      axolotl-unlearn augment inverted my.yml --model an/instruct-model --number 7 --memo 3
    """
    from rich.progress import track

    from axolotl_unlearn.config.reading import read_config
    from axolotl_unlearn.experimental.augment import augment

    content = read_config(config)
    out = out or Path("out/augment") / f"{kind}.jsonl"
    shown = lambda texts: track(texts, description=kind, transient=True)  # noqa: E731
    done = augment(kind, content, out, progress=shown, **options)
    known = f", {done.kept} known from before" if kind not in ("idk", "twins") else ""
    click.echo(f"{out}: {done.rows} rows for {done.forget} forget rows{known}.")
    if done.unchanged:
        said = "rows have no name, date or number: write their twins by hand."
        click.echo(f"{done.unchanged} {said}", err=True)
    if kind == "twins":
        click.echo(
            "In `forget:` of the config: {objective: match, reference: cached}, "
            f"{{objective: nckd, reference: {{twins: {out}}}}}"
        )
        return
    kind = f"type: axolotl_unlearn.data.{done.role}"
    click.echo(f"In `datasets:` of the config: {{path: {out}, ds_type: json, {kind}}}")
