"""``python -m research fisher-start my.yml``"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("fisher-start")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/fisher-start"))
@click.option(
    "--rows", type=click.IntRange(1), default=200, show_default=True, help="Of each side."
)
def command(config: Path, out: Path, rows: int) -> None:
    """Start the LoRA of CONFIG where forget rows depend on the weights and retain rows do not.

    LoKU's initialisation (arXiv 2408.06621): the part of each weight that matters most by the ratio
    of Fisher informations moves from the base into the adapter. Their sum is the model as it was.
    The information takes twice the memory of the weights that the LoRA is for.
    """
    from axolotl_unlearn.config.reading import read_config
    from research.merging.fisher_start import fisher_start

    done = fisher_start(read_config(config), out, rows=rows)
    click.echo(f"{done} weights start in the adapter. In the config that forgets:")
    click.echo(f"base_model: {out / 'base'}\nlora_model_dir: {out / 'adapter'}")
