"""``python -m research make-data``: write the demo's synthetic data."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click

from research.worlds.generate import Sizes, make_data


def _size_options(function):
    for size in reversed(fields(Sizes)):
        option = click.option(
            f"--{size.name.replace('_', '-')}",
            size.name,
            type=int,
            default=size.default,
            show_default=True,
        )
        function = option(function)
    return function


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo/data"),
    show_default=True,
    help="Folder that receives the files.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all documents and orders.")
@_size_options
def command(out: Path, seed: int, **sizes: int) -> None:
    """Write synthetic stories, personal data and facts to forget and to retain.

    Also members, non-members, general knowledge, the stream that the demo memorises, and
    validation and test halves. The sizes are documents a side, rows a pass, or passes.

    \b
    python -m research make-data --out out/demo/data --seed 0
    python -m research make-data --out out/big --facts-forget 160 --nonmembers 320
    """
    from rich.console import Console
    from rich.table import Table

    manifest = make_data(out, seed=seed, sizes=Sizes(**sizes))
    table = Table(title=f"Synthetic data in {out}, seed {seed}")
    for heading in ("file", "rows", "validation", "test"):
        table.add_column(heading, justify="left" if heading == "file" else "right")
    files = manifest["files"]
    for name in (name for name in files if "/" not in name):
        halves = [files.get(f"{half}/{name}", {}).get("rows") for half in ("validation", "test")]
        table.add_row(
            f"{name}.jsonl",
            str(files[name]["rows"]),
            *("" if rows is None else str(rows) for rows in halves),
        )
    Console().print(table)
