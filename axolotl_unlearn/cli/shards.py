"""``axolotl unlearn shards``: models of which a deletion request trains one part again."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer

_PATH = click.Path(path_type=Path)


@click.group()
def command() -> None:
    """Train a model in shards, so that a deletion request is exact and trains one shard again.

    \b
    axolotl unlearn shards train finetune.yml --count 4 --slices 2 --by person --out shards
    axolotl unlearn request new finetune.yml --model shards/model --where person=ada --out r/1
    axolotl unlearn request run r/1 --way shards
    """


@command.command("train")
@click.argument("config", type=_PATH)
@click.option("--out", required=True, type=_PATH, help="Folder to make; model/ is the result.")
@click.option("--count", default=4, show_default=True, type=click.IntRange(1), help="Shards.")
@click.option(
    "--slices", default=2, show_default=True, type=click.IntRange(1), help="Of each shard."
)
@click.option("--by", help="Field whose rows stay together, as meta.person.  [document, id]")
@click.option(
    "--merge",
    "method",
    default="linear",
    show_default=True,
    type=click.Choice(("linear", "ties", "dare_linear", "dare_ties")),
    help="Method of mergekit.",
)
@click.option("--sum", "summed", is_flag=True, help="Add the shards' changes; else their mean.")
@click.option("--density", default=0.8, show_default=True, help="Of ties and dare: entries kept.")
@click.option("--seed", default=0, show_default=True, help="Of dare's random drops.")
@click.option("--key", type=_PATH, help="shards.key of other shards: rows fall into equal places.")
@click.option(
    "--threads-each", default=1, show_default=True, type=click.IntRange(1), help="Of a training."
)
@click.option(
    "--processes", default=1, show_default=True, type=click.IntRange(1), help="Of a training."
)
@click.option("--threads", type=click.IntRange(1), help="Of all together.  [all cores]")
def train(
    config: Path,
    out: Path,
    count: int,
    slices: int,
    by: str | None,
    method: str,
    summed: bool,
    density: float,
    seed: int,
    key: Path | None,
    threads_each: int,
    processes: int,
    threads: int | None,
) -> None:
    """Train every shard of CONFIG's rows slice by slice, and merge; goes on if stopped.

    CONFIG is one of plain `axolotl train`. Rows of one person or document are in one shard.

    \b
    Example:
      axolotl unlearn shards train finetune.yml --count 8 --slices 4 --by person --out shards
    """
    import os

    os.environ.setdefault("AXOLOTL_LOG_LEVEL", "WARNING")
    from axolotl_unlearn.merging.recipe import Recipe
    from axolotl_unlearn.requests.ways.shards import Sharding, read_key, train_shards

    recipe = Recipe(method=method, density=density, scale="sum" if summed else "average", seed=seed)
    given = Sharding(count, slices, by, recipe, threads_each, processes)
    facts = train_shards(config, out, given, key=read_key(key) if key else None, threads=threads)
    answer(model=out / "model", **facts)
    sizes = [
        sum(n for name, n in facts["rows"].items() if name.split("-")[0] == str(shard))
        for shard in range(1, count + 1)
    ]
    click.echo(f"Rows of the shards: {', '.join(map(str, sizes))}.")
    if facts["unnamed"]:
        click.echo(
            f"{facts['unnamed']} rows do not say to whom they belong; each stands for itself."
        )
    click.echo(f"Model: {out / 'model'} (recipe: {out / 'merge.yml'})")
