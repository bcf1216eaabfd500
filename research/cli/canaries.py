"""`python -m research canaries`: planted pairs of documents, and a certificate from them."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import FOLDER, data_option


@click.group("canaries")
def command() -> None:
    """A certificate by planted pairs of documents, one trained and one not.

    \b
    python -m research canaries make --data my-data --out my-data-canaries
    # train, unlearn and evaluate on my-data-canaries, then
    python -m research canaries judge out/eval
    """


@command.command()
@data_option("Folder with forget, member and nonmember.")
@click.option("--out", type=FOLDER, required=True, help="New folder: the same with canaries.")
@click.option("--pairs", default=300, show_default=True)
@click.option(
    "--texts",
    type=click.Path(path_type=Path),
    help="Fresh documents like yours, two a pair.  [default: made-up biographies]",
)
@click.option("--seed", type=int, help="Of documents and coins.  [default: drawn]")
def make(data_dir: Path, out: Path, pairs: int, texts: Path | None, seed: int | None) -> None:
    """Copy a data folder with pairs in it, and write which document of each was planted."""
    from research.probes.canaries import plant

    key = plant(data_dir, out, pairs=pairs, texts=texts, seed=seed)
    click.echo(f"{pairs} pairs in {out}; the key is {key}: keep it from whoever trains.")


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="[canaries.json beside the data]")
@click.option(
    "--margin", default=0.1, show_default=True, help="Largest distance from half of the pairs."
)
def judge(folder: Path, key: Path | None, margin: float) -> None:
    """Certify the models of an evaluation (FOLDER) on data with canaries."""
    from axolotl_unlearn.files import write_json
    from research.probes.canaries import judge_canaries

    found = judge_canaries(folder, margin=margin, key=key)
    for one in found.values():
        click.echo(one["sentence"])
    write_json(folder / "canaries.json", found)
    click.echo(f"Written: {folder / 'canaries.json'}")
